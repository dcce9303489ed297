"""Placement of jobs on nodes: the load of each node, and the choice of the least loaded one. Pure.

A job is bound to its node from INIT until its environment is closed, since its sandbox is there. So each node
has its own pools and its own queues for RUN and EVAL. A node is chosen only for INIT.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Self

from prorl_envs.config import ServiceSettings
from prorl_envs.rollout.api.types import Stage
from prorl_envs.rollout.scheduling.fair_queue import FairQueue

#: Name of the service's own machine.
HERE = ""
#: Name of the service's own machine in metrics. No node may join with this name.
HEAD = "head"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLimits:
    """Limits of concurrent work on one node.

    Args:
        init, run, eval: maximum number of active jobs in each stage.
        max_jobs_with_sandbox: maximum number of jobs that hold an environment. A job holds one from the
            start of INIT until the environment is closed.
        attempts: maximum number of attempts of one job, including the first; the same for all nodes.
    """

    init: int
    run: int
    eval: int
    max_jobs_with_sandbox: int
    attempts: int = 2

    def __post_init__(self) -> None:
        if min(self.init, self.run, self.eval, self.max_jobs_with_sandbox, self.attempts) < 1:
            raise ValueError("every limit is at least 1")

    @classmethod
    def of_settings(cls, settings: ServiceSettings) -> Self:
        """Return the limits of this machine."""
        all_stages = settings.init + settings.run + settings.eval
        return cls(
            init=settings.init,
            run=settings.run,
            eval=settings.eval,
            max_jobs_with_sandbox=settings.max_jobs_with_sandbox or all_stages,
            attempts=settings.attempts,
        )

    def at_most(self, sandboxes: int) -> Self:
        """Return these limits with at most `sandboxes` jobs that hold an environment; others wait."""
        return replace(self, max_jobs_with_sandbox=min(self.max_jobs_with_sandbox, sandboxes))

    def of(self, stage: Stage) -> int:
        return {Stage.INIT: self.init, Stage.RUN: self.run, Stage.EVAL: self.eval}[stage]


@dataclass(slots=True, eq=False)
class NodeRecord:
    """Scheduler's record of one node.

    Args:
        name: name of the node.
        limits: limits of concurrent work on the node.
        open: the node accepts new jobs.

    Attributes:
        jobs_with_sandbox: jobs that hold an environment on the node; `active`: running jobs by stage.
        queues: jobs that wait on the node for a stage; for INIT, those that start from a checkpoint there.
    """

    name: str
    limits: StageLimits
    open: bool = True
    jobs_with_sandbox: int = 0
    active: dict[Stage, int] = field(default_factory=lambda: dict.fromkeys(Stage, 0))
    queues: dict[Stage, FairQueue] = field(default_factory=lambda: {stage: FairQueue() for stage in Stage})

    @property
    def room(self) -> bool:
        """True if another environment may start on the node."""
        return (
            self.jobs_with_sandbox < self.limits.max_jobs_with_sandbox
            and self.active[Stage.INIT] < self.limits.init
        )

    @property
    def load(self) -> float:
        """Share of the node's environments that are in use."""
        return self.jobs_with_sandbox / self.limits.max_jobs_with_sandbox


def least_loaded(records: Iterable[NodeRecord], avoid: str | None = None) -> NodeRecord | None:
    """Return the least loaded node on which another job may start, or None if there is none.

    Args:
        records: all nodes.
        avoid: name of a node that is chosen only if no other node has room.
    """
    with_room = (record for record in records if record.open and record.room)
    return min(with_room, key=lambda record: (record.name == avoid, record.load), default=None)
