"""Conversion of a rollout service result to training rows, shared by all trainer adapters. Pure.

An episode is one row, or several if its history was rewritten (`service.reasoning`). Rows of an episode share
its reward, so a loss is normalised per episode: by each row's `weight`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from prorl_envs.errors import ProrlError
from prorl_envs.model.types import VersionSpan
from prorl_envs.rollout.api.types import JobState, Result, StopReason, Trajectory, TurnRecord
from prorl_envs.rollout.client.trajectory_checks import check_trajectory

_CUT = frozenset({StopReason.TURN_LIMIT, StopReason.TOKEN_LIMIT, StopReason.TIME_LIMIT})


class SeveralRows(ProrlError):
    """Error: an episode is several rows, and the trainer takes one for each sample."""


class RowStatus(StrEnum):
    """Status of an episode.

    `completed`: finished by the policy; `truncated`: stopped by a limit of turns, tokens or time. Both were
    graded. `aborted`: cancelled; `failed`: a failure of our infrastructure. Neither has a reward. `rejected`:
    must not be trained on, though it may have a reward: its ids are not those that the model sampled.
    """

    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"
    REJECTED = "rejected"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One sequence to train on, prompt and response separated.

    Args:
        job_id, group_id, environment, task_id: source of the row.
        repetition: number of the sample in its group.
        index: number of the row in its episode; `count`: number of rows of the episode. `last` is the graded
            row.
        prompt_ids: ids before the first sampled one.
        response_ids: ids from the first sampled one to the last, including observations in between, shape
            [T].
        mask: 1 if the policy sampled the id and a loss may use it, else 0, shape [T]. All 0 if the episode
            must not be trained on.
        logprobs: log-probability of each id under the policy that sampled it, 0.0 where the mask is 0, shape
            [T].
        reward: the episode's; None if there is none. A failure is never 0.
        status: see `RowStatus`.
        stop_reason: why the agent loop stopped, or "".
        failure: kind of the failure, or "".
        turns: the model calls, as [start, end) of `response_ids`.
        versions: weight versions and the spans of `response_ids` that they sampled, in order, as named by the
            model servers; "" is unknown.
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
    status: RowStatus
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
        """True if some token of the row can be trained on."""
        return any(self.mask)

    @property
    def oldest_version(self) -> int | None:
        """The oldest version of the weights that sampled the row, if versions are numbers and known."""
        names = [span.version for span in self.versions]
        known = bool(names) and all(name.isascii() and name.isdecimal() and len(name) < 20 for name in names)
        return min(map(int, names)) if known else None

    def staleness(self, current: int) -> int | None:
        """Return by how many versions the oldest token is behind `current`; None if no version is known."""
        oldest = self.oldest_version
        return None if oldest is None else max(0, current - oldest)

    def without_loss(self) -> "Row":
        """Return a copy without any token to train on."""
        return replace(self, mask=[0] * len(self.mask), logprobs=[0.0] * len(self.mask))

    def filled(self, prompt_ids: Sequence[int], token: int) -> "Row":
        """Return a non-empty row for trainers that require one for every sample. A row that trains is
        returned unchanged; any other gets `prompt_ids`, if it has no prompt, and one token without loss."""
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
    """Return the rows of an episode, oldest first; at least one, which is empty if nothing was sampled.

    Ids after a row's last sampled id are dropped: no loss depends on them.

    Raises:
        NotContiguous: a trajectory is inconsistent with its turns.
    """
    status = _status(result)
    trajectories = result.rows or [Trajectory(ids=[], loss_mask=[], logprobs=[], turns=[])]
    rows = []
    for index, trajectory in enumerate(trajectories):
        row = _row(result, status, trajectory, index, len(trajectories))
        counts = status in (RowStatus.COMPLETED, RowStatus.TRUNCATED)
        rows.append(row if counts else row.without_loss())
    return rows


def one_row(result: Result) -> Row:
    """Return the row of an episode, for trainers that take one for each sample.

    Raises:
        SeveralRows: there are several.
        NotContiguous: as `rows_of`.
    """
    rows = rows_of(result)
    if len(rows) > 1:
        raise SeveralRows(
            f"{result.job_id} is {len(rows)} rows, and this trainer takes one for each sample",
            hint="set service.reasoning to keep",
        )
    return rows[0]


def _status(result: Result) -> RowStatus:
    if result.state is JobState.CANCELLED:
        return RowStatus.ABORTED
    if result.reward is None:
        return RowStatus.FAILED
    exact = all(trajectory.token_exact and not trajectory.drift for trajectory in result.rows)
    if result.mask_sample or not result.rows or not exact:
        return RowStatus.REJECTED
    return RowStatus.TRUNCATED if result.stop_reason in _CUT else RowStatus.COMPLETED


def _row(result: Result, status: RowStatus, trajectory: Trajectory, index: int, count: int) -> Row:
    if trajectory.token_exact:
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
    """Yield the weight versions of a turn and their spans, as indices from `first` on."""
    offset = turn.start - first
    for span in turn.version_spans:
        yield VersionSpan(version=span.version, start=offset + span.start, end=offset + span.end)
    if not turn.version_spans and turn.end > turn.start:
        yield VersionSpan(version=turn.weight_version, start=offset, end=offset + turn.end - turn.start)


def _merged(spans: Iterator[VersionSpan]) -> Iterator[VersionSpan]:
    """Merge adjacent spans of one version."""
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
