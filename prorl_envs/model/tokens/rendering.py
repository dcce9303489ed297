"""Conversion of messages to ids and back, for one tokenizer and its chat template.

`prompt` renders the start of a conversation. `bridge` returns the ids between one sampled answer and the
next: it renders a synthetic conversation with a known assistant turn, followed by the observations, and takes
the text after that turn. This text has everything that the template writes there (turn ends, headers, merged
tool results). The sampled ids are not rendered, so they cannot change. See docs/decisions/tokens.md.
"""

from collections.abc import Mapping, Sequence
from hashlib import blake2s
from itertools import chain
from typing import Any

from tokenizers import Tokenizer

from prorl_envs.errors import InputError
from prorl_envs.model.tokens.chat_template import ChatTemplate, normalise
from prorl_envs.model.tokens.control_token_escaping import ControlTokenEscaper, in_ascii_json, new_mark
from prorl_envs.model.tokens.turn_ends import ANCHOR, QUESTION, TurnEnds, find_ends
from prorl_envs.model.tool_formats import plain_tools
from prorl_envs.model.tool_formats.choice import FORMATS, TRIAL_TOOL, choose_format, trial_message
from prorl_envs.model.tool_formats.reading import Declared, ToolFormat, continued, left_open
from prorl_envs.model.types import AssistantTurn, Sampled
from prorl_envs.tools.types import JsonObject, ToolCall, ToolSpec

_MAX_ID = 2**32 - 1
#: Tokens at a prompt's end that are searched for the start of reasoning.
_TAIL = 16
#: Length in characters from which encoding takes milliseconds.
LONG = 8192
#: Fields of a message that a template may write next to its own text.
_PROSE = ("content", "reasoning_content", "thinking")


