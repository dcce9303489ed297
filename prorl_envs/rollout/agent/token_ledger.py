"""Token ledger of one episode: exactly the tokens that the model read and wrote.

A row only grows at its end, and only the new part of a prompt is compared with the ledger. So the cost of a
turn depends on the tokens of the turn, not on the length of the history. A context that does not continue the
recorded tokens starts another row.
"""

import copy
import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from prorl_envs.model.types import Sampled
from prorl_envs.rollout.api.types import Trajectory, TurnRecord


@dataclass(slots=True)
class _Turn:
    start: int
    sampled: Sampled
    model_s: float
    tools_s: float = 0.0
    failed_calls: int = 0


class Ledger:
    """Ids, loss mask and log-probabilities of one episode, with its turns as spans of positions.

    Args:
        prompt_ids: ids of the initial prompt.

    All methods refer to the last row unless they say otherwise. `forks` contains the rows before it.
    """

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self.forks: list[Trajectory] = []
        self._turns: list[_Turn] = []
        self._copied = 0  # number of turns that belong to another ledger
        self._digest = hashlib.blake2b(digest_size=16)
        self._digested = 0  # number of ids of the row that `_digest` has read
        self._begin(prompt_ids)

    def fork(self, prompt_ids: Sequence[int]) -> None:
        """Start another row with these ids: a prompt that rewrites the history of the conversation."""
        self.forks.append(self.trajectory())
        self.history()
        self._digest.update(b"row")
        self._digested = 0
        self._begin(prompt_ids)

    def _begin(self, prompt_ids: Sequence[int]) -> None:
        self._ids = list(prompt_ids)
        self._mask = [0] * len(self._ids)
        self._logprobs = [0.0] * len(self._ids)
        self._first = len(self._turns)  # index of the row's first turn
        self._shared = 0  # length of the prefix that belongs to a row of another ledger
        self._checked = 0  # number of ids that `sent` has compared
        self._drift = 0

    def copy(self) -> Self:
        """Return a ledger of the same episode, which changes independently."""
        other = copy.copy(self)
        other.forks, other._turns = list(self.forks), list(self._turns)
        other._ids, other._mask, other._logprobs = list(self._ids), list(self._mask), list(self._logprobs)
        other._digest = self._digest.copy()
        return other

    def branch(self) -> Self:
        """Return the ledger of another episode that goes on from here. In its row, the ids so far are not
        trained on."""
        other = self.copy()
        other.forks, other._copied = [], len(self._turns)
        other._begin(self._ids)
        other._shared = other._checked = len(self._ids)
        return other

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def ids(self) -> list[int]:
        """Ids of the current row; read-only."""
        return self._ids

    @property
    def unfinished_answers(self) -> Sequence[Trajectory]:
        """Empty: the loop waits for every answer."""
        return ()

    @property
    def turns(self) -> int:
        """Number of model calls so far, in all rows."""
        return len(self._turns)

    @property
    def sampled_tokens(self) -> int:
        return sum(len(turn.sampled.ids) for turn in self._turns[self._copied :])

    @property
    def exact(self) -> bool:
        """True if all recorded ids are exactly the ids that the model read and sampled."""
        return all(turn.sampled.exact for turn in self._turns)

    @property
    def model_s(self) -> float:
        return sum(turn.model_s for turn in self._turns[self._copied :])

    @property
    def tools_s(self) -> float:
        return sum(turn.tools_s for turn in self._turns[self._copied :])

    def history(self) -> bytes:
        """Return a digest of all ids so far, in all rows, also of those of the ledger that this one branched
        off from. It reads only the ids since the last call."""
        self._digest.update(array("q", self._ids[self._digested :]))
        self._digested = len(self._ids)
        return self._digest.digest()

    def sent(self, prompt_ids: Sequence[int]) -> None:
        """Count the drift of a prompt that is about to be sent: positions whose id differs from the recorded
        id, and the difference in length. Ids up to the end of the last prompt are not compared again."""
        recorded, prompt = self._ids[self._checked :], list(prompt_ids[self._checked :])
        if recorded != prompt:  # usually equal: one comparison of lists is faster than one per position
            self._drift += sum(a != b for a, b in zip(recorded, prompt, strict=False))
        self._drift += abs(len(self._ids) - len(prompt_ids))
        self._checked = len(self._ids)

    def sampled(self, answer: Sampled, model_s: float) -> None:
        """Append a sampled answer. If it is not exact, its mask is 0, so that it is not trained on."""
        self._turns.append(_Turn(len(self._ids), answer, model_s))
        self._append(answer.ids, int(answer.exact), answer.logprobs)

    def observed(self, ids: Sequence[int]) -> None:
        """Append ids that the model reads next."""
        self._append(ids, 0, [0.0] * len(ids))

    def tools_took(self, seconds: float, *, failed: bool = False) -> None:
        """Add tool time, and whether a call failed, to the last turn, if there was one."""
        if self._turns:
            self._turns[-1].tools_s += seconds
            self._turns[-1].failed_calls += failed

    def trajectory(self) -> Trajectory:
        """Return the current row in the result format."""
        return Trajectory(
            ids=self._ids,
            loss_mask=self._mask,
            logprobs=self._logprobs,
            turns=[_record(turn) for turn in self._turns[self._first :]],
            drift=self._drift,
            token_exact=self.exact,
            shared_prefix_len=self._shared,
        )

    def _append(self, ids: Sequence[int], mask: int, logprobs: Sequence[float]) -> None:
        self._ids.extend(ids)
        self._mask.extend([mask] * len(ids))
        self._logprobs.extend(logprobs)


def answers_of(row: Trajectory) -> dict[bytes, Sampled]:
    """Return the answers of an episode with one row by their `Ledger.history`."""
    answers, ledger = {}, Ledger(())
    for turn in row.turns:
        ledger.observed(row.ids[len(ledger) : turn.start])
        answer = Sampled(
            tuple(row.ids[turn.start : turn.end]),
            tuple(row.logprobs[turn.start : turn.end]),
            turn.finish_reason,  # type: ignore[arg-type]
            turn.weight_version,
            turn.server,
            tuple(turn.version_spans),
            turn.cached_tokens,
            turn.token_exact,
        )
        answers[ledger.history()] = answer
        ledger.sampled(answer, turn.model_s)
    return answers


def _record(turn: _Turn) -> TurnRecord:
    answer = turn.sampled
    return TurnRecord(
        start=turn.start,
        end=turn.start + len(answer.ids),
        finish_reason=answer.finish_reason,
        weight_version=answer.weight_version,
        server=answer.server,
        model_s=turn.model_s,
        tools_s=turn.tools_s,
        version_spans=list(answer.version_spans),
        cached_tokens=answer.cached_tokens,
        failed_calls=turn.failed_calls,
        token_exact=answer.exact,
    )
