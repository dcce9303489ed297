"""The token ledger of one episode: exactly what the model read and wrote.

A row grows only at its end, and a prompt is compared only where it is new since the last one: what a turn
costs depends on its own tokens, not on the history. A context that does not go on from what is recorded
begins another row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from prorl_envs.policy.types import Sampled
from prorl_envs.rollout.types import Trajectory, TurnRecord


@dataclass(slots=True)
class _Turn:
    start: int
    sampled: Sampled
    model_s: float
    tools_s: float = 0.0


class Ledger:
    """Ids, mask and log-probabilities of one episode, and its turns as spans of them.

    Args:
        prompt_ids: ids of the conversation's beginning.

    Its length, and what it is asked to append, are those of the last row; `forks` are the rows before.
    """

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self.forks: list[Trajectory] = []
        self._turns: list[_Turn] = []
        self._begin(prompt_ids)

    def fork(self, prompt_ids: Sequence[int]) -> None:
        """Begin another row: the conversation goes on from these ids, which rewrite its history."""
        self.forks.append(self.trajectory())
        self._begin(prompt_ids)

    def _begin(self, prompt_ids: Sequence[int]) -> None:
        self._ids = list(prompt_ids)
        self._mask = [0] * len(self._ids)
        self._logprobs = [0.0] * len(self._ids)
        self._first = len(self._turns)
        self._checked = 0
        self._drift = 0

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def ids(self) -> list[int]:
        """Of the row that grows; not to be changed."""
        return self._ids

    @property
    def aborted(self) -> Sequence[Trajectory]:
        """None: the loop waits for what it asked for."""
        return ()

    @property
    def turns(self) -> int:
        """Model calls so far."""
        return len(self._turns)

    @property
    def sampled_tokens(self) -> int:
        return sum(len(turn.sampled.ids) for turn in self._turns)

    @property
    def exact(self) -> bool:
        """The ids are those that the model read and sampled."""
        return all(turn.sampled.exact for turn in self._turns)

    @property
    def model_s(self) -> float:
        return sum(turn.model_s for turn in self._turns)

    @property
    def tools_s(self) -> float:
        return sum(turn.tools_s for turn in self._turns)

    def sent(self, prompt_ids: Sequence[int]) -> None:
        """Compare a prompt as it is about to be sent with what is recorded: the part that is new since
        the last one, position by position, and the length as a whole."""
        mine, theirs = self._ids[self._checked :], list(prompt_ids[self._checked :])
        if mine != theirs:  # not position by position in the ordinary case
            self._drift += sum(a != b for a, b in zip(mine, theirs, strict=False))
        self._drift += abs(len(self._ids) - len(prompt_ids))
        self._checked = len(self._ids)

    def sampled(self, answer: Sampled, model_s: float) -> None:
        """Append a sampled answer. One that is not exact is no training data: its mask is 0."""
        self._turns.append(_Turn(len(self._ids), answer, model_s))
        self._append(answer.ids, int(answer.exact), answer.logprobs)

    def observed(self, ids: Sequence[int]) -> None:
        """Append what the model reads next."""
        self._append(ids, 0, [0.0] * len(ids))

    def tools_took(self, seconds: float) -> None:
        """Add to the tool time of the last turn, if there was one."""
        if self._turns:
            self._turns[-1].tools_s += seconds

    def trajectory(self) -> Trajectory:
        """The row that grows, in the result format."""
        return Trajectory(
            ids=self._ids,
            loss_mask=self._mask,
            logprobs=self._logprobs,
            turns=[_record(turn) for turn in self._turns[self._first :]],
            drift=self._drift,
            exact=self.exact,
        )

    def _append(self, ids: Sequence[int], mask: int, logprobs: Sequence[float]) -> None:
        self._ids.extend(ids)
        self._mask.extend([mask] * len(ids))
        self._logprobs.extend(logprobs)


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
        exact=answer.exact,
    )