class TemplateRenderer:
    """Renderer with the tokenizer's own chat template.

    Message text is encoded as plain text, even if it spells a control token (see `control_token_escaping`).
    In assistant messages given by the caller, only true special tokens are escaped: the model itself writes
    `<think>` and `<tool_call>` there.

    Args:
        tokenizer: the model's tokenizer.
        template: the model's chat template.
        stop_ids: ids that stop a turn besides the template's own end of turn, such as `eos_token`.
        vocab_size: number of ids that the model can sample; at least the tokenizer's number of ids.
        tool_format: how the model writes tool calls (`tool_formats.choice.FORMATS`); `auto` detects it.

    Raises:
        InputError: the template's assistant turns have no end token; the tokenizer does not encode piece by
            piece, so that no bridge can be built; or the tool call format is unknown.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        *,
        stop_ids: Sequence[int] = (),
        vocab_size: int | None = None,
        tool_format: str = "auto",
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        added = tokenizer.get_added_tokens_decoder()
        self._outside = ControlTokenEscaper(token.content for token in added.values())
        self._added = {token.content: number for number, token in added.items()}
        largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        self._vocab_size = max(vocab_size or 0, largest + 1)
        self._ends = self._find_ends()
        self._closing = frozenset(self._added[text] for text in self._ends.closing)
        special = {token.content for token in added.values() if token.special}
        self._assistant = ControlTokenEscaper({*special, *self._ends.stops})
        self._stop_ids = tuple(dict.fromkeys((*(self._added[text] for text in self._ends.stops), *stop_ids)))
        opening = template.render([QUESTION], generation_prompt=True)
        self._check_pieces()
        self._opened = left_open(opening)
        self._tools_known = self._knows_tools()
        self._format = self._choose_format(tool_format, opening)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that stop a turn; the template's own end of turn first."""
        return self._stop_ids

    @property
    def vocab_size(self) -> int:
        """Largest id that the model can sample, plus one."""
        return self._vocab_size

    @property
    def tool_format(self) -> str:
        """Format in which the model writes tool calls, a key of `tool_formats.choice.FORMATS`."""
        return self._format.name

    @property
    def plain_tools(self) -> bool:
        """True if the template cannot write calls or results. Both are then written as text, see
        `tool_formats.plain_tools`."""
        return not self._ends.calls or self._ends.content_beside_calls

    @property
    def tools_known(self) -> bool:
        """True if the template describes the tools to the model; otherwise the first message does."""
        return self._tools_known

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    def prompt(self, messages: Sequence[dict[str, Any]], tools: Sequence[ToolSpec] = ()) -> list[int]:
        """Return the ids of a conversation's start, ready for the first answer.

        Raises:
            InputError: a message is malformed, or the template refuses the conversation.
        """
        if not self._tools_known:
            description = plain_tools.about(tools, self._format.form, plain=self.plain_tools)
            messages, tools = plain_tools.introduced(messages, description), ()
        if self.plain_tools:
            messages = plain_tools.joined([plain_tools.written(message) for message in messages])
        text, mark = self._render(messages, tools, generation_prompt=True)
        return self._encode(text, mark)

    def bridge(self, sampled: Sampled, observations: Sequence[dict[str, Any]]) -> list[int]:
        """Return the ids to append after `sampled` so that the model reads `observations` and can answer.

        If the answer has no regular turn end (it was truncated, aborted, or has another stop token), the ids
        begin with the turn end.

        Args:
            sampled: the answer; only its last id is used.
            observations: tool and user messages, at least one.

        Raises:
            InputError: there are no observations, a role is wrong, or the template refuses the observations.
        """
        if not observations or any(m.get("role") not in ("tool", "user") for m in observations):
            raise InputError("observations are one or more tool or user messages")
        if self.plain_tools:
            observations = plain_tools.as_user(observations)
        conversation = [QUESTION, self._ends.stand_in(observations), *observations]
        text, mark = self._render(conversation, (), generation_prompt=True)
        end = self._ends.before(observations)
        # The stand-in precedes the observations, so the first anchor belongs to it, whatever they contain.
        found = text.find(end, max(text.find(ANCHOR), 0))
        if found < 0:
            raise InputError("the chat template drops the assistant turn before these observations")
        ids = self._encode(text[found:], mark)
        closed = sampled.ids and (sampled.ids[-1] in self._closing or sampled.ids[-1] == self._added[end])
        return ids[1:] if closed else ids

    def assistant(self, message: Mapping[str, Any]) -> list[int]:
        """Return the ids that the template writes for one assistant message, including the end of turn. A
        model that follows its template exactly would sample these ids. If the prompt starts the reasoning and
        the message has none, the reasoning is closed at once.

        Raises:
            InputError: the template does not continue its own generation prompt here.
        """
        if self.plain_tools:
            message = plain_tools.written(message)
        before, _ = self._render([QUESTION], (), generation_prompt=True)
        after, mark = self._render([QUESTION, message], (), generation_prompt=False)
        turn = continued(before, after)
        if turn is None:
            raise InputError("the template writes assistant turns differently from its generation prompt")
        end = self._ends.calls if message.get("tool_calls") else self._ends.last or self._ends.text
        if self._ends.last:
            turn, found, _ = turn.rpartition(end)
            if not found:
                raise InputError(f"the template does not end this assistant turn with {end}")
        return self._encode(turn + end, mark)

    def parse(
        self, ids: Sequence[int], tools: Sequence[ToolSpec] = (), *, prompt_ids: Sequence[int] | None = None
    ) -> AssistantTurn:
        """Parse a sampled answer. Total: every id sequence gives a turn.

        The ids of calls are derived from the sampled ids, so that parsing twice gives equal calls.

        Args:
            ids: the answer.
            tools: the offered tools, whose schemas give the types of unquoted values.
            prompt_ids: the context before the answer, which may start the reasoning; None for the start of a
                conversation.
        """
        opened = self._opened
        if prompt_ids is not None:
            opened = left_open(self.decode(prompt_ids[-_TAIL:]), only_last=True)
        turn = self._format.turn(
            self.decode(self.without_stop(ids)), opened=opened, declared=Declared.of(tools)
        )
        digest = blake2s(repr(tuple(ids)).encode(), digest_size=6).hexdigest()
        calls = tuple(
            ToolCall(id=f"call_{digest}_{index}", name=call.name, arguments=call.arguments)
            for index, call in enumerate(turn.calls)
        )
        return AssistantTurn(turn.content, calls, turn.malformed, turn.reasoning)

    def without_stop(self, ids: Sequence[int]) -> Sequence[int]:
        """Return an answer without the stop tokens at its end."""
        end = len(ids)
        while end and ids[end - 1] in self._stop_ids:
            end -= 1
        return ids[:end]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, including control tokens. Ids outside the vocabulary have no text."""
        known = [number for number in ids if 0 <= number <= _MAX_ID]
        return self._tokenizer.decode(known, skip_special_tokens=False)

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[ToolSpec],
        *,
        generation_prompt: bool,
    ) -> tuple[str, str]:
        """Return the marked text of a conversation, and its mark."""
        as_text = self._ends.arguments_as_text
        plain = [normalise(message, arguments_as_text=as_text) for message in messages]
        offered = [tool.to_openai() for tool in tools]
        mark = new_mark()
        quoted = [self._quote_message(message, mark) for message in plain]
        offered = self._outside.quote_tree(offered, mark)
        text = self._template.render(quoted, offered, generation_prompt=generation_prompt)
        return text.replace(in_ascii_json(mark), mark), mark

    def _quote_message(self, message: JsonObject, mark: str) -> JsonObject:
        quoter = self._assistant if message["role"] == "assistant" else self._outside
        quoted: JsonObject = {}
        for key, value in message.items():
            if key == "tool_calls":
                quoted[key] = [self._quote_call(call, mark, quoter) for call in value]
            else:
                prose = key in _PROSE and isinstance(value, str)
                quoted[quoter.quote_tree(key, mark)] = quoter.quote_tree(value, mark, leading=prose)
        return quoted

    def _quote_call(self, call: JsonObject, mark: str, quoter: ControlTokenEscaper) -> JsonObject:
        """Return a quoted tool call. Literals that are allowed in an answer are escaped in the arguments."""
        function = call["function"]
        quoted: JsonObject = quoter.quote_tree({**call, "function": {**function, "arguments": None}}, mark)
        arguments = function.get("arguments")
        quoted["function"]["arguments"] = self._outside.quote_tree(arguments, mark, leading=True)
        return quoted

    def _encode(self, text: str, mark: str) -> list[int]:
        return list(chain.from_iterable(map(self._encode_piece, text.split(mark))))

    def _encode_piece(self, text: str) -> list[int]:
        if len(text) < LONG:
            return self._tokenizer.encode(text, add_special_tokens=False).ids
        # This method releases the interpreter's lock, so that it can run in a thread.
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def _find_ends(self) -> TurnEnds:
        def write(messages: Sequence[Mapping[str, Any]], as_text: bool, generation_prompt: bool) -> str:
            plain = [normalise(message, arguments_as_text=as_text) for message in messages]
            return self._template.render(plain, generation_prompt=generation_prompt)

        return find_ends(write, self._added)

    def _knows_tools(self) -> bool:
        """Return whether the template describes the tools to the model."""
        try:
            text = self._template.render([QUESTION], [TRIAL_TOOL.to_openai()], generation_prompt=True)
        except InputError:
            return False
        return TRIAL_TOOL.name in text

    def _choose_format(self, name: str, opening: str) -> ToolFormat:
        """Return the format of the model's tool calls.

        Raises:
            InputError: the name is unknown, or the template's own format is not supported.
        """
        if name == "auto" and self.plain_tools:
            return FORMATS["hermes"]
        text = self._trial_text(opening)
        chosen = choose_format(name, text or "")
        if chosen is None and text and TRIAL_TOOL.name in text:
            raise InputError(
                f"the chat template writes tool calls in an unknown format: {text[:200]!r}",
                hint=f"set model.tool_format to the most similar format: {', '.join(FORMATS)}",
            )
        return chosen or FORMATS["hermes"]

    def _trial_text(self, opening: str) -> str | None:
        """Return the template's text for a call, after the generation prompt."""
        message = normalise(trial_message(), arguments_as_text=self._ends.arguments_as_text)
        try:
            text = self._template.render([QUESTION, message], generation_prompt=False)
        except InputError:
            return None
        equal = next((i for i, (a, b) in enumerate(zip(opening, text, strict=False)) if a != b), len(opening))
        text = text[equal:]
        return text.rpartition(self._ends.calls)[0] if self._ends.last and self._ends.calls else text

    def _check_pieces(self) -> None:
        """Check that pieces do not interact, because a bridge is encoded without the text before it."""
        parts = ["some text", self._ends.stops[0], "\n", "and more", " text"]
        start = self._tokenizer.encode(parts[0] + parts[1], add_special_tokens=False).ids
        pieces = self._encode("\0".join(parts), "\0")
        if pieces[: len(start)] != start or self.decode(pieces) != "".join(parts):
            raise InputError(
                "this tokenizer does not encode text piece by piece",
                hint="it puts a space before every piece (as some SentencePiece conversions do)",
            )
