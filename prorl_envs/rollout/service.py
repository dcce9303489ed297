"""The rollout service: takes groups, carries their jobs through the stages, keeps the results.

The scheduler decides, the worker does, the engine connects the two, the store keeps; this is the face that
callers see.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum

from prorl_envs import __version__
from prorl_envs.clock import Clock, SystemClock
from prorl_envs.config import ServiceSettings
from prorl_envs.env.base import Task
from prorl_envs.env.node import Node
from prorl_envs.errors import InputError
from prorl_envs.policy.pool import ModelPool
from prorl_envs.policy.types import ModelClient, Renderer
from prorl_envs.policy.vllm import base_url
from prorl_envs.rollout.agent import Agent
from prorl_envs.rollout.batches import Batches
from prorl_envs.rollout.engine import Engine
from prorl_envs.rollout.errors import Conflict, Full, NotFound, Unavailable
from prorl_envs.rollout.fair_queue import COMMON, Share
from prorl_envs.rollout.scheduler import Limits, Scheduler
from prorl_envs.rollout.stages import Family
from prorl_envs.rollout.statistics import group_statistics
from prorl_envs.rollout.store import MemoryStore, NewGroup, Store, StoredGroup
from prorl_envs.rollout.types import (
    GroupRequest,
    JobState,
    Result,
    Stage,
    job_id,
    split_job_id,
)
from prorl_envs.rollout.views import (
    EnvironmentView,
    GroupView,
    JobView,
    ModelServerView,
    PoolView,
    ResultPage,
    StatusView,
)
from prorl_envs.rollout.worker import Worker

log = logging.getLogger(__name__)


class ServiceState(StrEnum):
    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    STOPPED = "stopped"


class RolloutService:
    """One machine's rollout service. Start it, use it from the same event loop, stop it.

    Args:
        node: this machine's sandboxes. The service closes each sandbox it starts, not the node.
        environments: environment classes by name.
        renderer: the model's tokenizer and chat template.
        model: the model servers. The service does not close it.
        settings: pool sizes and bounds.
        store: where groups and results are kept; None keeps them in memory.
        clock: measures deadlines and timings.
    """

    def __init__(
        self,
        node: Node,
        environments: Mapping[str, Family],
        renderer: Renderer,
        model: ModelClient,
        settings: ServiceSettings | None = None,
        store: Store | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.settings = settings or ServiceSettings()
        self.clock = clock or SystemClock()
        self.environments = environments
        self.model = model
        self.store: Store = store or _memory_store(self.settings)
        self.state = ServiceState.STARTING
        self._engine = Engine(
            Scheduler(_limits(self.settings)),
            Worker(
                node,
                environments,
                Agent(renderer, model, self.clock),
                self.clock,
                grace_s=self.settings.grace_s,
                close_s=self.settings.close_s,
            ),
            self.store,
            self.clock,
            self._kept,
            lambda: self.batches.freed(),
        )
        self._submitting = asyncio.Lock()
        self.batches = Batches(self, self.store, self.settings, self.clock, self._submitting)
        self._news = asyncio.Event()
        self._started_at = self.clock.monotonic()

    # Life.

    async def start(self) -> None:
        """Go on with what the store knows to be unfinished, each as a further attempt, and begin to serve.

        Raises:
            InputError: a stored task is not one of this service's environments.
        """
        unfinished = [(group, self.load(group.request)) for group in await self.store.unfinished()]
        await self.batches.restore()
        for group, task in unfinished:
            jobs = zip(range(group.request.samples), group.outcomes, group.attempts, strict=True)
            missing = {sample: attempts for sample, outcome, attempts in jobs if outcome is None}
            begun_by = split_job_id(group.request.id)[0] if group.batch_id else None
            share = self.batches.share(group.batch_id)
            self._engine.admit(group.request, task, missing, batch_id=begun_by, share=share)
        self.state = ServiceState.SERVING  # only now: what is submitted is unfinished too
        self.batches.start()

    async def stop(self, *, drain_s: float = 0.0) -> None:
        """End. Nothing is accepted from here on; readers still read. Idempotent.

        Args:
            drain_s: seconds to let accepted jobs finish. What is left then is cancelled, or where the store
                is durable left to the next start; every sandbox is closed before this returns.
        """
        if self.state is ServiceState.STOPPED:
            return
        async with self._submitting:  # what is being accepted is admitted first
            self.state = ServiceState.DRAINING
        try:
            await self.batches.aclose()
            async with self.clock.timeout(drain_s):
                await self._engine.settled()
        except TimeoutError:
            log.info("stopping: %d unfinished jobs are ended", len(self._engine.scheduler))
        finally:  # also when the drain itself is interrupted
            self._engine.cancel_all()
            await asyncio.shield(self._end())

    async def _end(self) -> None:
        await self.batches.aclose()  # where it was interrupted
        try:
            async with self.clock.timeout(2 * self.settings.close_s):  # an interrupt, then a close
                await self._engine.settled()
        except TimeoutError:
            log.error("%d jobs do not end; their sandboxes end with the node", len(self._engine.scheduler))
        self.state = ServiceState.STOPPED
        self._announce()

    # What callers ask for.

    async def submit(self, requests: Sequence[GroupRequest]) -> list[GroupView]:
        """Accept groups, all or none. The same request under the same id is the same submission.

        Raises:
            InputError: an environment is not known, or a task row is wrong.
            Conflict: an id is taken by another request.
            Full: the queue has no room for all of them.
            Unavailable: the service is not serving.
        """
        tasks = [self.load(request) for request in requests]
        groups = [NewGroup(request, task.id) for request, task in zip(requests, tasks, strict=True)]
        # A caller who goes away must not leave a group that is stored and never begun.
        await asyncio.shield(asyncio.create_task(self.accept(groups, tasks)))
        return [await self.group(request.id) for request in requests]

    async def accept(
        self,
        groups: Sequence[NewGroup],
        tasks: Sequence[Task],
        *,
        share: Share = COMMON,
        kept: Callable[[], None] = lambda: None,
    ) -> None:
        """Keep groups, all or none, and begin those that are new.

        Args:
            tasks: of the groups.
            share: whose they are.
            kept: called when they are kept, before anything comes of them.

        Raises:
            Conflict, Full, Unavailable.
        """
        async with self._submitting:
            self.check_serving()
            for group in groups:
                if group.batch_id is None and self.batches.owns(group.request.id):
                    raise Conflict(f"{group.request.id!r} is the id of a batch's group", hint="use another")
            await self._check_room([group.request for group in groups])
            fresh = await self.store.submit(groups)
            kept()
            for group, task, new in zip(groups, tasks, fresh, strict=True):
                if new:
                    samples = dict.fromkeys(range(group.request.samples), 0)
                    self._engine.admit(group.request, task, samples, batch_id=group.batch_id, share=share)

    def check_serving(self) -> None:
        """Raises: Unavailable: nothing is accepted now."""
        if self.state is not ServiceState.SERVING:
            raise Unavailable(f"the service is {self.state}", hint="submit to another, or later")

    async def group(self, group_id: str) -> GroupView:
        """Raises: NotFound."""
        return self._group_view(await self.store.group(group_id))

    async def job(self, job: str) -> JobView:
        """Raises: NotFound."""
        group_id, sample = split_job_id(job)
        group = await self.store.group(group_id) if group_id else None
        if group is None or sample >= group.request.samples:
            raise NotFound(f"no job {job!r}", hint="job ids are <group id>/<index>")
        return self._job_view(group, sample)

    async def cancel_job(self, job: str) -> JobView:
        """End a job wherever it is. Returns once its result is recorded; its sandbox is closed after that.

        Raises:
            NotFound.
        """
        await self.job(job)
        await self._engine.cancel([job])
        return await self.job(job)

    async def cancel_jobs(self, jobs: Iterable[str]) -> None:
        """End those of these jobs that have not ended; return once their results are recorded."""
        await self._engine.cancel(jobs)

    async def cancel_group(self, group_id: str) -> GroupView:
        """End what is left of a group.

        Raises:
            NotFound.
        """
        group = await self.store.group(group_id)
        await self._engine.cancel([job_id(group_id, sample) for sample in range(group.request.samples)])
        return await self.group(group_id)

    async def results(self, after: int, *, limit: int, wait_s: float = 0.0) -> ResultPage:
        """Results after a cursor.

        Args:
            after: a cursor; 0 begins with the oldest result kept.
            limit: most results.
            wait_s: seconds to wait for the first one if there is none.

        Raises:
            CursorExpired: results in between are no longer kept.
        """
        news = self._news
        found = await self.store.results(after, limit)
        try:
            async with self.clock.timeout(wait_s):
                while not found and self.state is not ServiceState.STOPPED:
                    await news.wait()
                    news = self._news
                    found = await self.store.results(after, limit)
        except TimeoutError:
            pass  # nothing came: an empty page says so
        return ResultPage(results=found, next=found[-1].cursor if found else after)

    def status(self) -> StatusView:
        """Pools, queues and counts, now."""
        engine, scheduler = self._engine, self._engine.scheduler
        limits, active, waiting = scheduler.limits, scheduler.active, scheduler.waiting
        return StatusView(
            version=__version__,
            state=self.state,
            uptime_s=self.clock.monotonic() - self._started_at,
            pools={
                stage.value: PoolView(limit=limits.of(stage), active=active[stage], waiting=waiting[stage])
                for stage in Stage
            },
            live=scheduler.live,
            live_limit=limits.live,
            unfinished=len(scheduler),
            queue_limit=self.settings.queue,
            finished={state.value: engine.finished[state] for state in JobState if state.final},
            failures={kind.value: count for kind, count in engine.failures.items()},
            retries=engine.retries,
            close_failures=engine.close_failures,
            internal_errors=engine.internal_errors,
            model_servers=self.model_servers(),
        )

    def families(self) -> list[EnvironmentView]:
        """The environments on offer."""
        return [
            EnvironmentView(name=name, task_schema=self.environments[name].task_type.model_json_schema())
            for name in sorted(self.environments)
        ]

    def model_servers(self) -> list[ModelServerView]:
        """The model servers, where the model is a pool of them."""
        if not isinstance(self.model, ModelPool):
            return []
        return [
            ModelServerView(
                url=server.url,
                in_flight=server.in_flight,
                sessions=server.sessions,
                healthy=server.failures == 0,
                draining=server.draining,
            )
            for server in self.model.servers
        ]

    async def add_model_server(self, url: str) -> list[ModelServerView]:
        """Offer a further model server to new rollouts. Adding one again changes nothing.

        Raises:
            InputError: not a URL.
            Conflict: this service's model is no pool.
        """
        self._pool().add(url)
        return self.model_servers()

    async def remove_model_server(self, url: str) -> list[ModelServerView]:
        """Give a model server no more turns; those in flight end.

        Raises:
            NotFound: it is not there.
            InputError, Conflict: as for adding.
        """
        pool = self._pool()
        if base_url(url) not in {server.url for server in pool.servers}:
            raise NotFound(f"no model server {url!r}")
        await pool.remove(url)
        return self.model_servers()

    # Jobs.

    def load(self, request: GroupRequest) -> Task:
        """The validated task of a request.

        Raises:
            InputError: its environment is not known, or the row is wrong.
        """
        if request.environment not in self.environments:
            known = ", ".join(sorted(self.environments))
            raise InputError(f"no environment is called {request.environment!r}", hint=f"known: {known}")
        task: Task = self.environments[request.environment].load(request.task)
        return task

    async def _check_room(self, requests: Sequence[GroupRequest]) -> None:
        room = self.room
        new = 0
        for request in requests:
            try:
                await self.store.group(request.id)
            except NotFound:
                new += request.samples
        if new > room:
            raise Full(f"the queue has room for {room} of {new} new jobs", hint="try again later")

    @property
    def room(self) -> int:
        """Jobs that the queue still has room for."""
        return max(0, self.settings.queue - len(self._engine.scheduler))

    def _kept(self, result: Result) -> None:
        """A result is kept."""
        self.batches.ended(result)
        self._announce()

    def _announce(self) -> None:
        """Wake everyone who waits for results."""
        self._news.set()
        self._news = asyncio.Event()

    def _group_view(self, group: StoredGroup) -> GroupView:
        request = group.request
        return GroupView(
            id=request.id,
            environment=request.environment,
            task_id=group.task_id,
            jobs=[self._job_view(group, sample) for sample in range(request.samples)],
            complete=group.complete,
            statistics=group_statistics(group),
            batch_id=group.batch_id,
        )

    def _job_view(self, group: StoredGroup, sample: int) -> JobView:
        job, outcome = job_id(group.request.id, sample), group.outcomes[sample]
        if outcome is not None:
            return JobView(
                id=job,
                group_id=group.request.id,
                sample=sample,
                state=outcome.state,
                attempts=outcome.attempts,
                reward=outcome.reward,
                failure=outcome.failure,
                cursor=outcome.cursor,
            )
        return JobView(
            id=job,
            group_id=group.request.id,
            sample=sample,
            state=self._engine.scheduler.state(job) or JobState.QUEUED,
            attempts=self._engine.attempts(job),
        )

    def _pool(self) -> ModelPool:
        if not isinstance(self.model, ModelPool):
            raise Conflict("the model of this service is fixed", hint="start it with model servers")
        return self.model


def _limits(settings: ServiceSettings) -> Limits:
    live = settings.live or settings.init + settings.run + settings.eval
    return Limits(
        init=settings.init, run=settings.run, eval=settings.eval, live=live, attempts=settings.attempts
    )


def _memory_store(settings: ServiceSettings) -> MemoryStore:
    return MemoryStore(max_results=settings.keep_results, max_tokens=settings.keep_tokens)
