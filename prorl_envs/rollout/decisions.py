"""What the scheduler decides, for the engine to carry out."""

from dataclasses import dataclass

from prorl_envs.rollout.placement import HERE
from prorl_envs.rollout.types import JobState, Stage


@dataclass(frozen=True, slots=True)
class Start:
    """Run this stage of the job now, on this node."""

    job: str
    stage: Stage
    attempt: int
    node: str = HERE


@dataclass(frozen=True, slots=True)
class Interrupt:
    """End the stage that is running; then report `ended`."""

    job: str


@dataclass(frozen=True, slots=True)
class Finish:
    """The job has come to its end: record its result. Given exactly once for every job."""

    job: str
    state: JobState


@dataclass(frozen=True, slots=True)
class Close:
    """Close the environment of the job's attempt; then report `closed`."""

    job: str


@dataclass(frozen=True, slots=True)
class Grant:
    """The guest may start its environment now; then report `prepared`."""

    guest: str


type Decision = Start | Interrupt | Finish | Close | Grant
