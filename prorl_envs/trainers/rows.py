"""Conversion of a result to training rows, shared by all trainer adapters. Pure.

An episode is one row, or several if its history was rewritten (`service.reasoning`). All rows of an episode
have its reward, so a loss should be normalised per episode, with each row's `weight`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from prorl_envs.errors import ProrlError
from prorl_envs.model.types import VersionSpan, joined_spans, spans_at
from prorl_envs.rollout.api.types import JobState, Result, StopReason, Trajectory, TurnRecord
from prorl_envs.rollout.client.trajectory_checks import check_trajectory

_CUT = frozenset({StopReason.TURN_LIMIT, StopReason.TOKEN_LIMIT, StopReason.TIME_LIMIT})


class SeveralRows(ProrlError):
    """Error: an episode has several rows, but the trainer accepts only one row per sample."""


class RowStatus(StrEnum):
    """Status of an episode.

    `completed` (finished by the policy) and `truncated` (stopped by a limit of turns, tokens or time) were
    graded. `aborted` (cancelled) and `failed` (an infrastructure failure) have no reward. `rejected` may have
    a reward, but must not be trained on, since its ids are not exactly the ids that the model sampled.
    """

    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"
    REJECTED = "rejected"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Sequence of tokens to train on, separated into prompt and response.

    Args:
        job_id, group_id, environment, task_id: source of the row.
        repetition: index of the sample in its group.
        index: index of the row in its episode; `count`: number of rows of the episode.
        prompt_ids: ids before the first sampled id.
        response_ids: ids from the first to the last sampled id, with observations in between, shape [T].
        mask: 1 if the policy sampled the id and a loss may use it, else 0, shape [T]. All 0 if the episode
            must not be trained on.
        logprobs: log-probability of each id under the policy that sampled it, 0.0 if the mask is 0, shape
            [T].
        reward: reward of the episode; None if it has none, never 0 instead.
        status: see `RowStatus`.
        stop_reason: reason why the agent loop stopped, or "".
        failure: kind of the failure, or "".
        turns: the model calls, as spans [start, end) of `response_ids`.
        versions: weight versions and the spans of `response_ids` that they sampled, in order. The model
            servers name the versions; "" means unknown.
        messages: conversation of the episode.
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
        """Weight of this row in a loss, so that the weights of an episode's rows sum to 1."""
        return 1.0 / self.count

    @property
    def trains(self) -> bool:
        """True if at least one token of the row can be trained on."""
        return any(self.mask)

    @property
    def oldest_version(self) -> int | None:
        """Oldest weight version that sampled the row; None if a version is unknown or not a number."""
        names = [span.version for span in self.versions]
        known = bool(names) and all(name.isascii() and name.isdecimal() and len(name) < 20 for name in names)
        return min(map(int, names)) if known else None

    def staleness(self, current: int) -> int | None:
        """Return the number of versions from `oldest_version` to `current`; None if it is unknown."""
        oldest = self.oldest_version
        return None if oldest is None else max(0, current - oldest)

    def without_loss(self) -> "Row":
        """Return a copy in which no token can be trained on."""
        return replace(self, mask=[0] * len(self.mask), logprobs=[0.0] * len(self.mask))

    def filled(self, prompt_ids: Sequence[int], token: int) -> "Row":
        """Return a row for trainers that require one for every sample. If this row cannot be trained on, its
        response becomes `token` without loss, and an empty prompt becomes `prompt_ids`."""
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
    """Return the rows of an episode, oldest first. An episode without tokens has one empty row.

    Ids after a row's last sampled id are dropped, since no loss depends on them.

    Raises:
        NotContiguous: a trajectory is inconsistent with its turns.
    """
    status = _status(result)
    trajectories = result.rows or [Trajectory(ids=[], loss_mask=[], logprobs=[], turns=[])]
    rows = []
    for index, trajectory in enumerate(trajectories):
        row = _row(result, status, trajectory, index, len(trajectories))
        graded = status in (RowStatus.COMPLETED, RowStatus.TRUNCATED)
        rows.append(row if graded else row.without_loss())
    return rows


def training_reward(result: Result) -> float | None:
    """Return the reward of an episode for statistics over its group; None if nothing in it can be trained on,
    since such an episode would shift the advantages of the others.

    Raises:
        NotContiguous: see `rows_of`.
    """
    return result.reward if any(row.trains for row in rows_of(result)) else None


def filled_rows(rows: Sequence[Row], token: int) -> list[Row]:
    """Return rows for trainers that require one for every sample (`Row.filled`). An empty prompt becomes that
    of another row of its group, or else of another group."""
    prompts = {row.group_id: row.prompt_ids for row in rows if row.prompt_ids}
    default = next(iter(prompts.values()), [token])
    return [row.filled(prompts.get(row.group_id, default), token) for row in rows]


def one_row(result: Result) -> Row:
    """Return the only row of an episode, for trainers that accept one row per sample.

    Raises:
        SeveralRows: the episode has several rows.
        NotContiguous: see `rows_of`.
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
        versions=tuple(joined_spans(span for turn in turns for span in _spans(turn, first))),
        messages=result.messages,
    )


def _spans(turn: TurnRecord, first: int) -> list[VersionSpan]:
    """Return the weight versions of a turn with their spans, as indices relative to `first`."""
    return spans_at(turn.start - first, turn.end - turn.start, turn.weight_version, turn.version_spans)
