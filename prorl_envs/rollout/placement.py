"""Which machine a job goes to: the nodes of a service, how full each is, and the one with most room. Pure.

A job is bound to its node from INIT to the end of close, since its sandbox is there. So each node has its own
pools and its own queues in front of RUN and EVAL, and only the choice at INIT is made between nodes.
"""

import heapq
import itertools
from dataclasses import dataclass, field
from typing import Self

from prorl_envs.config import ServiceSettings
from prorl_envs.rollout.fair_queue import FairQueue
from prorl_envs.rollout.types import Stage

#: The machine that the service itself is on.
HERE = ""
#: What it is called beside others, in metrics. No node that joins is called so.
HEAD = "head"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much may happen at once on one node.

    Args:
        init, run, eval: jobs active in each stage.
        live: jobs that hold an environment, from the start of INIT to the end of close.
        attempts: how often one job may be tried, the first time included; the same for all nodes.
    """

    init: int
    run: int
    eval: int
    live: int
    attempts: int = 2

    def __post_init__(self) -> None:
        if min(self.init, self.run, self.eval, self.live, self.attempts) < 1:
            raise ValueError("every limit is at least 1")

    @classmethod
    def of_settings(cls, settings: ServiceSettings) -> Self:
        """Those of this machine."""
        live = settings.live or settings.init + settings.run + settings.eval
        return cls(
            init=settings.init, run=settings.run, eval=settings.eval, live=live, attempts=settings.attempts
        )

    def of(self, stage: Stage) -> int:
        return {Stage.INIT: self.init, Stage.RUN: self.run, Stage.EVAL: self.eval}[stage]


@dataclass(slots=True, eq=False)
class Place:
    """A node, as the scheduler knows it.

    Args:
        name: of the node.
        limits: how much may happen there at once.
        open: new jobs may go there.

    Attributes:
        live: environments there; `active`: stages that run there.
        queues: who waits there for RUN and EVAL.
    """

    name: str
    limits: Limits
    open: bool = True
    live: int = 0
    active: dict[Stage, int] = field(default_factory=lambda: dict.fromkeys(Stage, 0))
    queues: dict[Stage, FairQueue] = field(
        default_factory=lambda: {Stage.RUN: FairQueue(), Stage.EVAL: FairQueue()}
    )

    @property
    def room(self) -> bool:
        """Another environment may start there."""
        return self.live < self.limits.live and self.active[Stage.INIT] < self.limits.init


class Placement:
    """The nodes that there are, and the least loaded of those with room.

    Nodes are kept in a heap by the share of their environments that is taken; an entry that is out of date is
    thrown away when it comes up. So a choice costs the logarithm of the number of nodes.
    """

    def __init__(self) -> None:
        self.places: dict[str, Place] = {}
        self._offers: list[tuple[float, int, str]] = []
        self._valid: dict[str, int] = {}  # by node, which of its offers counts
        self._numbers = itertools.count()

    def join(self, place: Place) -> None:
        """A node comes.

        Raises:
            ValueError: one of this name is there.
        """
        if place.name in self.places:
            raise ValueError(f"node {place.name!r} is there already")
        self.places[place.name] = place
        self.changed(place)

    def leave(self, name: str) -> Place:
        """A node is gone."""
        self._valid.pop(name, None)
        return self.places.pop(name)

    def changed(self, place: Place) -> None:
        """Something began or ended there."""
        if self.places.get(place.name) is not place:
            return  # it is gone
        if not (place.open and place.room):
            self._valid.pop(place.name, None)
            return
        number = self._valid[place.name] = next(self._numbers)
        heapq.heappush(self._offers, (place.live / place.limits.live, number, place.name))
        if len(self._offers) > 4 * len(self.places) + 64:
            self._offers = [offer for offer in self._offers if self._is_valid(offer)]
            heapq.heapify(self._offers)

    def best(self, avoid: str | None = None) -> Place | None:
        """The node with most room for its size, or None where no node has any.

        Args:
            avoid: chosen only where no other has room.
        """
        first = self._pop()
        if first is None:
            return None
        chosen, other = first, None
        if first[2] == avoid and (other := self._pop()) is not None:
            chosen = other
        for offer in (first, other):  # they count until something changes there
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
