"""Samples of a scripted model: the pure part of the scripted model server.

The scripted model is not a neural network. It replays reference solutions, wrong solutions, and the faults of
models, in proportions known in advance. It finds the task by the text of the first user
message, and the turn by the number of assistant turns in the prompt. A repeated request therefore gets the
same answer.
"""

import json
import random
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
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
    """Behaviour of one session."""

    SOLVE = "solve"
    WRONG = "wrong"
    IDLE = "idle"
    MALFORMED = "malformed"
    LOOP = "loop"
    GARBAGE = "garbage"
    ERROR500 = "error500"


@dataclass(frozen=True, slots=True)
class Mix:
    """Number of sessions per behaviour.

    Args:
        counts: sessions per behaviour; the sum is the size of a deck. If the size of a task's group is the
            size of a deck or a multiple, every group has exactly these proportions.
    """

    counts: Mapping[StrEnum, int]

    def __post_init__(self) -> None:
        if any(count < 0 for count in self.counts.values()) or not 0 < sum(self.counts.values()) <= 10_000:
            raise InputError("a mix must have between 1 and 10000 sessions, and no negative count")

    @classmethod
    def parse(cls, text: str, names: Callable[[str], StrEnum] = Behaviour) -> "Mix":
        """Parse a mix from text such as `solve=2,wrong=1,malformed=1`.

        Args:
            names: returns the behaviour of a name, or raises ValueError.

        Raises:
            InputError: an unknown behaviour, or a count that is not a number.
        """
        counts: dict[StrEnum, int] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            name, _, count = part.partition("=")
            try:
                counts[names(name.strip())] = int(count or "1")
            except ValueError:
                raise InputError(
                    f"{part!r} is not part of a mix", hint=f"behaviours: {', '.join(Behaviour)}"
                ) from None
        return cls(counts)

    def deck(self, seed: int, key: str, round_: int) -> list[StrEnum]:
        """Return a shuffled deck: the behaviours of a task's next sessions, in the order in which they start.

        Args:
            key: key of the task.
            round_: number of decks that the task's sessions have used before.
        """
        cards = [behaviour for behaviour, count in self.counts.items() for _ in range(count)]
        random.Random(f"{seed}/{key}/{round_}").shuffle(cards)
        return cards


@dataclass(slots=True)
class ScriptedCounts:
    """Counters of the server. `behaviours`: sessions per behaviour."""

    requests: int = 0
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    sessions: int = 0
    unknown_tasks: int = 0
    behaviours: dict[str, int] = field(default_factory=dict)


class Dealer:
    """Assignment of behaviours to sessions. Each task has a shuffled deck of behaviours, and each new session
    of the task draws the next one.

    Args:
        mix: contents of a deck.
        counts: counters to update.
        seed: seed of the shuffles.
        max_sessions: largest number of sessions in memory; the session idle for longest is removed first.
    """

    def __init__(
        self, mix: Mix, counts: ScriptedCounts, *, seed: int = 0, max_sessions: int = 65_536
    ) -> None:
        self._mix = mix
        self._counts = counts
        self._seed = seed
        self._max_sessions = max_sessions
        self._dealt: OrderedDict[str, StrEnum] = OrderedDict()
        self._decks: dict[str, list[StrEnum]] = {}
        self._rounds: dict[str, int] = {}

    def deal(self, session: str, key: str) -> StrEnum:
        """Return the behaviour of `session`; repeated calls return the same behaviour.

        Args:
            key: key of the session's task.
        """
        behaviour = self._dealt.get(session)
        if behaviour is None:
            behaviour = self._draw(key)
            self._dealt[session] = behaviour
            self._counts.sessions += 1
            self._counts.behaviours[behaviour] = self._counts.behaviours.get(behaviour, 0) + 1
            if len(self._dealt) > self._max_sessions:
                self._dealt.popitem(last=False)
        self._dealt.move_to_end(session)
        return behaviour

    def _draw(self, key: str) -> StrEnum:
        deck = self._decks.get(key)
        if not deck:
            round_ = self._rounds.get(key, 0)
            self._rounds[key] = round_ + 1
            deck = self._decks[key] = self._mix.deck(self._seed, key, round_)
        return deck.pop(0)


@dataclass(frozen=True, slots=True)
class Script:
    """Script of one task.

    Args:
        solve: the reference solution: one list of tool calls per turn. A call is {"tool", "arguments"} with
            an optional text "content"; a call with only "content" is a plain text.
        wrong: a harmless attempt that does not solve the task; None derives it from the tools in `solve`.
    """

    solve: Tape
    wrong: Tape | None = None


