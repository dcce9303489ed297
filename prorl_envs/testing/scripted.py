"""Samples of a scripted model: the pure part of the scripted model server.

It plays reference solutions, wrong ones, and every way a model or its server can misbehave, in proportions
known in advance. It is not a model: it finds the task by the text of the first user message, and the turn by
the number of assistant turns in the prompt, so a repeated request gets the same answer.
"""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import Any, Literal

from prorl_envs.errors import InputError
from prorl_envs.model.tokens.rendering import TemplateRenderer
from prorl_envs.testing.tokenizer import TURN_END, TURN_START
from prorl_envs.tools.types import JsonObject

type Call = Mapping[str, Any]
type Tape = Sequence[Sequence[Call]]


class Behaviour(StrEnum):
    """Behaviour of one session. The last seven are faults of the server, the others are a model's."""

    SOLVE = "solve"
    WRONG = "wrong"
    IDLE = "idle"
    MALFORMED = "malformed"
    LOOP = "loop"
    GARBAGE = "garbage"
    HANG = "hang"
    HANG_LATER = "hang_later"  # after the first answer
    ERROR500 = "error500"
    FLAKY = "flaky"
    BAD_IDS = "bad_ids"
    SHORT_LOGPROBS = "short_logprobs"
    DISCONNECT = "disconnect"


@dataclass(frozen=True, slots=True)
class Mix:
    """Number of sessions of each group per behaviour.

    Args:
        counts: sessions per behaviour; their sum is the size of a deck. With groups of that size (or a
            multiple), every group gets exactly these proportions.
    """

    counts: Mapping[Behaviour, int]

    def __post_init__(self) -> None:
        if any(count < 0 for count in self.counts.values()) or not 0 < sum(self.counts.values()) <= 10_000:
            raise InputError("a mix has between 1 and 10000 sessions, none of them negative")

    @classmethod
    def parse(cls, text: str) -> "Mix":
        """Parse a mix from text such as `solve=2,wrong=1,malformed=1`.

        Raises:
            InputError: an unknown behaviour, or a count that is not a number.
        """
        counts: dict[Behaviour, int] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            name, _, count = part.partition("=")
            try:
                counts[Behaviour(name.strip())] = int(count or "1")
            except ValueError:
                raise InputError(
                    f"{part!r} is not part of a mix", hint=f"behaviours: {', '.join(Behaviour)}"
                ) from None
        return cls(counts)

    def deck(self, seed: int, key: str, round_: int) -> list[Behaviour]:
        """Return the behaviours of one round of a task's sessions, in order of arrival."""
        cards = [behaviour for behaviour in Behaviour for _ in range(self.counts.get(behaviour, 0))]
        random.Random(f"{seed}/{key}/{round_}").shuffle(cards)
        return cards


@dataclass(frozen=True, slots=True)
class Script:
    """Script of one task.

    Args:
        solve: the reference, one list of tool calls per turn; a call is {"tool", "arguments"} and may have a
            "content" as accompanying text, or only that.
        wrong: a harmless attempt that does not solve the task; None derives one from the tools in `solve`.
    """

    solve: Tape
    wrong: Tape | None = None


# A harmless call for tools whose names determine their arguments.
_HARMLESS: Mapping[str, JsonObject] = {
    "bash": {"command": "ls"},
    "python": {"code": "1 + 1"},
    "ipython": {"code": "1 + 1"},
    "execute_bash": {"command": "ls"},
    "execute_ipython_cell": {"code": "1 + 1"},
}


