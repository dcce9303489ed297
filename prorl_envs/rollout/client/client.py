"""Typed client of the rollout service.

```python
async with RolloutClient("http://127.0.0.1:8600") as client:
    await client.submit([GroupRequest(id="g1", environment="bash", task=row, samples=8)])
    async for result in client.follow({"g1"}):
        ...
```
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Collection, Sequence
from typing import Any, Self
from urllib.parse import quote

import httpx
from pydantic import BaseModel, TypeAdapter, ValidationError

from prorl_envs.clock import Clock, SystemClock
from prorl_envs.errors import ProrlError
from prorl_envs.model.types import InFlight
from prorl_envs.rollout.api.batches import (
    BatchList,
    BatchRequest,
    BatchTask,
    BatchTasks,
    BatchView,
    SelectedGroups,
)
from prorl_envs.rollout.api.dashboard import DashboardView, JobPage, LimitsRequest
from prorl_envs.rollout.api.errors import NotFound, Retryable, ServerFault, Unavailable, from_wire
from prorl_envs.rollout.api.interactive import (
    AgentStep,
    CallStep,
    EndpointView,
    EpisodeRequest,
    EpisodeView,
    TokenStep,
)
from prorl_envs.rollout.api.types import ALL, BranchRequest, GroupRequest, Result, Selection, split_job_id
from prorl_envs.rollout.api.views import (
    EnvironmentList,
    EnvironmentView,
    ErrorBody,
    GroupList,
    GroupView,
    Health,
    JobView,
    LoginView,
    ModelServerList,
    ModelServerView,
    NodeList,
    NodeView,
    Pause,
    PauseView,
    ResultPage,
    StatusView,
)
from prorl_envs.rollout.client.token_files import LocalToken

logger = logging.getLogger(__name__)

#: Maximum number of doublings of the pause between tries. Some 1,000 doublings would overflow a float.
_MAX_DOUBLINGS = 100
#: Maximum pause in seconds that a `Retry-After` header can cause.
MAX_PAUSE_S = 60.0
#: Maximum number of groups, and of characters in their ids, for which `follow` uses the service's filter.
MAX_FILTER, MAX_FILTER_CHARS = 100, 4000
#: Maximum seconds for which the service waits for an operation of an episode before it answers.
WORK_S = 60.0
#: Number of results that `follow` acknowledges together; maximum number of groups in one request.
ACKNOWLEDGED_AT_ONCE, MAX_ACKNOWLEDGED_GROUPS = 64, 1000

_REQUESTS = TypeAdapter(list[GroupRequest])


class RolloutClient:
    """Client of one rollout service. All requests are idempotent, so failed requests are retried.

    Args:
        url: base URL of the service.
        token: bearer token. None reads the token file of the user's service on this machine; "" sends none.
        timeout_s: timeout of a request in seconds, in addition to a requested wait.
        attempts: maximum number of tries if the connection fails or the service is full or unavailable.
        pause_s: seconds before the second try. The pause doubles each time, up to `max_pause_s`. A longer
            `Retry-After` of the service takes precedence.
        transport: connection to the service; None uses TCP.
        clock: waits between tries.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        timeout_s: float = 30.0,
        attempts: int = 5,
        pause_s: float = 0.2,
        max_pause_s: float = 5.0,
        transport: httpx.AsyncBaseTransport | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._attempts = attempts
        self._pause_s = pause_s
        self._max_pause_s = max_pause_s
        self._clock = clock or SystemClock()
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {token}"} if token else {},
            auth=LocalToken() if token is None else None,
            transport=transport,
            trust_env=False,  # a proxy from the environment must not see the token
        )

    async def aclose(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    async def submit(self, groups: Sequence[GroupRequest]) -> list[GroupView]:
        """Submit groups. The service accepts all of them or none.

        Raises:
            InputError: a request is wrong; Conflict: an id is taken.
            QueueFull, Unavailable: the last try failed too.
        """
        body = _REQUESTS.dump_python(list(groups), mode="json", exclude_unset=True)
        return (await self._call(GroupList, "POST", "/v1/groups", json=body)).groups

    async def group(self, group_id: str, *, wait_s: float = 0.0) -> GroupView:
        """Return the state of a group. Waits up to `wait_s` seconds until it is complete.

        Raises:
            NotFound: no such group.
        """
        path, query = f"/v1/groups/{_segment(group_id)}", {"wait_s": wait_s}
        return await self._call(GroupView, "GET", path, wait_s=wait_s, params=query)

    async def cancel_group(self, group_id: str) -> GroupView:
        """Cancel a group. Raises NotFound."""
        return await self._call(GroupView, "DELETE", f"/v1/groups/{_segment(group_id)}")

    async def job(self, job_id: str, *, wait_s: float = 0.0) -> JobView:
        """Return the state of a job. Waits up to `wait_s` seconds until it is finished.

        Raises:
            NotFound: no such job.
        """
        path, query = f"/v1/jobs/{_segment(job_id)}", {"wait_s": wait_s}
        return await self._call(JobView, "GET", path, wait_s=wait_s, params=query)

    async def cancel_job(self, job_id: str) -> JobView:
        """Cancel a job. Raises NotFound."""
        return await self._call(JobView, "DELETE", f"/v1/jobs/{_segment(job_id)}")

    async def result(self, job_id: str) -> Result:
        """Return the result of a job. Raises NotFound for unknown and unfinished jobs and dropped results."""
        return await self._call(Result, "GET", f"/v1/jobs/{_segment(job_id)}/result")

    async def page(
        self,
        after: int = 0,
        *,
        wait_s: float = 0.0,
        limit: int = 100,
        only: Selection = ALL,
        acknowledge: bool = True,
    ) -> ResultPage:
        """Return the results after a cursor.

        Args:
            after: a cursor; 0 starts with the oldest stored result.
            wait_s: maximum seconds to wait for the first result.
            limit: maximum number of results.
            only: filter for results.
            acknowledge: mark the results up to `after` that were sent with this filter as read.

        Raises:
            CursorExpired: results after `after` that the filter accepts are no longer stored.
        """
        query = {
            "after": after,
            "wait_s": wait_s,
            "limit": limit,
            "acknowledge": acknowledge,
            **_filters(only),
        }
        return await self._call(ResultPage, "GET", "/v1/results", wait_s=wait_s, params=query)

    async def acknowledge(self, after: int = 0, up_to: int | None = None, *, only: Selection = ALL) -> None:
        """Mark results as read. A service with a durable store drops only read results. `page` and
        `batch_results` mark the results of a page when they request the next page; `follow` calls this
        method.

        Args:
            after, up_to: cursors. Marks the results from `after + 1` to `up_to`; None marks up to the newest.
            only: filter for results.
        """
        ids = sorted(only.groups)
        for first in range(0, max(len(ids), 1), MAX_ACKNOWLEDGED_GROUPS):
            body: dict[str, Any] = {
                "after": after,
                "groups": ids[first : first + MAX_ACKNOWLEDGED_GROUPS],
                "environments": sorted(only.environments),
                "states": sorted(only.states),
            }
            if up_to is not None:
                body["up_to"] = up_to
            await self._call(Health, "POST", "/v1/results/acknowledge", json=body)

    async def follow(self, group_ids: Collection[str], after: int = 0) -> AsyncIterator[Result]:
        """Yield the results of these groups as they arrive, until all groups are complete.

        Args:
            group_ids: ids of submitted groups.
            after: a cursor from before their submission; 0 always works.

        Raises:
            NotFound: a group is unknown, or a result of a group is no longer stored.
            CursorExpired: some of the following results are no longer stored.
            Unavailable: the last try failed too.
        """
        only, processed = _of_groups(group_ids), Processed(self, after)
        missing = {job.id for name in group_ids for job in (await self.group(name)).jobs}
        while missing:
            page = await self.page(after, wait_s=20.0, only=only, acknowledge=False)
            for result in page.results:
                if result.job_id in missing:
                    missing.discard(result.job_id)
                    yield result
                    await processed.add(result)
            after = page.next
            if not page.results and missing:  # results may have been dropped before they were read
                await self._check_still_to_come(missing, after)
        await processed.acknowledge()

    async def _check_still_to_come(self, jobs: Collection[str], after: int) -> None:
        for group_id in {split_job_id(job)[0] for job in jobs}:
            for job in (await self.group(group_id)).jobs:
                if job.id in jobs and job.cursor is not None and job.cursor <= after:
                    raise NotFound(f"the result of {job.id!r} is no longer kept", hint="read sooner")

    async def start_episode(self, request: EpisodeRequest) -> EpisodeView:
        """Start an interactive episode, and wait until it is ready or has failed.

        Raises:
            InputError: the request is wrong; Conflict: its id is taken.
            QueueFull, Unavailable: the last try failed too.
        """
        body = request.model_dump(mode="json")
        view = await self._call(EpisodeView, "POST", "/v1/episodes", wait_s=WORK_S, json=body)
        return await self._while_busy(view, prompt=True)

    async def episode(self, episode_id: str, *, wait_s: float = 0.0) -> EpisodeView:
        """Return the state of an episode. Raises NotFound."""
        path, query = _episode(episode_id), {"wait_s": wait_s}
        return await self._call(EpisodeView, "GET", path, wait_s=wait_s, params=query)

    async def run_episode(self, episode_id: str, step: CallStep | TokenStep | AgentStep) -> EpisodeView:
        """Run a step and wait for its outcome, which is in `last`. Steps are numbered, so that a retry after
        a lost answer does not repeat the step.

        Raises:
            NotFound: the episode was closed.
            OutOfOrder: the episode is not ready, or this is not its next step.
        """
        if step.step is None:
            step = step.model_copy(update={"step": (await self.episode(episode_id)).steps})
        body, path = step.model_dump(mode="json", exclude_none=True), f"{_episode(episode_id)}/run"
        return await self._while_busy(await self._call(EpisodeView, "POST", path, wait_s=WORK_S, json=body))

    async def open_endpoint(self, episode_id: str) -> EndpointView:
        """Open a model endpoint for an agent of the caller. Its answers become the episode's tokens.

        On a cluster, the request for the episode must have `endpoint=True`.

        Raises:
            NotFound: the episode was closed.
            OutOfOrder: the episode is not ready, is driven by tokens, or runs on another machine.
        """
        path = f"{_episode(episode_id)}/endpoint"
        return await self._call(EndpointView, "POST", path, wait_s=WORK_S)

    async def evaluate_episode(self, episode_id: str) -> EpisodeView:
        """Grade an episode and wait for its `result`. Its sandbox is closed after that.

        Raises:
            NotFound: the episode was closed.
            OutOfOrder: the episode is busy, or has failed.
        """
        path = f"{_episode(episode_id)}/eval"
        return await self._while_busy(await self._call(EpisodeView, "POST", path, wait_s=WORK_S))

    async def close_episode(self, episode_id: str) -> None:
        """Close an episode. Returns once its sandbox is closed. Unknown episodes are ignored."""
        with contextlib.suppress(NotFound):
            await self._call(Health, "DELETE", _episode(episode_id), wait_s=WORK_S)

    async def _while_busy(self, view: EpisodeView, *, prompt: bool = False) -> EpisodeView:
        while view.state.busy:
            view = await self.episode(view.id, wait_s=20.0)
        return view if prompt else view.model_copy(update={"prompt": None})

    async def submit_batch(self, batch: BatchRequest) -> BatchView:
        """Submit a batch: a request for a number of informative groups.

        Raises:
            InputError: the request is wrong.
            Conflict: the id is taken, or the batch in `carry_from` has no groups to carry.
            NotFound: the batch in `carry_from` does not exist.
            QueueFull, Unavailable: the last try failed too.
        """
        body = batch.model_dump(mode="json", exclude_unset=True)
        return await self._call(BatchView, "POST", "/v1/batches", json=body)

    async def append_tasks(
        self, batch_id: str, tasks: Sequence[BatchTask], *, first: int, stream_open: bool = True
    ) -> BatchView:
        """Append tasks to a batch's stream.

        Args:
            first: index of the first task, which is the number of tasks so far.
            stream_open: further tasks will follow.

        Raises:
            NotFound: no such batch; InputError: a task is wrong.
            Conflict: the stream is closed, or has other tasks at these indices.
        """
        stream = BatchTasks(first=first, tasks=list(tasks), stream_open=stream_open)
        body = stream.model_dump(mode="json", exclude_unset=True)
        return await self._call(BatchView, "POST", f"/v1/batches/{_segment(batch_id)}/tasks", json=body)

    async def batch(self, batch_id: str, *, wait_s: float = 0.0) -> BatchView:
        """Return the progress of a batch. Waits up to `wait_s` seconds until it is final or needs tasks.

        Raises:
            NotFound: no such batch.
        """
        path, query = f"/v1/batches/{_segment(batch_id)}", {"wait_s": wait_s}
        return await self._call(BatchView, "GET", path, wait_s=wait_s, params=query)

    async def batches(self) -> list[BatchView]:
        """Return all stored batches, oldest first."""
        return (await self._call(BatchList, "GET", "/v1/batches")).batches

    async def cancel_batch(self, batch_id: str) -> BatchView:
        """Cancel the groups in flight of a batch, also those that a final batch keeps for a later one.

        Raises:
            NotFound: no such batch.
        """
        return await self._call(BatchView, "DELETE", f"/v1/batches/{_segment(batch_id)}")

    async def batch_groups(self, batch_id: str) -> SelectedGroups:
        """Return the informative groups of a batch so far. Raises NotFound."""
        return await self._call(SelectedGroups, "GET", f"/v1/batches/{_segment(batch_id)}/groups")

    async def batch_results(
        self, batch_id: str, after: int = 0, *, wait_s: float = 20.0
    ) -> AsyncIterator[Result]:
        """Yield the results of a batch's informative groups in the order of the groups' decisions, until the
        batch is final.

        Args:
            after: number of results to skip.

        Raises:
            NotFound: no such batch, or a result is no longer stored.
            Unavailable: the last try failed too.
        """
        path = f"/v1/batches/{_segment(batch_id)}/results"
        while True:
            final = (await self.batch(batch_id)).state.over
            query: dict[str, float] = {"after": after, "wait_s": wait_s}
            page = await self._call(ResultPage, "GET", path, wait_s=wait_s, params=query)
            for result in page.results:
                yield result
            if final and not page.results:
                return
            after = page.next

    async def status(self) -> StatusView:
        return await self._call(StatusView, "GET", "/v1/status")

    async def pause(self, mode: Pause = Pause.HOLD) -> StatusView:
        """Pause the service.

        Args:
            mode: `hold`: no stage starts; `finish`: no job starts, but started jobs run to completion.
        """
        return await self._call(StatusView, "POST", "/v1/pause", json={"mode": mode})

    async def resume(self) -> StatusView:
        """Cancel a pause or a drain."""
        return await self._call(StatusView, "POST", "/v1/resume")

    async def drain(self, *, wait_s: float = 0.0) -> StatusView:
        """Drain the service: it accepts no more work and finishes its jobs. `unfinished` counts them.

        Args:
            wait_s: maximum seconds to wait until all jobs are finished.
        """
        return await self._call(StatusView, "POST", "/v1/drain", wait_s=wait_s, params={"wait_s": wait_s})

    async def login_link(self) -> str:
        """Return a link that logs one browser in to the dashboard, once."""
        return self.url + (await self._call(LoginView, "POST", "/v1/logins")).path

    async def dashboard(self) -> DashboardView:
        """Return the state of the service, and its finished jobs of the last ten minutes."""
        return await self._call(DashboardView, "GET", "/v1/dashboard")

    async def jobs(self, *, states: Collection[str] = (), limit: int = 100) -> JobPage:
        """Return unfinished jobs. Jobs with a running stage come first.

        Args:
            states: queued, init, run, eval; an empty collection selects all.
            limit: maximum number of jobs, up to 1000.
        """
        query = {"state": sorted(states), "limit": limit}
        return await self._call(JobPage, "GET", "/v1/jobs", params=query)

    async def retry_job(self, job_id: str) -> GroupView:
        """Run a finished job again, as a new group with one sample.

        Raises:
            NotFound: no such job; Conflict: the job is not finished.
        """
        return await self._call(GroupView, "POST", f"/v1/jobs/{_segment(job_id)}/retry")

    async def branch_job(self, job_id: str, request: BranchRequest) -> list[GroupView]:
        """Start groups with the first turns of a job.

        Raises:
            NotFound: no such job, or no result for a policy; InputError: the job has no such turns.
        """
        body = request.model_dump(exclude_defaults=True)
        return (await self._call(GroupList, "POST", f"/v1/jobs/{_segment(job_id)}/branch", json=body)).groups

    async def rewind_job(self, job_id: str, turns: int) -> GroupView:
        """Cancel a job, if it still runs, and go on after its first turns, as a new group. Raises as
        `branch_job`."""
        path = f"/v1/jobs/{_segment(job_id)}/rewind?turns={turns}"
        return await self._call(GroupView, "POST", path)

    async def set_limits(self, limits: LimitsRequest) -> StatusView:
        """Change the limits of the service's own machine until the service stops."""
        body = limits.model_dump(exclude_none=True)
        return await self._call(StatusView, "PATCH", "/v1/limits", json=body)

    async def nodes(self) -> list[NodeView]:
        """Return the nodes that run jobs besides the service's own machine."""
        return (await self._call(NodeList, "GET", "/v1/nodes")).nodes

    async def drain_node(self, name: str) -> list[NodeView]:
        """Stop sending jobs to a node. Raises NotFound."""
        return (await self._call(NodeList, "POST", f"/v1/nodes/{_segment(name)}/drain")).nodes

    async def resume_node(self, name: str) -> list[NodeView]:
        """Resume sending jobs to a node. Raises NotFound."""
        return (await self._call(NodeList, "POST", f"/v1/nodes/{_segment(name)}/resume")).nodes

    async def environments(self) -> list[EnvironmentView]:
        return (await self._call(EnvironmentList, "GET", "/v1/environments")).environments

    async def model_servers(self) -> list[ModelServerView]:
        return (await self._call(ModelServerList, "GET", "/v1/model_servers")).servers

    async def add_model_server(self, url: str, *, protocol: str | None = None) -> list[ModelServerView]:
        """Add a model server. Raises InputError if the URL is invalid."""
        body = {"url": url} | ({"protocol": protocol} if protocol else {})
        return (await self._call(ModelServerList, "POST", "/v1/model_servers", json=body)).servers

    async def remove_model_server(self, url: str, *, wait_s: float = 0.0) -> list[ModelServerView]:
        """Remove a model server, and wait up to `wait_s` seconds for its turns in flight.

        Raises:
            NotFound: no such server.
        """
        query = {"url": url, "wait_s": wait_s}
        answer = await self._call(ModelServerList, "DELETE", "/v1/model_servers", wait_s=wait_s, params=query)
        return answer.servers

    async def pause_model_servers(
        self, mode: InFlight = "finish", *, resample: bool = False, wait_s: float = 0.0
    ) -> PauseView:
        """Hold turns while weights change, see `PauseRequest`. Weights may change once `in_flight` is 0, with
        `keep` immediately."""
        body = {"mode": mode, "resample": resample, "wait_s": wait_s}
        path = "/v1/model_servers/pause"
        # The long timeout allows for model servers that do not answer the service's notification.
        return await self._call(PauseView, "POST", path, wait_s=wait_s + 60, json=body)

    async def resume_model_servers(self, weight_version: str = "") -> PauseView:
        """Resume turns with this weight version."""
        body = {"weight_version": weight_version}
        return await self._call(PauseView, "POST", "/v1/model_servers/resume", wait_s=60, json=body)

    async def _call[V: BaseModel](
        self, view: type[V], method: str, path: str, *, wait_s: float = 0.0, **options: Any
    ) -> V:
        for attempt in range(1, self._attempts + 1):
            try:
                return await self._once(view, method, path, wait_s, options)
            except Retryable as error:
                if attempt == self._attempts:
                    raise
                await self._pause(attempt, error)
        raise AssertionError("attempts is at least 1")

    async def _pause(self, failures: int, error: Retryable) -> None:
        """Wait before the next try, for the longer of the doubling pause and `Retry-After`, both limited."""
        retry_after_s = min(error.retry_after_s, MAX_PAUSE_S)
        pause_s = self._pause_s * 2.0 ** min(failures - 1, _MAX_DOUBLINGS)
        await self._clock.sleep(max(min(pause_s, self._max_pause_s), retry_after_s))

    async def _once[V: BaseModel](
        self, view: type[V], method: str, path: str, wait_s: float, options: dict[str, Any]
    ) -> V:
        timeout = httpx.Timeout(self._timeout_s + wait_s)
        try:
            response = await self._http.request(method, path, timeout=timeout, **options)
        except httpx.TransportError as error:
            raise self._unreachable(error) from error
        if not response.is_success:
            raise _error(response)
        # In a thread, since parsing a page of long trajectories would block the event loop.
        return await asyncio.to_thread(_parse, view, response.content)

    def _unreachable(self, error: httpx.TransportError) -> Unavailable:
        message = f"the rollout service at {self.url} does not answer: {error or type(error).__name__}"
        return Unavailable(message, hint="`prorl-envs serve` starts a service; is it at another address?")


class Processed:
    """Results that a caller has processed. Several of them are acknowledged together.

    Args:
        client: client of the service.
        after: a cursor before the first processed result.
    """

    def __init__(self, client: RolloutClient, after: int = 0) -> None:
        self._client = client
        self._after, self._up_to = after, after
        self._groups: set[str] = set()
        self._count = 0

    async def add(self, result: Result) -> None:
        """Add a result, in the order of the cursors."""
        self._up_to = result.cursor
        self._groups.add(result.group_id)
        self._count += 1
        if self._count >= ACKNOWLEDGED_AT_ONCE:
            await self.acknowledge()

    async def acknowledge(self) -> None:
        """Acknowledge the added results. Never raises; if it fails, they stay unread."""
        if self._count:
            only = Selection(groups=frozenset(self._groups))
            try:
                await self._client.acknowledge(self._after, self._up_to, only=only)
            except ProrlError as error:
                logger.warning("results up to %d are not acknowledged: %s", self._up_to, error)
                return
        self._after, self._count = self._up_to, 0
        self._groups.clear()


def _parse[V: BaseModel](view: type[V], content: bytes) -> V:
    try:
        return view.model_validate_json(content)
    except ValidationError as error:
        raise ServerFault(f"the answer is not a {view.__name__}", hint="do the versions match?") from error


def _error(response: httpx.Response) -> ProrlError:
    try:
        detail = ErrorBody.model_validate_json(response.content).error
    except ValidationError:
        return ServerFault(f"HTTP {response.status_code} without a typed error", hint="is this the service?")
    error = from_wire(detail.type, detail.message, detail.hint)
    if isinstance(error, Retryable):
        error.retry_after_s = _seconds(response.headers.get("Retry-After", ""))
    return error


def _seconds(text: str) -> float:
    """Return the seconds of a `Retry-After` header; 0 if it is missing or a date (our service sends none)."""
    return float(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0.0


def _filters(only: Selection) -> dict[str, list[str]]:
    """Return a selection as query parameters."""
    values = {"group": only.groups, "environment": only.environments, "state": only.states}
    return {name: sorted(accepted) for name, accepted in values.items() if accepted}


def _of_groups(group_ids: Collection[str]) -> Selection:
    """Return a filter for these groups, or `ALL` if their ids are too long for a URL."""
    short = len(group_ids) <= MAX_FILTER and sum(map(len, group_ids)) <= MAX_FILTER_CHARS
    return Selection(groups=frozenset(group_ids)) if short else ALL


def _episode(episode_id: str) -> str:
    return f"/v1/episodes/{_segment(episode_id)}"


def _segment(identifier: str) -> str:
    """Return an id as one segment of a path. `/` is escaped, so that `a/../b` is not normalised."""
    return quote(identifier, safe="")