#: The call that declares a task done; it follows the last turn of a script.
_FINISH: Call = {"tool": "finish", "arguments": {}}
# Arguments of a harmless call, by tool name.
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
        scripts: script of each task by key. A key is a text that the task's first user message contains. If
            several keys match, the longest is used.
    """

    scripts: Mapping[str, Script]

    @classmethod
    def from_tapes(cls, tapes: Mapping[str, Tape]) -> "ScriptBook":
        """Create a book of reference solutions.

        Args:
            tapes: {key: one list of {"tool": ..., "arguments": ...} per turn}.

        Raises:
            InputError: a call without a tool name or with arguments that are not an object.
        """
        for key, tape in tapes.items():
            for call in (call for turn in tape for call in turn):
                if not isinstance(call.get("tool"), str) or not isinstance(call.get("arguments"), Mapping):
                    raise InputError(f"a call in the script of {key[:60]!r} is not {{tool, arguments}}")
        return cls({key: Script(tape) for key, tape in tapes.items()})

    def find(self, text: str) -> str | None:
        """Return the key of the task in the user message `text`, or None for an unknown task."""
        if text in self.scripts:
            return text
        return max((key for key in self.scripts if key in text), key=len, default=None)

    def turn(self, key: str | None, behaviour: StrEnum, number: int) -> Sequence[Call]:
        """Return the calls of turn `number` (from 0); an unknown task has only the finish call."""
        script = self.scripts.get(key or "", Script(()))
        if behaviour is Behaviour.LOOP:
            return self._harmless(script) or (self._first(script),)
        tape: Tape = script.solve
        if behaviour is Behaviour.WRONG:
            tape = script.wrong if script.wrong is not None else [self._harmless(script)]
        elif behaviour is Behaviour.IDLE:
            tape = ()
        turns = [turn for turn in tape if turn]
        return turns[number] if number < len(turns) else (_FINISH,)

    def _harmless(self, script: Script) -> Sequence[Call]:
        used = (call["tool"] for turn in script.solve for call in turn)
        tool = next((name for name in used if name in _HARMLESS), None)
        return () if tool is None else ({"tool": tool, "arguments": _HARMLESS[tool]},)

    def _first(self, script: Script) -> Call:
        return next((call for turn in script.solve for call in turn), _FINISH)


@dataclass(frozen=True, slots=True)
class ReadPrompt:
    """Parts of a prompt that determine the scripted answer.

    Args:
        first_user: first user message.
        assistant_turns: number of assistant turns before the one to sample.
        users: all user messages, joined by newlines.
    """

    first_user: str
    assistant_turns: int
    users: str = ""


class PromptReader:
    """Parser of ChatML prompts. It finds the turns by their control tokens, so text that only looks like a
    control token does not start a turn.

    Args:
        renderer: renderer with a ChatML tokenizer, such as the built-in tokenizer or Qwen's.

    Raises:
        InputError: the tokenizer has no ChatML control tokens.
    """

    def __init__(self, renderer: TemplateRenderer) -> None:
        start = renderer.tokenizer.token_to_id(TURN_START)
        end = renderer.tokenizer.token_to_id(TURN_END)
        if start is None or end is None:
            raise InputError(
                "the scripted model reads ChatML prompts, and this tokenizer has no <|im_start|>",
                hint="use the built-in tokenizer or a tokenizer of the Qwen family",
            )
        self._start, self._end = start, end
        self._renderer = renderer

    def read(self, ids: Sequence[int]) -> ReadPrompt:
        """Parse a prompt. A prompt without turns has an empty first user message; no prompt is an error."""
        starts = [index for index, number in enumerate(ids) if number == self._start]
        users: list[str] = []
        turns = 0
        for start, end in pairwise([*starts, len(ids)]):
            role = self._renderer.decode(ids[start + 1 : start + 13]).partition("\n")[0]
            if role == "assistant":
                turns += 1
            elif role == "user":
                body = list(ids[start + 1 : end])
                body_end = body.index(self._end) if self._end in body else len(body)
                users.append(self._renderer.decode(body[:body_end]).partition("\n")[2])
        first = next((text for text in users if text), "")
        # The last assistant turn is the one to sample.
        return ReadPrompt(first, max(0, turns - 1), "\n".join(users))


@dataclass(frozen=True, slots=True)
class ScriptedSample:
    """Sampled answer: token ids, and one log-probability per id."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: Literal["stop", "length"]

    def until(self, stop_ids: Sequence[int]) -> "ScriptedSample":
        """Return the sample up to the first stop id, which is included."""
        end = next((index + 1 for index, number in enumerate(self.ids) if number in stop_ids), None)
        if end is None or end == len(self.ids):
            return self
        return ScriptedSample(self.ids[:end], self.logprobs[:end], "stop")

    def after(self, count: int) -> "ScriptedSample":
        """Return the sample without its first `count` ids."""
        return ScriptedSample(self.ids[count:], self.logprobs[count:], self.finish_reason)


class ScriptedModel:
    """Conversion of behaviours to sampled ids.

    Args:
        renderer: tokenizer and template of the simulated model.
        book: scripts of the known tasks.
        seed: seed of all random choices.
        noncanonical: probability that a token is replaced by two tokens of the same text. Real models
            sometimes sample such tokens; a client that tokenises the text again then gets different ids.
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
        self, key: str | None, behaviour: StrEnum, turn: int, *, session: str, max_tokens: int
    ) -> ScriptedSample:
        """Sample turn `turn` of a session. The arguments and the seed determine the result."""
        chance = random.Random(f"{self._seed}/{session}/{turn}")
        ids = self._turn_ids(key, behaviour, turn, chance)
        if self._noncanonical:
            ids = self._split_some(ids, chance)
        finish: Literal["stop", "length"] = "stop" if len(ids) <= max_tokens else "length"
        ids = ids[:max_tokens]
        # The third power makes most log-probabilities almost 0, as those of a confident model.
        logprobs = tuple(-5.0 * chance.random() ** 3 for _ in ids)
        return ScriptedSample(tuple(ids), logprobs, finish)

    def _turn_ids(self, key: str | None, behaviour: StrEnum, turn: int, chance: random.Random) -> list[int]:
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
        """Return the pairs of tokens that together have the text of token `number`."""
        text = self._texts.get(number, "")
        pairs = ((text[:middle], text[middle:]) for middle in range(1, len(text)))
        return [
            (self._vocab[first], self._vocab[second])
            for first, second in pairs
            if first in self._vocab and second in self._vocab
        ]


def as_message(calls: Sequence[Call]) -> JsonObject:
    """Return an assistant message in OpenAI's format that contains `calls`."""
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
