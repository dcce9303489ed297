"""Results of episodes of every kind, for property tests."""

from typing import Any

from hypothesis import strategies as st

from prorl_envs.errors import FailureKind
from prorl_envs.model.types import VersionSpan
from prorl_envs.rollout.api.types import Failure, JobState, Result, Stage, StopReason, Trajectory, TurnRecord

_TOKENS = st.integers(min_value=3, max_value=99)
_LOGPROBS = st.floats(min_value=-30, max_value=0, allow_nan=False)


@st.composite
def turns(draw: st.DrawFn, start: int, exact: bool) -> tuple[TurnRecord, list[int], list[float]]:
    """Return a model call that starts at `start`: its record, ids and log-probabilities."""
    ids = draw(st.lists(_TOKENS, max_size=5))
    logprobs = [draw(_LOGPROBS) if exact else 0.0 for _ in ids]
    versions = draw(st.lists(st.sampled_from(["3", "4", "5"]), min_size=1, max_size=2))
    spans = []
    if len(versions) == 2 and len(ids) > 1:
        cut = draw(st.integers(min_value=1, max_value=len(ids) - 1))
        spans = [
            VersionSpan(version=versions[0], start=0, end=cut),
            VersionSpan(version=versions[1], start=cut, end=len(ids)),
        ]
    record = TurnRecord(
        start=start,
        end=start + len(ids),
        finish_reason="stop",
        weight_version=versions[0],
        server="http://s",
        model_s=0.1,
        tools_s=0.1,
        version_spans=spans,
        token_exact=exact,
    )
    return record, ids, logprobs


@st.composite
def trajectories(draw: st.DrawFn, exact: bool = True) -> Trajectory:
    """Return a row: a prompt, then turns with observations between and after them."""
    ids = draw(st.lists(_TOKENS, min_size=1, max_size=6))
    mask, logprobs, records = [0] * len(ids), [0.0] * len(ids), []
    for _ in range(draw(st.integers(min_value=0, max_value=4))):
        record, said, probabilities = draw(turns(len(ids), exact))
        told = draw(st.lists(_TOKENS, max_size=4))
        records.append(record)
        ids += said + told
        mask += [int(exact)] * len(said) + [0] * len(told)
        logprobs += probabilities + [0.0] * len(told)
    return Trajectory(ids=ids, loss_mask=mask, logprobs=logprobs, turns=records, token_exact=exact)


@st.composite
def results(
    draw: st.DrawFn,
    group: str = "g",
    sample: int | None = None,
    most_rows: int = 3,
    exact: bool | None = None,
) -> Result:
    """Return the result of an arbitrary episode."""
    state = draw(st.sampled_from([JobState.DONE, JobState.DONE, JobState.FAILED, JobState.CANCELLED]))
    true_ids = draw(st.booleans() | st.just(True)) if exact is None else exact
    rows = draw(st.lists(trajectories(exact=true_ids), max_size=most_rows))
    if state is JobState.DONE and not rows:
        rows = [draw(trajectories(exact=true_ids))]
    done = state is JobState.DONE
    kind = FailureKind.CANCELLED if state is JobState.CANCELLED else FailureKind.SANDBOX
    number = draw(st.integers(min_value=0, max_value=7)) if sample is None else sample
    return Result(
        job_id=f"{group}/{number}",
        group_id=group,
        sample=number,
        environment="toy",
        task_id="t",
        state=state,
        reward=draw(st.floats(min_value=-1, max_value=1)) if done else None,
        mask_sample=not done or not true_ids,
        stop_reason=draw(st.sampled_from(StopReason)) if done else None,
        failure=None if done else Failure(kind=kind, stage=Stage.RUN, message="it broke"),
        messages=[{"role": "user", "content": "do"}, {"role": "assistant", "content": "done"}],
        trajectory=rows[-1] if rows else None,
        forks=rows[:-1],
    )


def groups(samples: int, **options: Any) -> st.SearchStrategy[list[Result]]:
    """Return the results of a whole group, in order."""
    return st.tuples(*(results(sample=number, **options) for number in range(samples))).map(list)
