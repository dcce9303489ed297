"""Which job may enter which stage, decided without doing anything.

Events go in as method calls, decisions come out as a list; time, tasks, sandboxes and storage are the
service's. A job walks

    waiting(INIT) -> active(INIT) -> waiting(RUN) -> active(RUN) -> waiting(EVAL) -> active(EVAL) -> closing

and leaves when its environment is closed. A failed attempt that may be retried closes too and then waits
for INIT again, on a fresh sandbox.

Four rules:

- each stage has a pool of its own, so a slow stage never holds another one's slots;
- back-pressure is one number: at most `live` jobs exist between the start of INIT and the end of close.
  Only INIT is held back by it, so whatever stage is slow, work behind it goes on, and the sandboxes
  waiting in front of it are bounded;
- while it is paused, no stage starts, or no INIT; every other event is as ever;
- within a queue, a higher priority goes first, lanes share by weight, and a lane's groups are served in
  order of arrival (`fair_queue.py`).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum, auto

from prorl_envs.rollout.fair_queue import COMMON, FairQueue, Share
from prorl_envs.rollout.types import JobState, Stage

_NEXT = {Stage.INIT: Stage.RUN, Stage.RUN: Stage.EVAL}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much may happen at once.

    Args:
        init, run, eval: jobs active in each stage.
        live: jobs that hold an environment, from the start of INIT to the end of close.
        attempts: how often one job may be tried, the first time included.
    """

    init: int
    run: int
    eval: int
    live: int
    attempts: int = 2

    def __post_init__(self) -> None:
        if min(self.init, self.run, self.eval, self.live, self.attempts) < 1:
            raise ValueError("every limit is at least 1")

    def of(self, stage: Stage) -> int:
        return {Stage.INIT: self.init, Stage.RUN: self.run, Stage.EVAL: self.eval}[stage]


@dataclass(frozen=True, slots=True)
class Start:
    """Run this stage of the job now."""

    job: str
    stage: Stage
    attempt: int


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


class Scheduler:
    """The state of every unfinished job and the three pools.

    Every event method returns the decisions that follow, in the order in which to carry them out. Events
    that come late (a stage that ended after its job was cancelled) are expected and never act twice.

    Args:
        limits: how much may happen at once.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._jobs: dict[str, _Job] = {}
        self._queues = {stage: FairQueue() for stage in Stage}
        self._active = dict.fromkeys(Stage, 0)
        self._live = 0
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
    def live(self) -> int:
        """Jobs that hold an environment."""
        return self._live

    @property
    def paused(self) -> Pause | None:
        """What is held back, or None."""
        return self._pause

    @property
    def active(self) -> Mapping[Stage, int]:
        """Jobs running, by stage."""
        return dict(self._active)

    @property
    def waiting(self) -> Mapping[Stage, int]:
        """Jobs waiting, by stage."""
        return {stage: len(queue) for stage, queue in self._queues.items()}

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
            self._queues[Stage.INIT].push(job, group, share)
        return self._fill()

    def pause(self, mode: Pause) -> list[Decision]:
        """Start less from here on, or less or more than in another pause."""
        self._pause = mode
        return self._fill()

    def resume(self) -> list[Decision]:
        """Start again what there is room for."""
        self._pause = None
        return self._fill()

    def ended(self, job: str) -> list[Decision]:
        """The job's stage ended as it should, or was interrupted."""
        entry = self._leave_stage(job)
        if entry.phase is _Phase.STOPPING:
            return [self._close(entry), *self._fill()]
        following = _NEXT.get(entry.stage)
        if following is None:
            return [self._finish(entry, JobState.DONE), self._close(entry), *self._fill()]
        entry.stage = following
        entry.phase = _Phase.WAITING
        self._queues[following].push(job, entry.group, entry.share)
        return self._fill()

    def failed(self, job: str, *, retryable: bool) -> list[Decision]:
        """The job's stage failed."""
        entry = self._leave_stage(job)
        if entry.phase is _Phase.STOPPING:
            return [self._close(entry), *self._fill()]
        if retryable and entry.attempt < self.limits.attempts:
            return [self._close(entry), *self._fill()]
        return [self._finish(entry, JobState.FAILED), self._close(entry), *self._fill()]

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
        self._queues[entry.stage].remove(job, entry.group, entry.share)
        if entry.stage is Stage.INIT:  # holds nothing yet
            del self._jobs[job]
            return [finish]
        return [finish, self._close(entry), *self._fill()]

    def closed(self, job: str) -> list[Decision]:
        """The environment of the job's attempt is gone."""
        entry = self._jobs[job]
        if entry.phase is not _Phase.CLOSING:
            raise ValueError(f"job {job} was not closing")
        self._live -= 1
        if entry.finished:
            del self._jobs[job]
        else:
            entry.stage, entry.phase = Stage.INIT, _Phase.WAITING
            entry.attempt += 1
            self._queues[Stage.INIT].push(job, entry.group, entry.share)
        return self._fill()

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
        self._active[Stage.INIT] -= 1
        return self._fill()

    def release(self, guest: str) -> list[Decision]:
        """A guest waits no longer, or its environment is gone. One that is unknown is left so."""
        self._guests_waiting.pop(guest, None)
        preparing = self._guests.pop(guest, None)
        if preparing is None:
            return []
        self._live -= 1
        self._active[Stage.INIT] -= preparing
        return self._fill()

    # Steps.

    def _leave_stage(self, job: str) -> _Job:
        entry = self._jobs[job]
        if entry.phase not in (_Phase.ACTIVE, _Phase.STOPPING):
            raise ValueError(f"job {job} was not in a stage")
        self._active[entry.stage] -= 1
        return entry

    def _finish(self, entry: _Job, state: JobState) -> Finish:
        entry.finished = True
        return Finish(entry.id, state)

    def _close(self, entry: _Job) -> Close:
        entry.phase = _Phase.CLOSING
        return Close(entry.id)

    def _fill(self) -> list[Decision]:
        """Start what there is room for; the last stage first, since it frees environments soonest."""
        return [
            *self._fill_stage(Stage.EVAL),
            *self._fill_stage(Stage.RUN),
            *self._admit_guests(),
            *self._fill_stage(Stage.INIT),
        ]

    def _admit_guests(self) -> list[Grant]:
        grants: list[Grant] = []
        while self._guests_waiting and self._pause is None and self._room_for_init():
            guest = next(iter(self._guests_waiting))
            del self._guests_waiting[guest]
            self._guests[guest] = True
            self._live += 1
            self._active[Stage.INIT] += 1
            grants.append(Grant(guest))
        return grants

    def _room_for_init(self) -> bool:
        return self._live < self.limits.live and self._active[Stage.INIT] < self.limits.init

    def _fill_stage(self, stage: Stage) -> list[Start]:
        starts: list[Start] = []
        if self._pause is Pause.HOLD or (self._pause and stage is Stage.INIT):
            return starts
        while self._queues[stage] and self._active[stage] < self.limits.of(stage):
            if stage is Stage.INIT:
                if not self._room_for_init():
                    break
                self._live += 1
            entry = self._jobs[self._queues[stage].pop()]
            entry.phase = _Phase.ACTIVE
            self._active[stage] += 1
            starts.append(Start(entry.id, stage, entry.attempt))
        return starts
