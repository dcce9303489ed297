"""Fair queue: jobs ordered by priority, then by weight, then by arrival. Pure.

A lane holds the waiting jobs of one owner. Among the lanes of the highest priority, the lane with the least
service per weight is served next. This is start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM 1996) with
jobs as packets of one size. While two lanes have waiting jobs, their service per weight differs by less than
one job of each lane, whatever other lanes do.

Within a lane, groups are served in order of arrival, with at most `TURN` consecutive jobs of one group. So an
ordinary group is completed before the next group starts, as trainers need it. A group of a thousand jobs
delays a group of one job by only `TURN` jobs.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass

#: Consecutive jobs of one group: the usual size of a group.
TURN = 16


@dataclass(frozen=True, slots=True)
class Share:
    """Share of a job's owner in the service.

    Args:
        lane: the owner; jobs of one lane share its service.
        weight: weight of the lane, over 0. A lane of weight 2 is served twice as often as a lane of weight 1
            if both have waiting jobs.
        priority: a job waits for every waiting job of a higher priority.
    """

    lane: str = ""
    weight: float = 1.0
    priority: int = 0


#: Share of jobs without an owner.
COMMON = Share()


class _Lane:
    """Waiting jobs of one lane, and its position in virtual time: number of served jobs / weight."""

    def __init__(self, turn: int) -> None:
        self.weight = 1.0
        self.position = 0.0
        self._turn = turn
        self._groups: OrderedDict[str, deque[str]] = OrderedDict()
        self._served = 0  # jobs of the first group that were served in this turn

    def __bool__(self) -> bool:
        return bool(self._groups)

    def push(self, job: str, group: str) -> None:
        self._groups.setdefault(group, deque()).append(job)

    def pop(self) -> str:
        group, jobs = next(iter(self._groups.items()))
        job = jobs.popleft()
        self._served += 1
        if not jobs:
            self._drop(group)
        elif self._served >= self._turn:
            self._groups.move_to_end(group)
            self._served = 0
        return job

    def remove(self, job: str, group: str) -> None:
        jobs = self._groups[group]
        jobs.remove(job)
        if not jobs:
            self._drop(group)

    def _drop(self, group: str) -> None:
        if group == next(iter(self._groups)):
            self._served = 0
        del self._groups[group]


class _Level:
    """Lanes of one priority.

    An empty lane is kept until the other lanes have reached its position. Otherwise a lane that always has a
    single waiting job would lose its position after each job, and be served too early.
    """

    def __init__(self) -> None:
        self.lanes: dict[str, _Lane] = {}
        self.now = 0.0  # virtual time: position of the lane served last

    def push(self, job: str, group: str, share: Share, turn: int) -> None:
        lane = self.lanes.setdefault(share.lane, _Lane(turn))
        lane.weight = share.weight
        if not lane:
            lane.position = max(lane.position, self.now)
        lane.push(job, group)

    def pop(self) -> str:
        lane = min((lane for lane in self.lanes.values() if lane), key=lambda lane: lane.position)
        self.now = lane.position
        lane.position += 1 / lane.weight
        job = lane.pop()
        self.lanes = {name: lane for name, lane in self.lanes.items() if lane or lane.position > self.now}
        return job

    def __bool__(self) -> bool:
        return any(self.lanes.values())


class FairQueue:
    """Queue of jobs that wait for one stage.

    Args:
        turn: consecutive jobs of one group before the lane's next group is served.
    """

    def __init__(self, turn: int = TURN) -> None:
        self._turn = turn
        self._levels: dict[int, _Level] = {}
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def push(self, job: str, group: str, share: Share = COMMON) -> None:
        level = self._levels.setdefault(share.priority, _Level())
        level.push(job, group, share, self._turn)
        self._length += 1

    def pop(self) -> str:
        """Remove and return the next job.

        Raises:
            ValueError: no job waits.
        """
        priority = max(self._levels)
        job = self._levels[priority].pop()
        self._on_removed(priority)
        return job

    def remove(self, job: str, group: str, share: Share = COMMON) -> None:
        """Remove a waiting job that was pushed with this group and share."""
        self._levels[share.priority].lanes[share.lane].remove(job, group)
        self._on_removed(share.priority)

    def _on_removed(self, priority: int) -> None:
        self._length -= 1
        if not self._levels[priority]:  # no lane has waiting jobs, so the positions are not needed
            del self._levels[priority]
