"""Turn ends of a chat template, detected by rendering small conversations.

Three conventions are known. Most templates end each turn with one token (`<|im_end|>`). Some end the last
turn differently from earlier turns, or turns with calls differently from those without (gpt-oss). Some write
no end at all: the model stops by sampling the start of the next turn (GLM).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prorl_envs.errors import InputError
from prorl_envs.tools.types import JsonObject

#: Placeholder of the sampled answer in synthetic conversations; only letters, so that no filter changes it.
ANCHOR = "AnchorOfTheSampledAnswer"
QUESTION: JsonObject = {"role": "user", "content": "Question"}
_OBSERVATION = "TextOfTheObservation"

#: Renders messages. The flags: write arguments of calls as text, append the generation prompt.
type Write = Callable[[Sequence[Mapping[str, Any]], bool, bool], str]


@dataclass(frozen=True, slots=True)
class TurnEnds:
    """Texts of the control tokens that end a turn.

    Args:
        text: token after an answer in the history, before a user message.
        last: token after the last answer; "" if the model samples the start of the next turn.
        calls: token after calls, before their results; "" if the template cannot show results.
        arguments_as_text: True if the template requires the arguments of calls as text (DeepSeek).
        content_beside_calls: True if the template shows no calls, so that a stand-in also needs content.
        refusal: why results cannot be shown, or None.
    """

    text: str
    last: str
    calls: str = ""
    arguments_as_text: bool = False
    content_beside_calls: bool = False
    refusal: InputError | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """Tokens that the model samples to end a turn."""
        return tuple(dict.fromkeys(filter(None, (self.last or self.text, self.calls))))

    @property
    def closing(self) -> frozenset[str]:
        """Tokens that close a turn before any message; none if only the start of the next turn closes it."""
        return frozenset(filter(None, (self.text, self.last, self.calls))) if self.last else frozenset()

    def before(self, observations: Sequence[Mapping[str, Any]]) -> str:
        """Return the token that ends a turn before these observations."""
        return self.calls if observations[0].get("role") == "tool" else self.text

    def stand_in(self, observations: Sequence[Mapping[str, Any]]) -> JsonObject:
        """Return an assistant message that these observations can follow. It has one call per tool result."""
        return _stand_in(observations, ANCHOR if self.content_beside_calls else "")


def find_ends(write: Write, literals: Iterable[str]) -> TurnEnds:
    """Return the turn ends of a template.

    Args:
        write: renders messages.
        literals: texts of control tokens.

    Raises:
        InputError: the template writes no end token, or allows no message after an assistant turn.
    """
    known = [text for text in literals if text.strip()]
    answer = {"role": "assistant", "content": ANCHOR}
    last = _first(known, _after_stand_in(write([QUESTION, answer], False, False)))
    try:
        text = _first(
            known,
            _with_observation(
                write([QUESTION, answer, {"role": "user", "content": _OBSERVATION}], False, True), "user"
            ),
        )
    except InputError as error:
        if not last:
            raise
        refused: InputError | None = error
        text = ""
    else:
        refused = None
    if not last and not text:
        raise InputError(
            "the chat template does not end assistant turns with a token of its own",
            hint="a bridge between turns needs one, such as <|im_end|>; use the instruct model's tokenizer",
        )
    return _with_calls(write, known, TurnEnds(text or last, last), refused)


def _with_calls(write: Write, known: Sequence[str], ends: TurnEnds, refused: InputError | None) -> TurnEnds:
    refusal: InputError | None = None
    result = {"role": "tool", "content": _OBSERVATION, "tool_call_id": "abcdefgh1", "name": "tool"}
    for content in ("", ANCHOR):
        for as_text in (False, True):
            stand_in = _stand_in([result], content)
            try:
                alone = write([QUESTION, stand_in], as_text, False)
                followed = write([QUESTION, stand_in, result], as_text, True)
                calls = _end_of_calls(known, ends.last, alone, followed)
            except InputError as error:
                refusal = refusal or error
                continue
            return TurnEnds(ends.text, ends.last, calls, as_text, bool(content))
    if refused is not None:
        raise refused
    return TurnEnds(ends.text, ends.last, refusal=refusal)


def _end_of_calls(known: Sequence[str], last: str, alone: str, followed: str) -> str:
    """Return the token that ends a turn with calls.

    Raises:
        InputError: there is no such token, or the result does not follow it.
    """
    result = _with_observation(followed, "tool")
    if last:
        rest = _after_stand_in(alone)
        end = last if last in rest else _last(known, rest)
    else:
        end = _first(known, followed[len(alone) :]) if followed.startswith(alone) else ""
    if not end or end not in result or _OBSERVATION not in result[result.index(end) :]:
        raise _misplaced("tool")
    return end


def _after_stand_in(text: str) -> str:
    """Return the text of a synthetic conversation after the stand-in."""
    _, found, rest = text.partition(ANCHOR)
    if not found:
        raise InputError("the chat template drops the assistant turn before these observations")
    return rest.rpartition(ANCHOR)[2]


def _with_observation(text: str, role: str) -> str:
    """Return the same text as `_after_stand_in`, after a check that it contains the observation.

    Args:
        text: rendered conversation.
        role: role of the observation's message.
    """
    rest = _after_stand_in(text)
    if _OBSERVATION not in rest:
        raise _misplaced(role)
    return rest


def _misplaced(role: str) -> InputError:
    return InputError(
        f"the chat template puts {role} messages inside the assistant's turn, or nowhere",
        hint="a conversation with such a template cannot be continued; use another model family",
    )


def _first(known: Sequence[str], text: str) -> str:
    """Return the first literal in the text; at one position, the longest. "" if there is none."""
    found = [(text.index(literal), -len(literal), literal) for literal in known if literal in text]
    return min(found, default=(0, 0, ""))[2]


def _last(known: Sequence[str], text: str) -> str:
    found = [(text.rindex(literal), len(literal), literal) for literal in known if literal in text]
    return max(found, default=(0, 0, ""))[2]


def _stand_in(observations: Sequence[Mapping[str, Any]], content: str) -> JsonObject:
    calls = [
        {
            "id": str(
                message.get("tool_call_id") or f"call{index:05}"
            ),  # some templates require 9 characters
            "type": "function",
            "function": {"name": str(message.get("name") or "tool"), "arguments": {"value": ANCHOR}},
        }
        for index, message in enumerate(observations)
        if message.get("role") == "tool"
    ]
    if not calls:
        return {"role": "assistant", "content": ANCHOR}
    return {"role": "assistant", "content": content, "tool_calls": calls}
