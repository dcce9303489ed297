"""Chat templates of Hugging Face tokenizers: Jinja source, and the environment that it expects.

The conventions (globals, filters, block trimming, the `generation` tag) are those documented at
https://huggingface.co/docs/transformers/chat_templating_writing.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from prorl_envs.errors import InputError
from prorl_envs.tools.types import JsonObject

ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})


class _GenerationTag(Extension):
    """Jinja tag `{% generation %}...{% endgeneration %}`, which marks assistant tokens for training masks.
    The ledger already records these tokens, so this tag only prints its body."""

    tags = {"generation"}  # noqa: RUF012  (Extension declares it as an instance attribute)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: Jinja source.
        variables: further variables the template may use (bos_token, eos_token, enable_thinking, ...).
        now: local time, for templates that print a date.

    Raises:
        InputError: the source is not valid Jinja.
    """

    def __init__(
        self,
        source: str,
        variables: Mapping[str, Any] | None = None,
        *,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise InputError(f"the chat template is not valid Jinja: {error}") from error
        self._variables = dict(variables or {})

    def render(
        self, messages: Sequence[JsonObject], tools: Sequence[JsonObject] = (), *, generation_prompt: bool
    ) -> str:
        """Return the conversation as text.

        Args:
            messages: normalised messages (see `normalise`).
            tools: tools in OpenAI function format.
            generation_prompt: append the start of the assistant's turn.

        Raises:
            InputError: the template refuses this conversation.
        """
        try:
            return self._template.render(
                {
                    **self._variables,
                    "messages": list(messages),
                    "tools": list(tools) or None,
                    "add_generation_prompt": generation_prompt,
                }
            )
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise InputError(
                f"the chat template refuses this conversation: {error}",
                hint="compare the order of roles and the message fields with what the template expects",
            ) from error


def normalise(message: Mapping[str, Any], *, arguments_as_text: bool = False) -> JsonObject:
    """Return a message in the format that templates expect: text content, parsed tool-call arguments.

    Args:
        message: message in OpenAI's format.
        arguments_as_text: return tool-call arguments as JSON text, for templates that print them unchanged.

    Raises:
        InputError: unknown role, or content that is not text.
    """
    role = message.get("role")
    if role not in ROLES:
        raise InputError(f"unknown message role {role!r}", hint=f"one of {', '.join(sorted(ROLES))}")
    plain = {**message, "content": _text(message.get("content"))}
    calls = message.get("tool_calls")
    thought = message.get("reasoning_content")
    if thought and not (calls and plain["content"]):  # gpt-oss takes only one of them beside calls
        plain.setdefault("thinking", thought)
    if calls:
        plain["tool_calls"] = [_with_arguments(call, as_text=arguments_as_text) for call in calls]
    else:
        plain.pop("tool_calls", None)
    return plain


def _text(content: Any) -> str:
    """Return the text of OpenAI content: None, a string, or text parts. The parts are joined here and not by
    the template, so that two parts cannot form a control token together."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(
        isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in content
    ):
        return "".join(part["text"] for part in content)
    raise InputError("message content is neither text nor text parts", hint="images and audio have no ids")


def _with_arguments(call: Mapping[str, Any], *, as_text: bool) -> JsonObject:
    """Return a tool call with parsed arguments, or with their JSON text if `as_text`.

    OpenAI sends arguments as a JSON string; templates print them with `tojson`, which would quote them twice.
    """
    function = call.get("function")
    if not isinstance(function, Mapping):
        raise InputError("a tool call has no function", hint='{"type": "function", "function": {...}}')
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            raise InputError(f"the arguments of a tool call are not JSON: {error}") from error
    if as_text:
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return plain JSON, which templates expect; Jinja's own `tojson` escapes for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)