@dataclass(frozen=True, slots=True)
class ScriptBook:
    """Scripts by task.

    Args:
        scripts: by key; a task is found if its first user message is, or contains, the key. The longest
            matching key wins.
        finish: the call that declares the task done; played if a tape does not include it at its end.
    """

    scripts: Mapping[str, Script]
    finish: Call = field(default_factory=lambda: {"tool": "finish", "arguments": {}})

    @classmethod
    def from_tapes(cls, tapes: Mapping[str, Tape]) -> "ScriptBook":
        """Create a book of reference solutions: {key: [[{"tool": ..., "arguments": ...}, ...] per turn]}.

        Raises:
            InputError: a call without a tool name or with arguments that are not an object.
        """
        for key, tape in tapes.items():
            for call in (call for turn in tape for call in turn):
                if not isinstance(call.get("tool"), str) or not isinstance(call.get("arguments"), Mapping):
                    raise InputError(f"the script of {key[:60]!r} has a call that is not {{tool, arguments}}")
        return cls({key: Script(tape) for key, tape in tapes.items()})

    def find(self, text: str) -> str | None:
        """Return the key of the task that `text` states, or None."""
        if text in self.scripts:
            return text
        return max((key for key in self.scripts if key in text), key=len, default=None)

    def turn(self, key: str | None, behaviour: Behaviour, number: int) -> Sequence[Call]:
        """Return the calls of turn `number` (from 0) of a behaviour that plays calls."""
        script = self.scripts.get(key, Script(())) if key is not None else Script(())
        if behaviour is Behaviour.LOOP:
            return self._harmless(script) or (self._first(script),)
        tape: Tape = script.solve
        if behaviour is Behaviour.WRONG:
            tape = script.wrong if script.wrong is not None else [self._harmless(script)]
        elif behaviour is Behaviour.IDLE:
            tape = ()
        turns = [turn for turn in tape if turn]
        return turns[number] if number < len(turns) else (self.finish,)

    def _harmless(self, script: Script) -> Sequence[Call]:
        used = (call["tool"] for turn in script.solve for call in turn)
        tool = next((name for name in used if name in _HARMLESS), None)
        return () if tool is None else ({"tool": tool, "arguments": _HARMLESS[tool]},)

    def _first(self, script: Script) -> Call:
        return next((call for turn in script.solve for call in turn), self.finish)


@dataclass(frozen=True, slots=True)
class ReadPrompt:
    """Contents of a prompt for the scripted model: its task and its progress.

    Args:
        first_user: first user message; `users`: all user messages.
        assistant_turns: answers before the one to sample.
    """

    first_user: str
    assistant_turns: int
    users: str = ""


class PromptReader:
    """Parser of ChatML prompts by their control tokens; text that only looks like a control token is not a
    turn.

    Args:
        renderer: of a ChatML tokenizer, such as the built-in one or Qwen's.

    Raises:
        InputError: the tokenizer has no ChatML control tokens.
    """

    def __init__(self, renderer: TemplateRenderer) -> None:
        start = renderer.tokenizer.token_to_id(TURN_START)
        end = renderer.tokenizer.token_to_id(TURN_END)
        if start is None or end is None:
            raise InputError(
                "the scripted model reads ChatML prompts, and this tokenizer has no <|im_start|>",
                hint="take the built-in tokenizer or one of the Qwen family",
            )
        self._start, self._end = start, end
        self._renderer = renderer

    def read(self, ids: Sequence[int]) -> ReadPrompt:
        """Parse a prompt. Total: a prompt without turns gives an empty task."""
        starts = [at for at, number in enumerate(ids) if number == self._start]
        users: list[str] = []
        turns = 0
        for start, end in pairwise([*starts, len(ids)]):
            role = self._renderer.decode(ids[start + 1 : start + 13]).partition("\n")[0]
            if role == "assistant":
                turns += 1
            elif role == "user":
                body = list(ids[start + 1 : end])
                closed = body.index(self._end) if self._end in body else len(body)
                users.append(self._renderer.decode(body[:closed]).partition("\n")[2])
        first = next((text for text in users if text), "")
        return ReadPrompt(first, max(0, turns - 1), "\n".join(users))  # the last one is the turn to sample


