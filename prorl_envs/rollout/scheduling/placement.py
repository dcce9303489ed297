"""Placement of jobs on nodes: the load of each node, and the choice of the least loaded one. Pure.

A job is bound to its node from INIT until its environment is closed, since its sandbox is there. So each node
has its own pools and its own queues for RUN and EVAL. A node is chosen only for INIT.
"""

import heapq
import itertools
from dataclasses import dataclass, field
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

    def of(self, stage: Stage) -> int:
        return {Stage.INIT: self.init, Stage.RUN: self.run, Stage.EVAL: self.eval}[stage]


@dataclass(slots=True, eq=False)
class Place:
    """Scheduler's record of one node.

    Args:
        name: name of the node.
        limits: limits of concurrent work on the node.
        open: the node accepts new jobs.

    Attributes:
        jobs_with_sandbox: jobs that hold an environment on the node; `active`: running jobs by stage.
        queues: jobs that wait on the node for RUN and EVAL.
    """

    name: str
    limits: StageLimits
    open: bool = True
    jobs_with_sandbox: int = 0
    active: dict[Stage, int] = field(default_factory=lambda: dict.fromkeys(Stage, 0))
    queues: dict[Stage, FairQueue] = field(
        default_factory=lambda: {Stage.RUN: FairQueue(), Stage.EVAL: FairQueue()}
    )

    @property
    def room(self) -> bool:
        """True if another environment may start on the node."""
        return (
            self.jobs_with_sandbox < self.limits.max_jobs_with_sandbox
            and self.active[Stage.INIT] < self.limits.init
        )


class Placement:
    """Set of nodes, with a choice of the least loaded node that has room.

    A heap orders the nodes by load: jobs with a sandbox, divided by their maximum. Outdated heap entries are
    discarded when they reach the top. So a choice takes time logarithmic in the number of nodes.
    """

    def __init__(self) -> None:
        self.places: dict[str, Place] = {}
        self._offers: list[tuple[float, int, str]] = []
        self._valid: dict[str, int] = {}  # by node, the number of its current heap entry
        self._numbers = itertools.count()

    def join(self, place: Place) -> None:
        """Add a node.

        Raises:
            ValueError: there is a node of this name.
        """
        if place.name in self.places:
            raise ValueError(f"node {place.name!r} exists already")
        self.places[place.name] = place
        self.changed(place)

    def leave(self, name: str) -> Place:
        """Remove a node."""
        self._valid.pop(name, None)
        return self.places.pop(name)

    def changed(self, place: Place) -> None:
        """Update the heap after a change of a node's load or limits."""
        if self.places.get(place.name) is not place:
            return  # the node was removed
        if not (place.open and place.room):
            self._valid.pop(place.name, None)
            return
        number = self._valid[place.name] = next(self._numbers)
        heapq.heappush(
            self._offers, (place.jobs_with_sandbox / place.limits.max_jobs_with_sandbox, number, place.name)
        )
        if len(self._offers) > 4 * len(self.places) + 64:
            self._offers = [offer for offer in self._offers if self._is_valid(offer)]
            heapq.heapify(self._offers)

    def best(self, avoid: str | None = None) -> Place | None:
        """Return the least loaded node, or None if no node has room.

        Args:
            avoid: name of a node that is chosen only if no other node has room.
        """
        first = self._pop()
        if first is None:
            return None
        chosen, second = first, None
        if first[2] == avoid and (second := self._pop()) is not None:
            chosen = second
        for offer in (first, second):  # both entries stay valid until their node changes
            if offer is not None:
                heapq.heappush(self._offers, offer)
        return self.places[chosen[2]]

    def _pop(self) -> tuple[float, int, str] | None:
        while self._offers:
            offer = heapq.heappop(self._offers)
            if self._is_valid(offer):
                return offer
        return None

    def _is_valid(self, offer: tuple[float, int, str]) -> bool:
        return self._valid.get(offer[2]) == offer[1]
