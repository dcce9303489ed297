"""Messages to ids and back, for one tokenizer and its chat template.

`prompt` renders a conversation's beginning. `bridge` gives the ids between one sampled answer and the next:
it renders a synthetic conversation whose last assistant turn is known, followed by the observations, and
takes the text behind that turn. So it holds whatever the template writes there (turn ends, headers, merged
tool results), it never sees the sampled ids, and it cannot change them. See docs/decisions/0004.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from hashlib import blake2s
from itertools import chain
from typing import Any

from tokenizers import Tokenizer

from prorl_envs.errors import InputError
from prorl_envs.policy import plain_tools
from prorl_envs.policy.chat_template import ChatTemplate, normalise
from prorl_envs.policy.formats.choice import FORMATS, TRIAL_TOOL, choose_format, trial_message
from prorl_envs.policy.formats.reading import Declared, Format, continued, left_open
from prorl_envs.policy.pieces import Pieces
from prorl_envs.policy.quoting import Quoter, in_ascii_json
from prorl_envs.policy.turn_ends import ANCHOR, QUESTION, TurnEnds, find_ends
from prorl_envs.policy.types import AssistantTurn, Sampled
from prorl_envs.tools.types import JsonObject, ToolCall, ToolSpec

_MAX_ID = 2**32 - 1
#: Tokens at a prompt's end that are looked at for a beginning of reasoning.
_TAIL = 16
#: Such ends that are remembered, for most are a template's.
_ENDS = 256
#: Fields of a message that a template writes beside its own text.
_PROSE = ("content", "reasoning_content", "thinking")


class TemplateRenderer:
    """Renders with the tokenizer's own chat template. Implements `policy.types.Renderer`.

    What messages say is encoded as plain text, even where it spells a control token (see `quoting`). In
    assistant messages given by the caller, only true special tokens are kept out: `<think>` and
    `<tool_call>` are what the model itself writes there.

    Args:
        tokenizer: the model's tokenizer.
        template: the model's chat template.
        stop_ids: ids that end a turn besides the template's own end of turn, such as `eos_token`.
        vocab_size: ids the model can sample, [0, vocab_size); by default the tokenizer's.
        tool_format: how the model writes tool calls (`formats.choice.FORMATS`); `auto` asks the template.

    Raises:
        InputError: the template's assistant turns have no end token, or the tokenizer does not encode piece
            by piece, so that no bridge can be built; or there is no such form of tool calls.
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
        self._outside = Quoter(token.content for token in added.values())
        self._added = {token.content: number for number, token in added.items()}
        largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        self._vocab_size = max(vocab_size or 0, largest + 1)
        self._ends = self._find_ends()
        self._closing = frozenset(self._added[text] for text in self._ends.closing)
        special = {token.content for token in added.values() if token.special}
        self._assistant = Quoter({*special, *self._ends.stops})
        self._stop_ids = tuple(dict.fromkeys((*(self._added[text] for text in self._ends.stops), *stop_ids)))
        opening = template.render([QUESTION], generation_prompt=True)
        written = (text for text in self._added if text in opening)
        self._pieces = Pieces(tokenizer, [*self._ends.stops, *written])
        self._control = frozenset(added)
        self._opened_by = lru_cache(_ENDS)(lambda ids: left_open(self.decode(ids), only_last=True))
        self._check_pieces()
        self._opened = left_open(opening)
        self._tools_known = self._knows_tools()
        self._format = self._choose_format(tool_format, opening)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end a turn; the template's own end of turn first."""
        return self._stop_ids

    @property
    def vocab_size(self) -> int:
        """One more than the largest id the model can sample."""
        return self._vocab_size

    @property
    def tool_format(self) -> str:
        """How the model writes tool calls, as `formats.choice.FORMATS` has it."""
        return self._format.name

    @property
    def plain_tools(self) -> bool:
        """The template shows no calls, or no results: both are written as text (see `plain_tools`)."""
        return not self._ends.calls or self._ends.content_beside_calls

    @property
    def tools_known(self) -> bool:
        """The template tells the model of its tools; where it does not, the first message does."""
        return self._tools_known

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    def prompt(self, messages: Sequence[dict[str, Any]], tools: Sequence[ToolSpec] = ()) -> list[int]:
        """Ids of a conversation's beginning, ready for the first answer.

        Raises:
            InputError: a message is malformed, or the template refuses the conversation.
        """
        if not self._tools_known:
            about = plain_tools.about(tools, self._format.form, plain=self.plain_tools)
            messages, tools = plain_tools.introduced(messages, about), ()
        if self.plain_tools:
            messages = plain_tools.joined([plain_tools.written(message) for message in messages])
        text, mark = self._render(messages, tools, generation_prompt=True)
        return self._encode(text, mark)

    def bridge(self, sampled: Sampled, observations: Sequence[dict[str, Any]]) -> list[int]:
        """Ids to append after `sampled` so that `observations` are read and the next answer can begin.

        An answer that does not end as turns end (it was cut off, aborted, or ended in another stop token) is
        closed first.

        Args:
            sampled: the answer; only its last id is looked at.
            observations: tool and user messages, at least one.

        Raises:
            InputError: no observations, another role, or the template refuses them.
        """
        if not observations or any(m.get("role") not in ("tool", "user") for m in observations):
            raise InputError("observations are one or more tool or user messages")
        if self.plain_tools:
            observations = plain_tools.as_user(observations)
        conversation = [QUESTION, self._ends.stand_in(observations), *observations]
        text, mark = self._render(conversation, (), generation_prompt=True)
        end = self._ends.before(observations)
        # The stand-in comes before the observations, so the first anchor is its own, whatever they say.
        found = text.find(end, max(text.find(ANCHOR), 0))
        if found < 0:
            raise InputError("the chat template drops the assistant turn before these observations")
        ids = self._encode(text[found:], mark)
        closed = sampled.ids and (sampled.ids[-1] in self._closing or sampled.ids[-1] == self._added[end])
        return ids[1:] if closed else ids

    def assistant(self, message: Mapping[str, Any]) -> list[int]:
        """Ids the template writes for one assistant message, end of turn included: what a model that follows
        its template exactly would sample. Where the prompt has begun the reasoning and the message has none,
        the reasoning ends at once.

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
        """Read a sampled answer. Total: every id sequence gives a turn.

        Call ids are derived from the sampled ids, so that reading twice gives the same ones.

        Args:
            ids: the answer.
            tools: those on offer; forms that write values without quotes take their types from here.
            prompt_ids: the context before the answer, which may have begun the reasoning; None takes a
                conversation's first.
        """
        opened = self._opened
        if prompt_ids is not None:
            opened = self._opened_by(self._end_of(prompt_ids))
        turn = self._format.turn(
            self.decode(self.without_stop(ids)), opened=opened, declared=Declared.of(tools)
        )
        digest = blake2s(repr(tuple(ids)).encode(), digest_size=6).hexdigest()
        calls = tuple(
            ToolCall(id=f"call_{digest}_{index}", name=call.name, arguments=call.arguments)
            for index, call in enumerate(turn.calls)
        )
        return AssistantTurn(turn.content, calls, turn.malformed, turn.reasoning)

    def _end_of(self, prompt_ids: Sequence[int]) -> tuple[int, ...]:
        """From the last control token on. No beginning of reasoning has one in its middle."""
        tail = tuple(prompt_ids[-_TAIL:])
        starts = (start for start in reversed(range(len(tail))) if tail[start] in self._control)
        return tail[next(starts, 0) :]

    def without_stop(self, ids: Sequence[int]) -> Sequence[int]:
        """An answer without the stop tokens at its end."""
        end = len(ids)
        while end and ids[end - 1] in self._stop_ids:
            end -= 1
        return ids[:end]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, control tokens included. Ids outside the vocabulary have no text."""
        known = [number for number in ids if 0 <= number <= _MAX_ID]
        return self._tokenizer.decode(known, skip_special_tokens=False)

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[ToolSpec],
        *,
        generation_prompt: bool,
    ) -> tuple[str, str]:
        """The marked text of a conversation, and its mark."""
        as_text = self._ends.arguments_as_text
        plain = [normalise(message, arguments_as_text=as_text) for message in messages]
        offered = [tool.to_openai() for tool in tools]
        mark = self._outside.choose_mark([plain, offered])
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

    def _quote_call(self, call: JsonObject, mark: str, quoter: Quoter) -> JsonObject:
        """A tool call. What the model may write in an answer, it may not in the arguments."""
        function = call["function"]
        quoted: JsonObject = quoter.quote_tree({**call, "function": {**function, "arguments": None}}, mark)
        arguments = function.get("arguments")
        quoted["function"]["arguments"] = self._outside.quote_tree(arguments, mark, leading=True)
        return quoted

    def _encode(self, text: str, mark: str) -> list[int]:
        return list(chain.from_iterable(map(self._pieces.encode, text.split(mark))))

    def _find_ends(self) -> TurnEnds:
        def write(messages: Sequence[Mapping[str, Any]], as_text: bool, generation_prompt: bool) -> str:
            plain = [normalise(message, arguments_as_text=as_text) for message in messages]
            return self._template.render(plain, generation_prompt=generation_prompt)

        return find_ends(write, self._added)

    def _knows_tools(self) -> bool:
        """Whether the template tells the model of its tools."""
        try:
            text = self._template.render([QUESTION], [TRIAL_TOOL.to_openai()], generation_prompt=True)
        except InputError:
            return False
        return TRIAL_TOOL.name in text

    def _choose_format(self, name: str, opening: str) -> Format:
        """How the model writes calls.

        Raises:
            InputError: there is no such form, or the template's own is not known here.
        """
        if name == "auto" and self.plain_tools:
            return FORMATS["hermes"]
        text = self._trial_text(opening)
        chosen = choose_format(name, text or "")
        if chosen is None and text and TRIAL_TOOL.name in text:
            raise InputError(
                f"the chat template writes tool calls in a form that is not known here: {text[:200]!r}",
                hint=f"name the form it is nearest to (model.tool_format): {', '.join(FORMATS)}",
            )
        return chosen or FORMATS["hermes"]

    def _trial_text(self, opening: str) -> str | None:
        """What the template writes for a call, behind the generation prompt."""
        message = normalise(trial_message(), arguments_as_text=self._ends.arguments_as_text)
        try:
            text = self._template.render([QUESTION, message], generation_prompt=False)
        except InputError:
            return None
        same = next((i for i, (a, b) in enumerate(zip(opening, text, strict=False)) if a != b), len(opening))
        text = text[same:]
        return text.rpartition(self._ends.calls)[0] if self._ends.last and self._ends.calls else text

    def _check_pieces(self) -> None:
        """A bridge is encoded without what comes before it, which is right only if pieces do not interact."""
        parts = ["some text", self._ends.stops[0], "\n", "and more", " text"]
        start = self._tokenizer.encode(parts[0] + parts[1], add_special_tokens=False).ids
        pieces = self._encode("\0".join(parts), "\0")
        if pieces[: len(start)] != start or self.decode(pieces) != "".join(parts):
            raise InputError(
                "this tokenizer does not encode text piece by piece",
                hint="it puts a space before every piece (as some SentencePiece conversions do)",
            )
