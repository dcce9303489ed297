"""How a chat template ends assistant turns: found by rendering small conversations.

Three habits are known. Most templates end each turn with one token (`<|im_end|>`). Some end the last turn
otherwise than those of the history, or turns with calls otherwise than those without (gpt-oss). Some write no
end at all: the model stops by sampling the next turn's opening (GLM).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prorl_envs.errors import InputError
from prorl_envs.tools.types import JsonObject

# Stands for the sampled answer in synthetic conversations; letters alone, so that no filter changes it.
ANCHOR = "AnchorOfTheSampledAnswer"
QUESTION: JsonObject = {"role": "user", "content": "Question"}
_SAID = "TextOfTheObservation"

#: Renders messages, arguments of calls as text if told so, with or without the generation prompt.
type Write = Callable[[Sequence[Mapping[str, Any]], bool, bool], str]


@dataclass(frozen=True, slots=True)
class TurnEnds:
    """What ends a turn, as texts of control tokens.

    Args:
        text: what follows an answer in the history, where a user speaks next.
        last: what follows the last answer; "" where the model samples the next turn's opening.
        calls: what follows calls, where their results come next; "" where the template cannot show results.
        arguments_as_text: the template wants the arguments of calls as text (DeepSeek).
        content_beside_calls: a stand-in with calls needs content too, since the template shows no calls.
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
        """What the model samples to end a turn."""
        return tuple(dict.fromkeys(filter(None, (self.last or self.text, self.calls))))

    @property
    def closing(self) -> frozenset[str]:
        """What closes a turn, whatever comes next; an opening of another's turn closes only before that."""
        return frozenset(filter(None, (self.text, self.last, self.calls))) if self.last else frozenset()

    def before(self, observations: Sequence[Mapping[str, Any]]) -> str:
        """What ends a turn that these observations follow."""
        return self.calls if observations[0].get("role") == "tool" else self.text

    def stand_in(self, observations: Sequence[Mapping[str, Any]]) -> JsonObject:
        """An assistant message that these observations can follow: with one call per tool result."""
        return _stand_in(observations, ANCHOR if self.content_beside_calls else "")


def find_ends(write: Write, literals: Iterable[str]) -> TurnEnds:
    """How a template ends turns.

    Args:
        write: renders messages.
        literals: texts of control tokens.

    Raises:
        InputError: its turns have no end, or nothing can follow them.
    """
    known = [text for text in literals if text.strip()]
    answer = {"role": "assistant", "content": ANCHOR}
    last = _first(known, _behind(write([QUESTION, answer], False, False)))
    try:
        text = _first(
            known, _shown(write([QUESTION, answer, {"role": "user", "content": _SAID}], False, True))
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
            hint="a bridge between turns needs one, such as <|im_end|>; take the instruct model's",
        )
    return _with_calls(write, known, TurnEnds(text or last, last), refused)


def _with_calls(write: Write, known: Sequence[str], ends: TurnEnds, refused: InputError | None) -> TurnEnds:
    refusal: InputError | None = None
    result = {"role": "tool", "content": _SAID, "tool_call_id": "abcdefgh1", "name": "tool"}
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
    """What ends a turn with calls.

    Raises:
        InputError: nothing does, or the result is not behind it.
    """
    shown = _shown(followed)
    if last:
        behind = _behind(alone)
        end = last if last in behind else _last(known, behind)
    else:
        end = _first(known, followed[len(alone) :]) if followed.startswith(alone) else ""
    if not end or end not in shown:
        raise _misplaced("tool")
    if _SAID not in shown[shown.index(end) :]:
        raise _misplaced("tool")
    return end


def _behind(text: str) -> str:
    """What a synthetic conversation holds behind the stand-in."""
    _, found, behind = text.partition(ANCHOR)
    if not found:
        raise InputError("the chat template drops the assistant turn before these observations")
    return behind.rpartition(ANCHOR)[2]


def _shown(text: str) -> str:
    """As `_behind`, where the observation is shown there."""
    behind = _behind(text)
    if _SAID not in behind:
        raise _misplaced("these")
    return behind


def _misplaced(role: str) -> InputError:
    return InputError(
        f"the chat template puts {role} messages inside the assistant's turn, or nowhere",
        hint="such a template cannot be appended to; take another model family",
    )


def _first(known: Sequence[str], text: str) -> str:
    """The literal that comes first, the longest of those at one place; "" for none."""
    found = [(text.index(literal), -len(literal), literal) for literal in known if literal in text]
    return min(found, default=(0, 0, ""))[2]


def _last(known: Sequence[str], text: str) -> str:
    found = [(text.rindex(literal), len(literal), literal) for literal in known if literal in text]
    return max(found, default=(0, 0, ""))[2]


def _stand_in(observations: Sequence[Mapping[str, Any]], content: str) -> JsonObject:
    calls = [
        {
            "id": str(message.get("tool_call_id") or f"call{index:05}"),  # some want 9 characters
            "type": "function",
            "function": {"name": str(message.get("name") or "tool"), "arguments": {"value": ANCHOR}},
        }
        for index, message in enumerate(observations)
        if message.get("role") == "tool"
    ]
    if not calls:
        return {"role": "assistant", "content": ANCHOR}
    return {"role": "assistant", "content": content, "tool_calls": calls}