@dataclass(frozen=True, slots=True)
class ScriptedSample:
    """Sampled answer: ids with one log-probability each."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: Literal["stop", "length"]

    def until(self, stop_ids: Sequence[int]) -> "ScriptedSample":
        """Return the sample cut after the first of these ids."""
        end = next((index + 1 for index, number in enumerate(self.ids) if number in stop_ids), None)
        if end is None or end == len(self.ids):
            return self
        return ScriptedSample(self.ids[:end], self.logprobs[:end], "stop")

    def after(self, begun: int) -> "ScriptedSample":
        """Return the remainder of the sample if `begun` ids were sampled before."""
        return ScriptedSample(self.ids[begun:], self.logprobs[begun:], self.finish_reason)


class ScriptedModel:
    """Conversion of behaviours to sampled ids.

    Args:
        renderer: tokenizer and template of the model it plays.
        book: the tasks it knows.
        seed: seed of all random choices here.
        noncanonical: probability with which a token is sampled as two tokens of the same text, as real
            sampling does now and then. A client that tokenises text again shows up as drift.
    """

    def __init__(
        self, renderer: TemplateRenderer, book: ScriptBook, *, seed: int = 0, noncanonical: float = 0.0
    ) -> None:
        self._renderer = renderer
        self._book = book
        self._seed = seed
        self._noncanonical = noncanonical
        self._vocab = renderer.tokenizer.get_vocab(with_added_tokens=False)
        self._texts = {number: text for text, number in self._vocab.items()}
        self._ordinary = sorted(self._texts)

    def sample(
        self, key: str | None, behaviour: Behaviour, turn: int, *, session: str, max_tokens: int
    ) -> ScriptedSample:
        """Sample turn `turn` of a session. Deterministic in its arguments and the seed."""
        chance = random.Random(f"{self._seed}/{session}/{turn}")
        ids = self._turn_ids(key, behaviour, turn, chance)
        if self._noncanonical:
            ids = self._split_some(ids, chance)
        finish: Literal["stop", "length"] = "stop" if len(ids) <= max_tokens else "length"
        ids = ids[:max_tokens]
        # Cubing puts most of the mass near 0, as for a model that is mostly sure.
        logprobs = tuple(-5.0 * chance.random() ** 3 for _ in ids)
        return ScriptedSample(tuple(ids), logprobs, finish)

    def _turn_ids(self, key: str | None, behaviour: Behaviour, turn: int, chance: random.Random) -> list[int]:
        if behaviour is Behaviour.GARBAGE:
            return [*chance.choices(self._ordinary, k=48), self._renderer.stop_ids[0]]
        calls = self._book.turn(key, behaviour, turn)
        if behaviour is Behaviour.MALFORMED:
            first = json.dumps({"name": calls[0]["tool"], "arguments": dict(calls[0]["arguments"])})
            broken = f"<tool_call>\n{first[:-2]}\n</tool_call>"
            return self._renderer.assistant({"role": "assistant", "content": broken})
        return self._renderer.assistant(as_message(calls))

    def _split_some(self, ids: Sequence[int], chance: random.Random) -> list[int]:
        split: list[int] = []
        for number in ids:
            halves = self._halves(number) if chance.random() < self._noncanonical else []
            split += chance.choice(halves) if halves else (number,)
        return split

    def _halves(self, number: int) -> list[tuple[int, int]]:
        """Return pairs of tokens whose texts together are the text of `number`."""
        text = self._texts.get(number, "")
        return [
            (self._vocab[text[:at]], self._vocab[text[at:]])
            for at in range(1, len(text))
            if text[:at] in self._vocab and text[at:] in self._vocab
        ]


def as_message(calls: Sequence[Call]) -> JsonObject:
    """Return the assistant message, in OpenAI shape, that makes `calls`."""
    return {
        "role": "assistant",
        "content": "\n".join(call["content"] for call in calls if call.get("content")),
        "tool_calls": [
            {
                "id": f"call_{index}",
                "type": "function",
                "function": {"name": call["tool"], "arguments": dict(call["arguments"])},
            }
            for index, call in enumerate(call for call in calls if call.get("tool"))
        ],
    }
