"""Audit of the scripted server: proof that no client ever tokenised a sampled text again."""

from array import array
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from prorl_envs.testing.scripted import ScriptedCounts


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
class _LastExchange:
    """Lengths and digests of a session's last exchange. `total` is
    the prompt followed by the sampled ids; `answered` has the prompts of all exchanges of the session."""

    prompt_length: int
    prompt_hash: bytes
    total_length: int
    total_hash: bytes
    answered: set[bytes]


@dataclass(slots=True)
class AuditCounts(ScriptedCounts):
    """Counters of the server.

    `violations`: prompts that do not start with the session's previous prompt and answer; `restarts`:
    sessions that started again with their first turn; `repeats`: prompts that were answered before;
    `told_to_abort`: requests to abort another request; `refused`: requests over the concurrency limit;
    `emptied`: resets of the prefix cache.
    """

    running: int = 0
    aborted: int = 0
    told_to_abort: int = 0
    emptied: int = 0
    refused: int = 0
    violations: int = 0
    restarts: int = 0
    repeats: int = 0


class Audit:
    """Check of each prompt against the history of its session.

    Args:
        counts: counters to update.
        max_sessions: largest number of sessions in memory; the session idle for longest is removed first.
        max_exchanges: largest number of complete exchanges in memory.
    """

    def __init__(self, counts: AuditCounts, *, max_sessions: int = 65_536, max_exchanges: int = 256) -> None:
        self._counts = counts
        self._max_sessions = max_sessions
        self._last: OrderedDict[str, _LastExchange] = OrderedDict()
        self.exchanges: deque[Exchange] = deque(maxlen=max_exchanges)

    def check(self, session: str, prompt_ids: Sequence[int], turn: int) -> None:
        """Compare a prompt with its session's history, and count a repeat, a restart or a violation.

        Args:
            turn: number of assistant turns before the one to sample.
        """
        last = self._last.get(session)
        if last is None or _digest(prompt_ids[: last.total_length]) == last.total_hash:
            return
        if _digest(prompt_ids) in last.answered:
            self._counts.repeats += 1
        elif turn == 0:
            self._counts.restarts += 1
        else:
            self._counts.violations += 1

    def known(self, session: str, prompt_ids: Sequence[int]) -> int:
        """Return the length of the prompt's start that the session's last exchange contains, in tokens."""
        last = self._last.get(session)
        if last is None:
            return 0
        for length, digest in ((last.total_length, last.total_hash), (last.prompt_length, last.prompt_hash)):
            if _digest(prompt_ids[:length]) == digest:
                return length
        return 0

    def record(self, exchange: Exchange) -> None:
        """Record an answered request."""
        total, prompt = (*exchange.prompt_ids, *exchange.sampled_ids), _digest(exchange.prompt_ids)
        last = self._last.get(exchange.session)
        answered = {prompt} | (last.answered if last else set())
        self._last[exchange.session] = _LastExchange(
            len(exchange.prompt_ids), prompt, len(total), _digest(total), answered
        )
        self._last.move_to_end(exchange.session)
        if len(self._last) > self._max_sessions:
            self._last.popitem(last=False)
        self.exchanges.append(exchange)


def _digest(ids: Sequence[int]) -> bytes:
    return blake2b(array("Q", ids).tobytes(), digest_size=16).digest()
