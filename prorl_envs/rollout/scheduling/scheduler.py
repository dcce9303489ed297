"""Scheduler: decides which job may enter which stage. Carries out nothing itself.

Events are method calls, and each returns a list of decisions. The scheduler knows neither time nor tasks,
sandboxes or storage: they belong to the service. A job goes through

    waiting(INIT) -> active(INIT) -> waiting(RUN) -> active(RUN) -> waiting(EVAL) -> active(EVAL) -> closing

and leaves the scheduler when its environment is closed. If a failed attempt may be retried, its environment
is closed too, and the job waits for INIT again, with a fresh sandbox.

An attempt stays on the node where its INIT started (`placement.py` chooses the node). A service of one
machine has one node, `HERE`.

Jobs may be submitted as held: they wait until the trunk, another job of their group, has `branched` in RUN.
Then they wait for INIT on the trunk's node, and the trunk for RUN again. If the trunk leaves RUN or the
scheduler before, they wait for INIT as other jobs do.

Four rules:

- Each stage has its own pool on each node, so a slow stage never holds slots of another stage.
- Back-pressure is one number: at most `max_jobs_with_sandbox` jobs of a node are between the start of INIT
  and the end of close. This limit delays only INIT, so jobs in later stages continue, and the number of
  sandboxes that wait for a stage is bounded.
- A pause stops the start of every stage (`Pause.HOLD`), or only of INIT. All other events work as usual.
- Within a queue, higher priorities come first, lanes share by weight, and a lane's groups are served in
  order of arrival (`fair_queue.py`).
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto

from prorl_envs.rollout.api.types import JobState, Stage
from prorl_envs.rollout.api.views import Pause
from prorl_envs.rollout.scheduling.fair_queue import COMMON, FairQueue, Share
from prorl_envs.rollout.scheduling.placement import HERE, NodeRecord, StageLimits, least_loaded


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

_NEXT = {Stage.INIT: Stage.RUN, Stage.RUN: Stage.EVAL}


class _Phase(Enum):
    HELD = auto()  # until the trunk of its group branches
    WAITING = auto()  # in the queue of its stage
    ACTIVE = auto()  # its stage is running
    STOPPING = auto()  # its running stage was interrupted; the job is finished already
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
    last_record: NodeRecord | None = None  # node of the current attempt, or of the last one before a retry
    origin: NodeRecord | None = None  # node with the checkpoint from which the job starts

    @property
    def record(self) -> NodeRecord:
        """Node of the job, once it has started."""
        if self.last_record is None:
            raise AssertionError(f"job {self.id} has not started")
        return self.last_record


@dataclass(slots=True)
class _Guest:
    record: NodeRecord
    preparing: bool = True  # the guest is in INIT


class Scheduler:
    """State of every unfinished job, and the pools of every node.

    Every event method returns the resulting decisions, in the order in which to carry them out. Late events
    (a stage that finishes after its job was cancelled) are expected and have no second effect.

    Args:
        limits: limits of concurrent work on this machine.
        here: run jobs on this machine too.
        max_sandboxes: maximum number of jobs that hold an environment here, whatever the limits say.
    """

    def __init__(self, limits: StageLimits, *, here: bool = True, max_sandboxes: int = 1 << 62) -> None:
        self._max_sandboxes = max_sandboxes
        self.attempts = limits.attempts
        self._jobs: dict[str, _Job] = {}
        self._waiting = FairQueue()  # for INIT
        self._held: dict[str, list[_Job]] = {}  # by group
        self._here = NodeRecord(HERE, limits.at_most(max_sandboxes), open=here)
        self._records = {HERE: self._here}
        self._pause: Pause | None = None
        self._guests_waiting: dict[str, bool] = {}  # by name: True if the guest must run on this machine
        self._guests: dict[str, _Guest] = {}

    # Inspection.

    def __len__(self) -> int:
        """Return the number of jobs, including those whose environment is being closed."""
        return len(self._jobs)

    def __contains__(self, job: str) -> bool:
        return job in self._jobs

    @property
    def nodes(self) -> Collection[NodeRecord]:
        """Every node, this machine first. Read-only."""
        return self._records.values()

    @property
    def jobs_with_sandbox(self) -> int:
        """Number of jobs that hold an environment."""
        return sum(record.jobs_with_sandbox for record in self.nodes)

    @property
    def max_jobs_with_sandbox(self) -> int:
        """Limit of `jobs_with_sandbox`."""
        return sum(record.limits.max_jobs_with_sandbox for record in self.nodes if record.open)

    @property
    def paused(self) -> Pause | None:
        """Current pause mode, or None."""
        return self._pause

    @property
    def active(self) -> Mapping[Stage, int]:
        """Number of running jobs by stage."""
        return {stage: sum(record.active[stage] for record in self.nodes) for stage in Stage}

    @property
    def waiting(self) -> Mapping[Stage, int]:
        """Number of waiting jobs by stage."""
        waiting = {stage: sum(len(record.queues[stage]) for record in self.nodes) for stage in Stage}
        waiting[Stage.INIT] += len(self._waiting) + sum(map(len, self._held.values()))
        return waiting

    def limit(self, stage: Stage) -> int:
        """Return the limit of active jobs in a stage, over all nodes that accept jobs."""
        return sum(record.limits.of(stage) for record in self.nodes if record.open)

    def waiting_on(self, node: str) -> list[str]:
        """Return the unfinished jobs that wait on a node, between two stages."""
        return [
            job.id
            for job in self._jobs.values()
            if job.phase is _Phase.WAITING and job.stage is not Stage.INIT and job.record.name == node
        ]

    def state(self, job: str) -> JobState | None:
        """Return the state of an unfinished job; None for a finished or unknown job."""
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
        *,
        held: Collection[str] = (),
    ) -> list[Decision]:
        """Handle new jobs, as pairs of job id and group id.

        Args:
            jobs: in the order in which they are served.
            failures: number of earlier failed attempts, by job id. They count against the maximum attempts.
            share: share of the jobs' owner.
            held: jobs that are held until the other job of their group branches.

        Raises:
            ValueError: an id is already scheduled.
        """
        for job, group in jobs:
            if job in self._jobs:
                raise ValueError(f"job {job} is scheduled already")
            entry = self._jobs[job] = _Job(job, group, share, attempt=(failures or {}).get(job, 0) + 1)
            if job in held:
                entry.phase = _Phase.HELD
                self._held.setdefault(group, []).append(entry)
            else:
                self._await_init(entry)
        return self._fill()

    def pause(self, mode: Pause) -> list[Decision]:
        """Set the pause mode. It replaces the mode of an active pause."""
        self._pause = mode
        return self._fill(*self.nodes)

    def resume(self) -> list[Decision]:
        """Cancel the pause."""
        self._pause = None
        return self._fill(*self.nodes)

    def ended(self, job: str) -> list[Decision]:
        """Handle a stage of a job that finished normally or was interrupted."""
        entry = self._leave_stage(job)
        following = _NEXT.get(entry.stage)
        if entry.phase is _Phase.STOPPING:
            return [self._close(entry), *self._fill(entry.record)]
        if following is None:
            return [self._finish(entry, JobState.DONE), self._close(entry), *self._fill(entry.record)]
        if following is Stage.EVAL:
            self._release(entry.group)
        return self._await_stage(entry, following)

    def branched(self, job: str) -> list[Decision]:
        """Handle a trunk that has interrupted its RUN for a checkpoint, from which the held jobs start."""
        entry = self._leave_stage(job)
        if entry.phase is _Phase.STOPPING:
            return [self._close(entry), *self._fill(entry.record)]
        entry.origin = entry.record
        self._release(entry.group, entry.record)
        return self._await_stage(entry, Stage.RUN)

    def failed(self, job: str, *, retryable: bool) -> list[Decision]:
        """Handle a failed stage of a job. `retryable`: another attempt may succeed."""
        entry = self._leave_stage(job)
        if entry.phase is _Phase.STOPPING:
            return [self._close(entry), *self._fill(entry.record)]
        return [*self._give_up(entry, retryable=retryable), *self._fill(entry.record)]

    def cancel(self, job: str) -> list[Decision]:
        """Cancel a job. Unknown and finished jobs are left unchanged."""
        entry = self._jobs.get(job)
        if entry is None or entry.finished:
            return []
        finish = self._finish(entry, JobState.CANCELLED)
        if entry.phase is _Phase.ACTIVE:
            entry.phase = _Phase.STOPPING
            return [finish, Interrupt(job), *self._fill()]
        if entry.phase is _Phase.CLOSING:  # between two attempts
            return [finish, *self._fill()]
        if entry.stage is Stage.INIT:  # holds no environment yet
            if entry.phase is _Phase.HELD:
                self._held[entry.group].remove(entry)
            else:
                self._init_queue(entry).remove(job, entry.group, entry.share)
            del self._jobs[job]
            return [finish, *self._fill()]
        entry.record.queues[entry.stage].remove(job, entry.group, entry.share)
        return [finish, self._close(entry), *self._fill(entry.record)]

    def closed(self, job: str) -> list[Decision]:
        """Handle the closed environment of a job's attempt."""
        entry = self._jobs[job]
        if entry.phase is not _Phase.CLOSING:
            raise ValueError(f"job {job} was not closing")
        entry.record.jobs_with_sandbox -= 1
        if entry.finished:
            del self._jobs[job]
        else:
            entry.attempt += 1
            self._await_init(entry)
        return self._fill(entry.record)

    def resize(self, limits: StageLimits) -> list[Decision]:
        """Change the limits of this machine. Work above a new limit still runs to completion."""
        self.attempts = limits.attempts
        self._here.limits = limits.at_most(self._max_sandboxes)
        return self._fill(self._here)

    # Nodes.

    def join(self, node: str, limits: StageLimits) -> list[Decision]:
        """Add a node that runs jobs.

        Raises:
            ValueError: there is a node of this name.
        """
        if node in self._records:
            raise ValueError(f"node {node!r} exists already")
        record = self._records[node] = NodeRecord(node, limits)
        return self._fill(record)

    def admit(self, node: str, *, jobs: bool) -> list[Decision]:
        """Open or close a node for further jobs. Its current jobs continue.

        Raises:
            KeyError: there is no such node.
        """
        record = self._records[node]
        record.open = jobs
        return self._fill(record)

    def lost(self, node: str) -> list[Decision]:
        """Remove a lost node. Jobs that wait there fail, and may be retried on other nodes. For jobs that run
        or close there, the caller still calls `ended`, `failed` and `closed`.

        Raises:
            KeyError: there is no such node.
        """
        decisions: list[Decision] = []
        for job in self.waiting_on(node):
            entry = self._jobs[job]
            entry.record.queues[entry.stage].remove(job, entry.group, entry.share)
            decisions += self._give_up(entry, retryable=True)
        queue = self._records.pop(node).queues[Stage.INIT]
        while queue:  # their checkpoint is lost
            self._await_init(self._jobs[queue.pop()])
        return [*decisions, *self._fill()]

    # Guests: environments driven by an external caller. Like jobs, they count towards INIT and sandboxes.

    def reserve(self, guest: str, *, here: bool = False) -> list[Decision]:
        """Reserve an environment for a guest. Guests come before every job that waits for INIT.

        Args:
            guest: name of the guest.
            here: place the guest on this machine only, even if this machine accepts no jobs.

        Raises:
            ValueError: the guest's name is in use.
        """
        if guest in self._guests or guest in self._guests_waiting:
            raise ValueError(f"guest {guest} exists already")
        self._guests_waiting[guest] = here
        return self._fill()

    def prepared(self, guest: str) -> list[Decision]:
        """Handle a guest's environment that has started, or has failed to start."""
        entry = self._guests[guest]
        if not entry.preparing:
            raise ValueError(f"guest {guest} was prepared already")
        entry.preparing = False
        entry.record.active[Stage.INIT] -= 1
        return self._fill()

    def release(self, guest: str) -> list[Decision]:
        """Remove a guest that no longer waits, or whose environment is gone. Unknown guests are ignored."""
        self._guests_waiting.pop(guest, None)
        entry = self._guests.pop(guest, None)
        if entry is None:
            return []
        entry.record.jobs_with_sandbox -= 1
        entry.record.active[Stage.INIT] -= entry.preparing
        return self._fill()

    # Steps.

    def _leave_stage(self, job: str) -> _Job:
        entry = self._jobs[job]
        if entry.phase not in (_Phase.ACTIVE, _Phase.STOPPING):
            raise ValueError(f"job {job} was not in a stage")
        entry.record.active[entry.stage] -= 1
        return entry

    def _give_up(self, entry: _Job, *, retryable: bool) -> list[Decision]:
        """Handle a failed attempt: close it for a retry, or finish the job after its last attempt."""
        if retryable and entry.attempt < self.attempts:
            return [self._close(entry)]
        return [self._finish(entry, JobState.FAILED), self._close(entry)]

    def _finish(self, entry: _Job, state: JobState) -> Finish:
        entry.finished = True
        if entry.phase is not _Phase.HELD:
            self._release(entry.group)
        return Finish(entry.id, state, entry.stage)

    def _release(self, group: str, origin: NodeRecord | None = None) -> None:
        """Let the held jobs of a group wait for INIT."""
        for entry in self._held.pop(group, ()):
            entry.origin = origin
            self._await_init(entry)

    def _await_init(self, entry: _Job) -> None:
        entry.stage, entry.phase = Stage.INIT, _Phase.WAITING
        self._init_queue(entry).push(entry.id, entry.group, entry.share)

    def _init_queue(self, entry: _Job) -> FairQueue:
        """Return the queue for INIT of the node with the job's checkpoint, if there is one, or that of all
        nodes."""
        if entry.origin is not None and self._records.get(entry.origin.name) is entry.origin:
            return entry.origin.queues[Stage.INIT]
        return self._waiting

    def _await_stage(self, entry: _Job, stage: Stage) -> list[Decision]:
        """Let a job wait for a further stage on its node."""
        entry.stage = stage
        if self._records.get(entry.record.name) is not entry.record:
            return [self._start(entry, entry.record)]  # the node is lost: the stage fails at once
        entry.phase = _Phase.WAITING
        entry.record.queues[stage].push(entry.id, entry.group, entry.share)
        return self._fill(entry.record)

    def _close(self, entry: _Job) -> Close:
        entry.phase = _Phase.CLOSING
        return Close(entry.id)

    def _fill(self, *records: NodeRecord) -> list[Decision]:
        """Start RUN and EVAL on these nodes, and INIT on any node, as far as the limits allow. Start the last
        stage first, since it frees environments soonest."""
        decisions: list[Decision] = []
        if self._pause is not Pause.HOLD:
            for record in records:
                for stage in (Stage.EVAL, Stage.RUN):
                    self._fill_stage(record, stage, decisions)
        if self._pause is None:
            self._admit_guests(decisions)
            self._start_init(decisions)
        return decisions

    def _fill_stage(self, record: NodeRecord, stage: Stage, decisions: list[Decision]) -> None:
        queue = record.queues[stage]
        while queue and record.active[stage] < record.limits.of(stage):
            decisions.append(self._start(self._jobs[queue.pop()], record))

    def _admit_guests(self, decisions: list[Decision]) -> None:
        """Admit guests in order. A guest that must run on this machine does not delay other guests."""
        for guest, here in list(self._guests_waiting.items()):
            record = self._here if here else least_loaded(self.nodes)
            if record is None or not record.room:
                continue
            del self._guests_waiting[guest]
            self._guests[guest] = _Guest(record)
            record.jobs_with_sandbox += 1
            record.active[Stage.INIT] += 1
            decisions.append(AdmitExternal(guest, record.name))

    def _start_init(self, decisions: list[Decision]) -> None:
        """Start INIT of jobs on the nodes with their checkpoints. Then start that of other jobs on the least
        loaded nodes; of a retry, on another node if possible."""
        for origin in self.nodes:
            while origin.queues[Stage.INIT] and origin.room:
                entry = self._jobs[origin.queues[Stage.INIT].pop()]
                origin.jobs_with_sandbox += 1
                decisions.append(self._start(entry, origin))
        while self._waiting and least_loaded(self.nodes) is not None:
            entry = self._jobs[self._waiting.pop()]
            record = least_loaded(self.nodes, avoid=entry.last_record.name if entry.last_record else None)
            assert record is not None
            record.jobs_with_sandbox += 1
            decisions.append(self._start(entry, record))

    def _start(self, entry: _Job, record: NodeRecord) -> Start:
        entry.last_record, entry.phase = record, _Phase.ACTIVE
        record.active[entry.stage] += 1
        return Start(entry.id, entry.stage, entry.attempt, record.name)
