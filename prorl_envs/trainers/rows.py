"""A result of the rollout service as rows to train on: what every adapter of this room converts. Pure.

An episode is one row, or several where its history was rewritten (`service.reasoning`). Rows of an episode
share its reward, so a loss is normalised per episode: by each row's `weight`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from prorl_envs.errors import ProrlError
from prorl_envs.policy.types import VersionSpan
from prorl_envs.rollout.checks import check_trajectory
from prorl_envs.rollout.types import JobState, Result, StopReason, Trajectory, TurnRecord

_CUT = frozenset({StopReason.TURN_LIMIT, StopReason.TOKEN_LIMIT, StopReason.TIME_LIMIT})


class SeveralRows(ProrlError):
    """An episode is several rows, and the trainer takes one for each sample."""


class Status(StrEnum):
    """What became of an episode.

    `completed`: the policy ended it; `truncated`: a limit of turns, tokens or time did. Both were graded.
    `aborted`: it was cancelled; `failed`: something of ours broke. Neither has a reward.
    `rejected`: nothing of it may be trained on, though it may have a reward: its ids are not those that the
    model sampled.
    """

    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"
    REJECTED = "rejected"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One sequence to train on, prompt and response apart.

    Args:
        job_id, group_id, environment, task_id: what it is a row of.
        repetition: which of its group's samples.
        index: which of its episode's rows; `count`: how many these are. `last` is the one that was graded.
        prompt_ids: ids before the first sampled one.
        response_ids: ids from the first sampled one to the last, what the model was told in between
            included, shape [T].
        mask: 1 where the policy sampled the id and a loss may look at it, else 0, shape [T]. All 0 where
            the episode must not be trained on.
        logprobs: log-probability of each id under the policy that sampled it, 0.0 where the mask is 0,
            shape [T].
        reward: the episode's; None where there is none. A failure is never 0.
        status: see `Status`.
        stop_reason: why the agent loop ended, or "".
        failure: kind of the failure, or "".
        turns: the model calls, as [start, end) of `response_ids`.
        versions: which version of the weights sampled which stretch of `response_ids`, in order, as the
            model servers name them; "" is not known.
        messages: the episode's conversation.
    """

    job_id: str
    group_id: str
    environment: str
    task_id: str
    repetition: int
    index: int
    count: int
    prompt_ids: list[int]
    response_ids: list[int]
    mask: list[int]
    logprobs: list[float]
    reward: float | None
    status: Status
    stop_reason: str
    failure: str
    turns: tuple[tuple[int, int], ...]
    versions: tuple[VersionSpan, ...]
    messages: Sequence[dict[str, Any]]

    @property
    def last(self) -> bool:
        return self.index == self.count - 1

    @property
    def weight(self) -> float:
        """This row's share of its episode in a loss."""
        return 1.0 / self.count

    @property
    def trains(self) -> bool:
        """There is something in it to train on."""
        return any(self.mask)

    @property
    def oldest_version(self) -> int | None:
        """The oldest version of the weights that sampled of it, where versions are numbers and known."""
        names = [span.version for span in self.versions]
        known = bool(names) and all(name.isascii() and name.isdecimal() and len(name) < 20 for name in names)
        return min(map(int, names)) if known else None

    def staleness(self, current: int) -> int | None:
        """Versions by which the oldest token is behind `current`; None where no version is known."""
        oldest = self.oldest_version
        return None if oldest is None else max(0, current - oldest)

    def without_loss(self) -> "Row":
        """The same, and nothing of it is trained on."""
        return replace(self, mask=[0] * len(self.mask), logprobs=[0.0] * len(self.mask))

    def filled(self, prompt_ids: Sequence[int], token: int) -> "Row":
        """For trainers that need something in each place: itself where it trains; else a row of the same
        episode with this prompt, if it has none, and one token that no loss looks at."""
        if self.trains:
            return self
        return replace(
            self,
            prompt_ids=self.prompt_ids or list(prompt_ids),
            response_ids=[token],
            mask=[0],
            logprobs=[0.0],
            turns=(),
            versions=(),
        )


def rows_of(result: Result) -> list[Row]:
    """The rows of an episode, oldest first; at least one, which is empty where nothing was sampled.

    What follows a row's last sampled id is left out: no loss depends on it.

    Raises:
        NotContiguous: a trajectory is not what its own turns say.
    """
    status = _status(result)
    trajectories = result.rows or [Trajectory(ids=[], loss_mask=[], logprobs=[], turns=[])]
    rows = []
    for index, trajectory in enumerate(trajectories):
        row = _row(result, status, trajectory, index, len(trajectories))
        counts = status in (Status.COMPLETED, Status.TRUNCATED)
        rows.append(row if counts else row.without_loss())
    return rows


def one_row(result: Result) -> Row:
    """The row of an episode, for trainers that take one for each sample.

    Raises:
        SeveralRows: it has more.
        NotContiguous: as `rows_of`.
    """
    rows = rows_of(result)
    if len(rows) > 1:
        raise SeveralRows(
            f"{result.job_id} is {len(rows)} rows, and this trainer takes one for each sample",
            hint="set service.reasoning to keep",
        )
    return rows[0]


def _status(result: Result) -> Status:
    if result.state is JobState.CANCELLED:
        return Status.ABORTED
    if result.reward is None:
        return Status.FAILED
    exact = all(trajectory.exact and not trajectory.drift for trajectory in result.rows)
    if result.mask_sample or not result.rows or not exact:
        return Status.REJECTED
    return Status.TRUNCATED if result.stop_reason in _CUT else Status.COMPLETED


def _row(result: Result, status: Status, trajectory: Trajectory, index: int, count: int) -> Row:
    if trajectory.exact:
        check_trajectory(trajectory)
    turns = trajectory.turns
    first = turns[0].start if turns else len(trajectory.ids)
    end = turns[-1].end if turns else first
    return Row(
        job_id=result.job_id,
        group_id=result.group_id,
        environment=result.environment,
        task_id=result.task_id,
        repetition=result.sample,
        index=index,
        count=count,
        prompt_ids=trajectory.ids[:first],
        response_ids=trajectory.ids[first:end],
        mask=trajectory.loss_mask[first:end],
        logprobs=trajectory.logprobs[first:end],
        reward=result.reward,
        status=status,
        stop_reason=result.stop_reason or "",
        failure=result.failure.kind if result.failure else "",
        turns=tuple((turn.start - first, turn.end - first) for turn in turns),
        versions=tuple(_merged(span for turn in turns for span in _spans(turn, first))),
        messages=result.messages,
    )


def _spans(turn: TurnRecord, first: int) -> Iterator[VersionSpan]:
    """Which version sampled what of a turn, as indices from `first` on."""
    offset = turn.start - first
    for span in turn.version_spans:
        yield VersionSpan(version=span.version, start=offset + span.start, end=offset + span.end)
    if not turn.version_spans and turn.end > turn.start:
        yield VersionSpan(version=turn.weight_version, start=offset, end=offset + turn.end - turn.start)


def _merged(spans: Iterator[VersionSpan]) -> Iterator[VersionSpan]:
    """Spans of one version that touch, as one."""
    held: VersionSpan | None = None
    for span in spans:
        if held is not None and held.version == span.version and held.end == span.start:
            held = held.model_copy(update={"end": span.end})
            continue
        if held is not None:
            yield held
        held = span
    if held is not None:
        yield held
