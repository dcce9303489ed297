"""One OpenAI-compatible chat server, which takes messages and gives text: the lesser mode.

The server renders the prompt and reads the tool calls itself, so nobody here knows which ids it saw or
sampled. What it answers is written as the model's own template would write it, tokenised, and marked as
inexact: a trajectory with such a turn can be graded and read, and is never offered to a trainer.

Protocol: `POST /v1/chat/completions` (https://platform.openai.com/docs/api-reference/chat).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

import msgspec

from prorl_envs.errors import ModelError
from prorl_envs.policy.clients import Unsteered
from prorl_envs.policy.link import LinkOptions, first_model, session_headers
from prorl_envs.policy.protocol import ProtocolError
from prorl_envs.policy.types import Conversation, FinishReason, Sampled, Sampling

#: Most tool calls of one answer.
MAX_CALLS = 64


class _Function(msgspec.Struct):
    name: str
    arguments: str = ""


class _Call(msgspec.Struct):
    function: _Function


class _Message(msgspec.Struct):
    content: str | None = None
    tool_calls: list[_Call] | None = None


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice]


class OpenAIChatClient(Unsteered):
    """Samples turns from one server, as text. Implements `ModelClient`, `ChatClient` and `Steerable`.

    Args:
        url: base URL, with or without `/v1`.
        encode: ids of an assistant message in OpenAI's shape (`TemplateRenderer.assistant`).
        model: model name; None takes the first the server names.
        options: of `ServerLink`.

    Raises:
        InputError: the URL is not one.
    """

    protocol = "openai"

    def __init__(
        self,
        url: str,
        *,
        encode: Callable[[Mapping[str, Any]], list[int]],
        model: str | None = None,
        **options: Unpack[LinkOptions],
    ) -> None:
        super().__init__(url, **options)
        self._encode = encode
        self._model = model

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str) -> Sampled:
        """Refused: see `chat`.

        Raises:
            ModelError: always.
        """
        raise ModelError(
            f"{self.url} takes no token ids",
            hint="only the rollout service's own agent loop can use a chat server",
        )

    async def chat(self, conversation: Conversation, sampling: Sampling, *, session: str) -> Sampled:
        """See `ChatClient.chat`.

        Raises:
            ServerUnavailable: no answer within the attempts.
            ProtocolError: the server refuses the request, or answers in another shape.
        """
        if self._model is None:
            self._model = first_model(await self._link.request("GET", "/v1/models"), self.url).id
        body = encode_request(self._model, conversation, sampling)
        answer = await self._link.request("POST", "/v1/chat/completions", body, session_headers(session))
        message, reason = read_answer(answer, self.url)
        # A tokenisation may be longer than what the server counted; a turn never exceeds what was asked.
        ids = self._encode(message)
        if len(ids) > sampling.max_tokens:
            ids, reason = ids[: sampling.max_tokens], "length"
        return Sampled(
            ids=tuple(ids),
            logprobs=(0.0,) * len(ids),
            finish_reason=reason,
            weight_version="",
            server=self.url,
            exact=False,
        )


def encode_request(model: str, conversation: Conversation, sampling: Sampling) -> bytes:
    """The body of one request."""
    body: dict[str, Any] = {
        "model": model,
        "messages": list(conversation.messages),
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "n": 1,
        "stream": False,
    }
    if conversation.tools:
        body["tools"] = [tool.to_openai() for tool in conversation.tools]
    if sampling.seed is not None:
        body["seed"] = sampling.seed
    return msgspec.json.encode(body)


def read_answer(body: bytes, server: str) -> tuple[dict[str, Any], FinishReason]:
    """The assistant message of a completion, in OpenAI's shape with arguments as objects, and why it ended.

    Raises:
        ProtocolError: it is of another shape, or says nothing.
    """
    try:
        answer = msgspec.json.decode(body, type=_Answer)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ProtocolError(f"{server} did not answer with a chat completion: {error}") from error
    if len(answer.choices) != 1:
        raise ProtocolError(f"{server} answered with {len(answer.choices)} choices instead of one")
    choice = answer.choices[0]
    content, calls = choice.message.content or "", choice.message.tool_calls or []
    if len(calls) > MAX_CALLS:
        raise ProtocolError(f"{server} answered with {len(calls)} tool calls")
    tool_calls: list[dict[str, Any]] = []
    for call in calls:
        arguments = _arguments(call.function.arguments)
        if arguments is None:  # the model's mistake, kept as the model would have written it
            name = json.dumps(call.function.name)
            written = f'<tool_call>\n{{"name": {name}, "arguments": {call.function.arguments}\n</tool_call>'
            content = f"{content}\n{written}".strip()
        else:
            function = {"name": call.function.name, "arguments": arguments}
            tool_calls.append({"id": f"call_{len(tool_calls)}", "type": "function", "function": function})
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if tool_calls:
        message["tool_calls"] = tool_calls
    return message, "length" if choice.finish_reason == "length" else "stop"


def _arguments(text: str) -> dict[str, Any] | None:
    """The arguments of a call; None where they are no JSON object."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
