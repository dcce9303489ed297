"""Which job may enter which stage, decided without doing anything.

Events go in as method calls, decisions come out as a list; time, tasks, sandboxes and storage are the
service's. A job walks

    waiting(INIT) -> active(INIT) -> waiting(RUN) -> active(RUN) -> waiting(EVAL) -> active(EVAL) -> closing

and leaves when its environment is closed. A failed attempt that may be retried closes too and then waits
for INIT again, on a fresh sandbox.

A job's attempt stays on the node where INIT began (`placement.py` chooses it). A service of one machine has
one node, `HERE`.

Four rules:

- each stage has a pool of its own on each node, so a slow stage never holds another one's slots;
- back-pressure is one number: at most `live` jobs of a node are between the start of INIT and the end of
  close. Only INIT is held back by it, so whatever stage is slow, work behind it goes on, and the sandboxes
  waiting in front of it are bounded;
- while it is paused, no stage starts, or no INIT; every other event is as ever;
- within a queue, a higher priority goes first, lanes share by weight, and a lane's groups are served in
  order of arrival (`fair_queue.py`).
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum, auto

from prorl_envs.rollout.decisions import Close, Decision, Finish, Grant, Interrupt, Start
from prorl_envs.rollout.fair_queue import COMMON, FairQueue, Share
from prorl_envs.rollout.placement import HERE, Limits, Place, Placement
from prorl_envs.rollout.types import JobState, Stage

_NEXT = {Stage.INIT: Stage.RUN, Stage.RUN: Stage.EVAL}


class Pause(StrEnum):
    """What a paused scheduler holds back."""

    HOLD = "hold"  # every stage: what runs goes to the end of its stage, and waits there
    FINISH = "finish"  # INIT alone: what has begun goes to its end


class _Phase(Enum):
    WAITING = auto()  # in the queue of its stage
    ACTIVE = auto()  # its stage runs
    STOPPING = auto()  # its stage runs and was told to end; the job is finished already
    CLOSING = auto()  # its environment is being closed


@dataclass(slots=True)
class _Job:
    id: str
    group: str
    share: Share
    stage: Stage = Stage.INIT
    phase: _Phase = _Phase.WAITING
    attempt: int = 1
    finished: bool = False
    place: Place | None = None  # of the attempt, or of the last one while it waits for INIT

    @property
    def at(self) -> Place:
        """Its node, where it has begun."""
        if self.place is None:
            raise AssertionError(f"job {self.id} has not begun")
        return self.place


class Scheduler:
    """The state of every unfinished job, and the pools of every node.

    Every event method returns the decisions that follow, in the order in which to carry them out. Events
    that come late (a stage that ended after its job was cancelled) are expected and never act twice.

    Args:
        limits: how much may happen at once on this machine.
        here: whether jobs run on this machine too. Guests always do.
    """

    def __init__(self, limits: Limits, *, here: bool = True) -> None:
        self.attempts = limits.attempts
        self._jobs: dict[str, _Job] = {}
        self._waiting = FairQueue()  # for INIT
        self._nodes = Placement()
        self._here = Place(HERE, limits, open=here)
        self._nodes.join(self._here)
        self._pause: Pause | None = None
        self._guests_waiting: dict[str, None] = {}
        self._guests: dict[str, bool] = {}  # by name, whether it is still in INIT

    # What is there.

    def __len__(self) -> int:
        """Jobs not yet gone, those whose environment is being closed included."""
        return len(self._jobs)

    def __contains__(self, job: str) -> bool:
        return job in self._jobs

    @property
    def nodes(self) -> Collection[Place]:
        """Every node that is there, this machine first. Not to be changed."""
        return self._nodes.places.values()

    @property
    def live(self) -> int:
        """Jobs that hold an environment."""
        return sum(place.live for place in self.nodes)

    @property
    def live_limit(self) -> int:
        """Most of them."""
        return sum(place.limits.live for place in self.nodes if place.open)

    @property
    def paused(self) -> Pause | None:
        """What is held back, or None."""
        return self._pause

    @property
    def active(self) -> Mapping[Stage, int]:
        """Jobs running, by stage."""
        return {stage: sum(place.active[stage] for place in self.nodes) for stage in Stage}

    @property
    def waiting(self) -> Mapping[Stage, int]:
        """Jobs waiting, by stage."""
        return {
            stage: len(self._waiting)
            if stage is Stage.INIT
            else sum(len(place.queues[stage]) for place in self.nodes)
            for stage in Stage
        }

    def limit(self, stage: Stage) -> int:
        """Jobs that may be active in a stage, on all nodes that take jobs together."""
        return sum(place.limits.of(stage) for place in self.nodes if place.open)

    def waiting_on(self, node: str) -> list[str]:
        """The unfinished jobs that wait on a node, between two stages."""
        return [
            job.id
            for job in self._jobs.values()
            if job.phase is _Phase.WAITING and job.stage is not Stage.INIT and job.at.name == node
        ]

    def state(self, job: str) -> JobState | None:
        """Where an unfinished job is; None for one that is finished or unknown."""
        entry = self._jobs.get(job)
        if entry is None or entry.finished:
            return None
        if entry.stage is Stage.INIT and entry.phase is not _Phase.ACTIVE:
            return JobState.QUEUED
        return JobState(entry.stage.value)

    # Events.

    def submit(
        self,
        jobs: Iterable[tuple[str, str]],
        failures: Mapping[str, int] | None = None,
        share: Share = COMMON,
    ) -> list[Decision]:
        """New jobs arrive, as (job id, group id).

        Args:
            jobs: in the order in which they are served.
            failures: attempts that failed before, of those that had any; they count against the limit.
            share: whose they are.

        Raises:
            ValueError: an id is already there.
        """
        for job, group in jobs:
            if job in self._jobs:
                raise ValueError(f"job {job} is scheduled already")
            self._jobs[job] = _Job(job, group, share, attempt=(failures or {}).get(job, 0) + 1)
            self._waiting.push(job, group, share)
        return self._fill()

    def pause(self, mode: Pause) -> list[Decision]:
        """Start less from here on, or less or more than in another pause."""
        self._pause = mode
        return self._fill(*self.nodes)

    def resume(self) -> list[Decision]:
        """Start again what there is room for."""
        self._pause = None
        return self._fill(*self.nodes)

    def ended(self, job: str) -> list[Decision]:
        """The job's stage ended as it should, or was interrupted."""
        entry = self._leave_stage(job)
        following = _NEXT.get(entry.stage)
        if entry.phase is _Phase.STOPPING:
            return [self._close(entry), *self._fill(entry.at)]
        if following is None:
            return [self._finish(entry, JobState.DONE), self._close(entry), *self._fill(entry.at)]
        entry.stage = following
        if self._nodes.places.get(entry.at.name) is not entry.at:  # lost meanwhile: this will fail at once
            return [self._start(entry, entry.at)]
        entry.phase = _Phase.WAITING
        entry.at.queues[following].push(job, entry.group, entry.share)
        return self._fill(entry.at)

    def failed(self, job: str, *, retryable: bool) -> list[Decision]:
        """The job's stage failed."""
        entry = self._leave_stage(job)
        if entry.phase is _Phase.STOPPING:
            return [self._close(entry), *self._fill(entry.at)]
        return [*self._give_up(entry, retryable=retryable), *self._fill(entry.at)]

    def cancel(self, job: str) -> list[Decision]:
        """Somebody wants the job gone. Unknown and finished jobs are left as they are."""
        entry = self._jobs.get(job)
        if entry is None or entry.finished:
            return []
        finish = self._finish(entry, JobState.CANCELLED)
        if entry.phase is _Phase.ACTIVE:
            entry.phase = _Phase.STOPPING
            return [finish, Interrupt(job)]
        if entry.phase is _Phase.CLOSING:  # between two attempts
            return [finish]
        if entry.stage is Stage.INIT:  # holds nothing yet
            self._waiting.remove(job, entry.group, entry.share)
            del self._jobs[job]
            return [finish]
        entry.at.queues[entry.stage].remove(job, entry.group, entry.share)
        return [finish, self._close(entry), *self._fill(entry.at)]

    def closed(self, job: str) -> list[Decision]:
        """The environment of the job's attempt is gone."""
        entry = self._jobs[job]
        if entry.phase is not _Phase.CLOSING:
            raise ValueError(f"job {job} was not closing")
        entry.at.live -= 1
        self._nodes.changed(entry.at)
        if entry.finished:
            del self._jobs[job]
        else:
            entry.stage, entry.phase = Stage.INIT, _Phase.WAITING
            entry.attempt += 1
            self._waiting.push(job, entry.group, entry.share)
        return self._fill(entry.at)

    def resize(self, limits: Limits) -> list[Decision]:
        """Let more or less happen at once on this machine. What is there over a bound goes on to its end."""
        self.attempts = limits.attempts
        self._here.limits = limits
        self._nodes.changed(self._here)
        return self._fill(self._here)

    # Nodes come and go.

    def join(self, node: str, limits: Limits) -> list[Decision]:
        """A further node takes jobs.

        Raises:
            ValueError: one of this name is there.
        """
        place = Place(node, limits)
        self._nodes.join(place)
        return self._fill(place)

    def admit(self, node: str, *, jobs: bool) -> list[Decision]:
        """Let no further jobs go to a node, or let them again. What is there goes on.

        Raises:
            KeyError: there is no such node.
        """
        place = self._nodes.places[node]
        place.open = jobs
        self._nodes.changed(place)
        return self._fill(place)

    def lost(self, node: str) -> list[Decision]:
        """A node is gone with everything on it. What waits there has failed, and may be tried elsewhere; of
        what runs or closes there `ended`, `failed` and `closed` are still reported.

        Raises:
            KeyError: there is no such node.
        """
        decisions: list[Decision] = []
        for job in self.waiting_on(node):
            entry = self._jobs[job]
            entry.at.queues[entry.stage].remove(job, entry.group, entry.share)
            decisions += self._give_up(entry, retryable=True)
        self._nodes.leave(node)
        return decisions

    # Guests: environments that somebody outside drives. They share INIT and `live` with the jobs.

    def reserve(self, guest: str) -> list[Decision]:
        """A guest wants an environment. It comes before every job that waits for INIT.

        Raises:
            ValueError: its name is there already.
        """
        if guest in self._guests or guest in self._guests_waiting:
            raise ValueError(f"guest {guest} is there already")
        self._guests_waiting[guest] = None
        return self._fill()

    def prepared(self, guest: str) -> list[Decision]:
        """A guest's environment has started, or has failed to."""
        if not self._guests[guest]:
            raise ValueError(f"guest {guest} was prepared already")
        self._guests[guest] = False
        self._here.active[Stage.INIT] -= 1
        self._nodes.changed(self._here)
        return self._fill()

    def release(self, guest: str) -> list[Decision]:
        """A guest waits no longer, or its environment is gone. One that is unknown is left so."""
        self._guests_waiting.pop(guest, None)
        preparing = self._guests.pop(guest, None)
        if preparing is None:
            return []
        self._here.live -= 1
        self._here.active[Stage.INIT] -= preparing
        self._nodes.changed(self._here)
        return self._fill()

    # Steps.

    def _leave_stage(self, job: str) -> _Job:
        entry = self._jobs[job]
        if entry.phase not in (_Phase.ACTIVE, _Phase.STOPPING):
            raise ValueError(f"job {job} was not in a stage")
        entry.at.active[entry.stage] -= 1
        self._nodes.changed(entry.at)
        return entry

    def _give_up(self, entry: _Job, *, retryable: bool) -> list[Decision]:
        """An attempt has failed: there is another one after it is closed, or it was the last."""
        if retryable and entry.attempt < self.attempts:
            return [self._close(entry)]
        return [self._finish(entry, JobState.FAILED), self._close(entry)]

    def _finish(self, entry: _Job, state: JobState) -> Finish:
        entry.finished = True
        return Finish(entry.id, state)

    def _close(self, entry: _Job) -> Close:
        entry.phase = _Phase.CLOSING
        return Close(entry.id)

    def _fill(self, *places: Place) -> list[Decision]:
        """Start what there is room for on these nodes, and INIT anywhere; the last stage first, since it
        frees environments soonest."""
        decisions: list[Decision] = []
        if self._pause is not Pause.HOLD:
            for place in places:
                for stage in (Stage.EVAL, Stage.RUN):
                    self._fill_stage(place, stage, decisions)
        if self._pause is None:
            self._admit_guests(decisions)
            self._begin(decisions)
        return decisions

    def _fill_stage(self, place: Place, stage: Stage, decisions: list[Decision]) -> None:
        queue = place.queues[stage]
        while queue and place.active[stage] < place.limits.of(stage):
            decisions.append(self._start(self._jobs[queue.pop()], place))

    def _admit_guests(self, decisions: list[Decision]) -> None:
        while self._guests_waiting and self._here.room:
            guest = next(iter(self._guests_waiting))
            del self._guests_waiting[guest]
            self._guests[guest] = True
            self._here.live += 1
            self._here.active[Stage.INIT] += 1
            self._nodes.changed(self._here)
            decisions.append(Grant(guest))

    def _begin(self, decisions: list[Decision]) -> None:
        """Start INIT of who waits for it, each on the node with most room; a new attempt on another node."""
        while self._waiting and self._nodes.best() is not None:
            entry = self._jobs[self._waiting.pop()]
            place = self._nodes.best(avoid=entry.place.name if entry.place else None)
            assert place is not None
            place.live += 1
            decisions.append(self._start(entry, place))

    def _start(self, entry: _Job, place: Place) -> Start:
        entry.place, entry.phase = place, _Phase.ACTIVE
        place.active[entry.stage] += 1
        self._nodes.changed(place)
        return Start(entry.id, entry.stage, entry.attempt, place.name)
