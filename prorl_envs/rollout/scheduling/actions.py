"""Actions: decisions of the scheduler that the engine carries out."""

from dataclasses import dataclass

from prorl_envs.rollout.api.types import JobState, Stage
from prorl_envs.rollout.scheduling.placement import HERE


@dataclass(frozen=True, slots=True)
class Start:
    """Action: run this stage of the job now, on this node."""

    job: str
    stage: Stage
    attempt: int
    node: str = HERE


@dataclass(frozen=True, slots=True)
class Interrupt:
    """Action: interrupt the running stage, then call `Scheduler.ended`."""

    job: str


@dataclass(frozen=True, slots=True)
class Finish:
    """Action: record the result of the finished job. Returned exactly once for every job.

    Args:
        stage: the stage that the job was in, or waited for.
    """

    job: str
    state: JobState
    stage: Stage


@dataclass(frozen=True, slots=True)
class Close:
    """Action: close the environment of the job's attempt, then call `Scheduler.closed`."""

    job: str


@dataclass(frozen=True, slots=True)
class AdmitExternal:
    """Action: let a guest, an environment driven by an external caller, start on this node. Its owner then
    calls `Scheduler.prepared`."""

    guest: str
    node: str = HERE


type Decision = Start | Interrupt | Finish | Close | AdmitExternal
