"""Who sent what: the scripted server's proof that no client ever tokenised a sampled text again."""

from array import array
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from prorl_envs.testing.scripted import Behaviour, Mix


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request and its answer."""

    session: str
    behaviour: str
    turn: int
    prompt_ids: tuple[int, ...]
    sampled_ids: tuple[int, ...]
    finish_reason: str


@dataclass(frozen=True, slots=True)
class _Seen:
    """The last exchange of a session, as lengths and digests: constant memory, however long the context."""

    prompt_length: int
    prompt: bytes
    whole_length: int
    whole: bytes


@dataclass(slots=True)
class Counts:
    """What the server counts.

    `violations` are prompts that do not begin with everything the session was sent and sampled before;
    `restarts` are sessions that began anew, `repeats` requests sent a second time, `told_to_abort` requests
    for the end of another one, `refused` what was too much at once; `behaviours` counts sessions, `emptied`
    how often the prefix cache was.
    """

    requests: int = 0
    running: int = 0
    aborted: int = 0
    told_to_abort: int = 0
    emptied: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    sessions: int = 0
    unknown_tasks: int = 0
    violations: int = 0
    restarts: int = 0
    repeats: int = 0
    behaviours: dict[str, int] = field(default_factory=dict)


class Audit:
    """Checks each prompt against what its session holds already.

    Args:
        counts: where to count.
        max_sessions: sessions remembered; the longest idle are forgotten.
        max_exchanges: exchanges kept in full.
    """

    def __init__(self, counts: Counts, *, max_sessions: int = 65_536, max_exchanges: int = 256) -> None:
        self._counts = counts
        self._max_sessions = max_sessions
        self._seen: OrderedDict[str, _Seen] = OrderedDict()
        self.exchanges: deque[Exchange] = deque(maxlen=max_exchanges)

    def check(self, session: str, prompt_ids: Sequence[int], turn: int) -> None:
        """Count what kind of request this is; a prompt that rewrites its history is a violation."""
        seen = self._seen.get(session)
        if seen is None or _digest(prompt_ids[: seen.whole_length]) == seen.whole:
            return
        if len(prompt_ids) == seen.prompt_length and _digest(prompt_ids) == seen.prompt:
            self._counts.repeats += 1
        elif turn == 0:
            self._counts.restarts += 1
        else:
            self._counts.violations += 1

    def known(self, session: str, prompt_ids: Sequence[int]) -> int:
        """Tokens at the prompt's beginning that this session was sent or sampled before."""
        seen = self._seen.get(session)
        if seen is None:
            return 0
        for length, digest in ((seen.whole_length, seen.whole), (seen.prompt_length, seen.prompt)):
            if _digest(prompt_ids[:length]) == digest:
                return length
        return 0

    def record(self, exchange: Exchange) -> None:
        """Remember an answered request."""
        whole = (*exchange.prompt_ids, *exchange.sampled_ids)
        self._seen[exchange.session] = _Seen(
            len(exchange.prompt_ids), _digest(exchange.prompt_ids), len(whole), _digest(whole)
        )
        self._seen.move_to_end(exchange.session)
        if len(self._seen) > self._max_sessions:
            self._seen.popitem(last=False)
        self.exchanges.append(exchange)


class Dealer:
    """Deals behaviours to sessions: one deck per task, a card per new session in order of arrival.

    Args:
        mix: what a deck holds.
        counts: where to count.
        seed: of the shuffles.
        max_sessions: sessions remembered; the longest idle are forgotten.
    """

    def __init__(self, mix: Mix, counts: Counts, *, seed: int = 0, max_sessions: int = 65_536) -> None:
        self._mix = mix
        self._counts = counts
        self._seed = seed
        self._max_sessions = max_sessions
        self._dealt: OrderedDict[str, Behaviour] = OrderedDict()
        self._decks: dict[str, list[Behaviour]] = {}
        self._rounds: dict[str, int] = {}

    def deal(self, session: str, key: str) -> Behaviour:
        """The behaviour of `session`, whose task is `key`; the same each time it is asked."""
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

    def _draw(self, key: str) -> Behaviour:
        deck = self._decks.get(key)
        if not deck:
            round_ = self._rounds.get(key, 0)
            self._rounds[key] = round_ + 1
            deck = self._decks[key] = self._mix.deck(self._seed, key, round_)
        return deck.pop(0)


def _digest(ids: Sequence[int]) -> bytes:
    return blake2b(array("Q", ids).tobytes(), digest_size=16).digest()
