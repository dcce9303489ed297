"""Messages to ids and back, for one tokenizer and its chat template.

`prompt` renders a conversation's beginning. `bridge` gives the ids between one sampled answer and the next:
it renders a synthetic conversation whose last assistant turn is known, followed by the observations, and
takes the text behind that turn. So it holds whatever the template writes there (turn ends, headers, merged
tool results), it never sees the sampled ids, and it cannot change them. See docs/decisions/0004.
"""

from collections.abc import Mapping, Sequence
from hashlib import blake2s
from typing import Any

from tokenizers import Tokenizer

from prorl_envs.errors import InputError
from prorl_envs.policy.chat_template import ChatTemplate, normalise
from prorl_envs.policy.quoting import Quoter, in_ascii_json
from prorl_envs.policy.tool_calls import THINK_CLOSE, THINK_OPEN, read_turn
from prorl_envs.policy.types import AssistantTurn, Sampled
from prorl_envs.tools.types import JsonObject, ToolCall, ToolSpec

# Stands for the sampled answer in synthetic conversations; letters alone, so that no filter changes it.
_ANCHOR = "AnchorOfTheSampledAnswer"
_QUESTION: JsonObject = {"role": "user", "content": "Question"}
_MAX_ID = 2**32 - 1


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

    Raises:
        InputError: the template's assistant turns have no end token, or the tokenizer does not encode piece
            by piece, so that no bridge can be built.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        *,
        stop_ids: Sequence[int] = (),
        vocab_size: int | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        added = tokenizer.get_added_tokens_decoder()
        self._outside = Quoter(token.content for token in added.values())
        self._added = {token.content: number for number, token in added.items()}
        largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        self._vocab_size = max(vocab_size or 0, largest + 1)
        self._end_text = self._find_end_of_turn()
        self._end_id = self._added[self._end_text]
        special = {token.content for token in added.values() if token.special}
        self._assistant = Quoter({*special, self._end_text})
        self._stop_ids = tuple(dict.fromkeys((self._end_id, *stop_ids)))
        self._check_pieces()
        self._arguments_as_text = False
        self._refusals = self._probe_observations()
        opening = template.render([_QUESTION], generation_prompt=True)
        self._thinking = opening.rfind(THINK_OPEN) > opening.rfind(THINK_CLOSE)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end a turn; the template's own end of turn first."""
        return self._stop_ids

    @property
    def vocab_size(self) -> int:
        """One more than the largest id the model can sample."""
        return self._vocab_size

    @property
    def observation_roles(self) -> tuple[str, ...]:
        """The roles of observations this template can append: `tool`, `user` or both."""
        return tuple(role for role in ("tool", "user") if role not in self._refusals)

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    def prompt(self, messages: Sequence[dict[str, Any]], tools: Sequence[ToolSpec] = ()) -> list[int]:
        """Ids of a conversation's beginning, ready for the first answer.

        Raises:
            InputError: a message is malformed, or the template refuses the conversation.
        """
        text, mark = self._render(messages, tools, generation_prompt=True)
        return self._encode(text, mark)

    def bridge(self, sampled: Sampled, observations: Sequence[dict[str, Any]]) -> list[int]:
        """Ids to append after `sampled` so that `observations` are read and the next answer can begin.

        An answer that does not end in the template's end of turn (it was cut off, aborted, or ended in
        another stop token) is closed with it first.

        Args:
            sampled: the answer; only its last id is looked at.
            observations: tool and user messages, at least one.

        Raises:
            InputError: no observations, another role, or the template refuses them.
        """
        if not observations or any(m.get("role") not in ("tool", "user") for m in observations):
            raise InputError("observations are one or more tool or user messages")
        for role in {message["role"] for message in observations} & self._refusals.keys():
            refusal = self._refusals[role]
            raise InputError(refusal.message, hint=refusal.hint)
        text, mark = self._render(
            [_QUESTION, _stand_in(observations), *observations], (), generation_prompt=True
        )
        ids = self._encode(self._from_end_of_turn(text), mark)
        closed = bool(sampled.ids) and sampled.ids[-1] == self._end_id
        return ids[1:] if closed else ids

    def assistant(self, message: Mapping[str, Any]) -> list[int]:
        """Ids the template writes for one assistant message, end of turn included: what a model that follows
        its template exactly would sample.

        Raises:
            InputError: the template does not continue its own generation prompt here.
        """
        before, _ = self._render([_QUESTION], (), generation_prompt=True)
        after, mark = self._render([_QUESTION, message], (), generation_prompt=False)
        if not after.startswith(before):
            raise InputError("the template writes assistant turns differently from its generation prompt")
        turn, end, _ = after[len(before) :].rpartition(self._end_text)
        if not end:
            raise InputError(f"the template does not end this assistant turn with {self._end_text}")
        return self._encode(turn + end, mark)

    def parse(self, ids: Sequence[int]) -> AssistantTurn:
        """Read a sampled answer. Total: every id sequence gives a turn.

        Call ids are derived from the sampled ids, so that reading twice gives the same ones.
        """
        end = len(ids)
        while end and ids[end - 1] in self._stop_ids:
            end -= 1
        turn = read_turn(self.decode(ids[:end]), thinking=self._thinking)
        digest = blake2s(repr(tuple(ids)).encode(), digest_size=6).hexdigest()
        calls = tuple(
            ToolCall(id=f"call_{digest}_{index}", name=call.name, arguments=call.arguments)
            for index, call in enumerate(turn.calls)
        )
        return AssistantTurn(content=turn.content, tool_calls=calls, malformed=turn.malformed)

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
        plain = [normalise(message, arguments_as_text=self._arguments_as_text) for message in messages]
        offered = [tool.to_openai() for tool in tools]
        mark = self._outside.choose_mark([plain, offered])
        quoted = [self._quote_message(message, mark) for message in plain]
        offered = self._outside.quote_tree(offered, mark)
        text = self._template.render(quoted, offered, generation_prompt=generation_prompt)
        return text.replace(in_ascii_json(mark), mark), mark

    def _quote_message(self, message: JsonObject, mark: str) -> JsonObject:
        assistant = message["role"] == "assistant"
        quoter = self._assistant if assistant else self._outside
        quoted: JsonObject = quoter.quote_tree(message, mark)
        for key in ("content", "reasoning_content"):
            if isinstance(message.get(key), str):
                quoted[key] = quoter.quote_tree(message[key], mark, leading=True)
        for call, source in zip(quoted.get("tool_calls", ()), message.get("tool_calls", ()), strict=True):
            arguments = source["function"].get("arguments")
            call["function"]["arguments"] = self._outside.quote_tree(arguments, mark, leading=True)
        return quoted

    def _encode(self, text: str, mark: str) -> list[int]:
        ids: list[int] = []
        for piece in text.split(mark):
            ids += self._tokenizer.encode(piece, add_special_tokens=False).ids
        return ids

    def _find_end_of_turn(self) -> str:
        """The control token with which the template ends an assistant turn."""
        text = self._template.render(
            [_QUESTION, {"role": "assistant", "content": _ANCHOR}], generation_prompt=False
        )
        _, found, tail = text.partition(_ANCHOR)
        first = min(
            (literal for literal in self._added if literal.strip() and literal in tail),
            key=lambda literal: (tail.index(literal), -len(literal)),
            default=None,
        )
        if not found or first is None:
            raise InputError(
                "the chat template does not end assistant turns with a token of its own",
                hint="a bridge between turns needs one, such as <|im_end|>; take the instruct model's",
            )
        return first

    def _from_end_of_turn(self, text: str) -> str:
        """What a synthetic conversation holds from the stand-in's end of turn on. The stand-in comes before
        the observations, so the first anchor is its own, whatever they say."""
        anchor = text.find(_ANCHOR)
        end = text.find(self._end_text, anchor)
        if anchor < 0 or end < 0:
            raise InputError("the chat template drops the assistant turn before these observations")
        return text[end:]

    def _probe_observations(self) -> dict[str, InputError]:
        """Why this template cannot append tool or user messages, by role.

        Most templates take tool-call arguments as an object; some (DeepSeek) only as text.
        """
        refusals: dict[str, InputError] = {}
        for role, as_text in (("user", False), ("tool", False), ("tool", True)):
            if as_text and "tool" not in refusals:
                break
            self._arguments_as_text = as_text
            try:
                self._probe_observation(role)
                refusals.pop(role, None)
            except InputError as error:
                refusals.setdefault(role, error)
        self._arguments_as_text = self._arguments_as_text and "tool" not in refusals
        if len(refusals) == 2:
            raise refusals["user"]
        return refusals

    def _probe_observation(self, role: str) -> None:
        said = "TextOfTheObservation"
        observation = {"role": role, "content": said, "tool_call_id": "abcdefgh1", "name": "tool"}
        text, _ = self._render([_QUESTION, _stand_in([observation]), observation], (), generation_prompt=True)
        if said not in self._from_end_of_turn(text):
            raise InputError(
                f"the chat template puts {role} messages inside the assistant's turn, or nowhere",
                hint="such a template cannot be appended to; take another model family",
            )

    def _check_pieces(self) -> None:
        """A bridge is encoded without what comes before it, which is right only if pieces do not interact."""
        parts = ["some text", self._end_text, "\n", "and more", " text"]
        start = self._tokenizer.encode(parts[0] + parts[1], add_special_tokens=False).ids
        pieces = self._encode("\0".join(parts), "\0")
        if pieces[: len(start)] != start or self.decode(pieces) != "".join(parts):
            raise InputError(
                "this tokenizer does not encode text piece by piece",
                hint="it puts a space before every piece (as some SentencePiece conversions do)",
            )


def _stand_in(observations: Sequence[Mapping[str, Any]]) -> JsonObject:
    """An assistant message that these observations can follow: with one call per tool result. The anchor is
    in the content and in the arguments, because some templates drop the content beside a call."""
    calls = [
        {
            "id": str(message.get("tool_call_id") or f"call{index:05}"),  # some want 9 characters
            "type": "function",
            "function": {"name": str(message.get("name") or "tool"), "arguments": {"value": _ANCHOR}},
        }
        for index, message in enumerate(observations)
        if message.get("role") == "tool"
    ]
    stand_in: JsonObject = {"role": "assistant", "content": _ANCHOR}
    return {**stand_in, "tool_calls": calls} if calls else stand_in
