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
from types import TracebackType
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
from prorl_envs.rollout.api.types import ALL, GroupRequest, Result, Selection, split_job_id
from prorl_envs.rollout.api.views import (
    EnvironmentList,
    EnvironmentView,
    ErrorBody,
    GroupList,
    GroupView,
    Health,
    JobToken,
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

#: Most doublings of the pause between tries; a power of some 1,000 would overflow a float.
_MOST_DOUBLINGS = 100
#: Longest pause that a `Retry-After` can cause, in seconds.
MAX_PAUSE_S = 60.0

#: Most groups, and characters of their ids, for which `follow` uses the service's filter.
MAX_FILTER, MAX_FILTER_CHARS = 100, 4000
#: Heartbeat interval of the service's streams, in seconds.
HEARTBEAT_S = 15.0
#: Longest time in seconds until the service answers, even if its work is still running.
WORK_S = 60.0
STREAM = "/v1/results/stream"
#: Processed results of `follow` and `stream` that are acknowledged at once; most groups of one request.
ACKNOWLEDGED_AT_ONCE, MAX_ACKNOWLEDGED_GROUPS = 64, 1000

_REQUESTS = TypeAdapter(list[GroupRequest])


class RolloutClient:
    """Client of one rollout service. All requests are idempotent, so failed ones are retried.

    Args:
        url: base URL of the service.
        token: bearer token. None reads the token file of a service of the same user on this machine; "" sends
            none.
        timeout_s: timeout of one answer in seconds, on top of a requested wait.
        attempts: tries of a request if the connection fails or the service is full or unavailable.
        pause_s: seconds before the second try; doubles each time, up to `max_pause_s`. A longer
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

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def submit(self, groups: Sequence[GroupRequest]) -> list[GroupView]:
        """Submit groups, all or none.

        Raises:
            InputError: a request is wrong; Conflict: an id is taken.
            QueueFull, Unavailable: still so after the last try.
        """
        body = _REQUESTS.dump_python(list(groups), mode="json", exclude_unset=True)
        return (await self._call(GroupList, "POST", "/v1/groups", json=body)).groups

    async def group(self, group_id: str, *, wait_s: float = 0.0) -> GroupView:
        """Return the state of a group, waiting up to `wait_s` seconds until it is complete.

        Raises:
            NotFound.
        """
        path, query = f"/v1/groups/{_segment(group_id)}", {"wait_s": wait_s}
        return await self._call(GroupView, "GET", path, wait_s=wait_s, params=query)

    async def cancel_group(self, group_id: str) -> GroupView:
        """Cancel a group. Raises: NotFound."""
        return await self._call(GroupView, "DELETE", f"/v1/groups/{_segment(group_id)}")

    async def job(self, job_id: str, *, wait_s: float = 0.0) -> JobView:
        """Return the state of a job, waiting up to `wait_s` seconds until it is finished.

        Raises:
            NotFound.
        """
        path, query = f"/v1/jobs/{_segment(job_id)}", {"wait_s": wait_s}
        return await self._call(JobView, "GET", path, wait_s=wait_s, params=query)

    async def cancel_job(self, job_id: str) -> JobView:
        """Cancel a job. Raises: NotFound."""
        return await self._call(JobView, "DELETE", f"/v1/jobs/{_segment(job_id)}")

    async def result(self, job_id: str) -> Result:
        """Return the result of a job. Raises: NotFound: no such job, not finished, or no longer kept."""
        return await self._call(Result, "GET", f"/v1/jobs/{_segment(job_id)}/result")

    async def job_token(self, job_id: str) -> str:
        """Return a bearer token that may only read and cancel this job.

        Raises:
            NotFound.
            Conflict: the service has no token of its own.
        """
        return (await self._call(JobToken, "POST", f"/v1/jobs/{_segment(job_id)}/token")).token

    async def page(
        self,
        after: int = 0,
        *,
        wait_s: float = 0.0,
        limit: int = 100,
        only: Selection = ALL,
        acknowledge: bool = True,
    ) -> ResultPage:
        """Return the results after a cursor, waiting up to `wait_s` seconds for the first.

        Args:
            after: a cursor; 0 starts with the oldest result kept.
            wait_s: seconds.
            limit: most results.
            only: filter for results.
            acknowledge: the results up to `after` that this filter was sent are read.

        Raises:
            CursorExpired: results after `after` that the filter accepts are no longer kept.
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
        """Mark results as read: a durable service drops no others. `page`, `results` and `batch_results` mark
        the results of a page when the next one is requested; `follow` and `stream` call this method.

        Args:
            after, up_to: cursors; results after the first, up to and including the second or the newest.
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

    async def stream(self, after: int = 0, *, only: Selection = ALL) -> AsyncIterator[Result]:
        """Yield results as `results` does, over one open connection, which is reopened if it breaks. Stops
        when the service stops.

        Raises:
            CursorExpired: results in between are no longer kept.
            Unavailable: the service stays unavailable.
        """
        failures, processed = 0, Processed(self, after, only)
        while True:
            try:
                async for result in self._stream_once(after, only):
                    failures = 0
                    yield result
                    after = result.cursor
                    await processed.add(result)
                return
            except Retryable as later:
                failures += 1
                if failures == self._attempts:
                    raise
                await self._pause(failures, later)

    async def _stream_once(self, after: int, only: Selection) -> AsyncIterator[Result]:
        timeout = httpx.Timeout(self._timeout_s, read=self._timeout_s + HEARTBEAT_S)
        query: dict[str, Any] = {"after": after, **_filters(only)}
        try:
            async with self._http.stream("GET", STREAM, params=query, timeout=timeout) as response:
                if not response.is_success:
                    await response.aread()
                    raise _error(response)
                async for line in _lines(response):
                    if line.strip():
                        yield await asyncio.to_thread(_parse, Result, line)
        except httpx.TransportError as error:
            raise self._away(error) from error

    async def results(
        self, after: int = 0, *, wait_s: float = 20.0, only: Selection = ALL
    ) -> AsyncIterator[Result]:
        """Yield every result after a cursor as it arrives, without end. Resumes after a broken connection;
        pass the last result's `cursor` to resume later.

        Args:
            after: a cursor; 0 starts with the oldest result kept.
            wait_s: seconds that one request waits.
            only: filter for results.

        Raises:
            CursorExpired: results in between are no longer kept.
            Unavailable: the service stays unavailable.
        """
        while True:
            page = await self.page(after, wait_s=wait_s, only=only)
            for result in page.results:
                yield result
            after = page.next

    async def follow(self, group_ids: Collection[str], after: int = 0) -> AsyncIterator[Result]:
        """Yield the results of these groups as they arrive, until all groups are complete.

        Args:
            group_ids: groups that were submitted.
            after: a cursor from before their submission; 0 is always early enough.

        Raises:
            NotFound: a group is not known, or a result of one is no longer kept.
            CursorExpired, Unavailable: as `results`.
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
            if not page.results and missing:  # perhaps recorded and removed before it was read
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
            QueueFull, Unavailable: still so after the last try.
        """
        body = request.model_dump(mode="json")
        view = await self._call(EpisodeView, "POST", "/v1/episodes", wait_s=WORK_S, json=body)
        return await self._while_busy(view, prompt=True)

    async def episode(self, episode_id: str, *, wait_s: float = 0.0) -> EpisodeView:
        """Return the state of an episode. Raises: NotFound."""
        path, query = _episode(episode_id), {"wait_s": wait_s}
        return await self._call(EpisodeView, "GET", path, wait_s=wait_s, params=query)

    async def run_episode(self, episode_id: str, step: CallStep | TokenStep | AgentStep) -> EpisodeView:
        """Take a step and wait for its outcome, in `last`. Steps are numbered, so that a retry after a lost
        answer does not repeat the step.

        Raises:
            NotFound: the episode was closed.
            OutOfOrder: it is not ready, or the step is not the next.
        """
        if step.step is None:
            step = step.model_copy(update={"step": (await self.episode(episode_id)).steps})
        body, path = step.model_dump(mode="json", exclude_none=True), f"{_episode(episode_id)}/run"
        return await self._while_busy(await self._call(EpisodeView, "POST", path, wait_s=WORK_S, json=body))

    async def open_endpoint(self, episode_id: str) -> EndpointView:
        """Open a model endpoint for an agent of the caller. Its answers become the episode's tokens.

        On a cluster, only episodes whose request has `endpoint=True` are sure to be on the service's machine.

        Raises:
            NotFound: the episode was closed.
            OutOfOrder: it is not ready, is driven by tokens, or runs on another machine.
        """
        path = f"{_episode(episode_id)}/endpoint"
        return await self._call(EndpointView, "POST", path, wait_s=WORK_S)

    async def evaluate_episode(self, episode_id: str) -> EpisodeView:
        """Grade an episode and wait for its `result`; its sandbox is closed after that.

        Raises:
            NotFound: the episode was closed.
            OutOfOrder: it is busy, or has failed.
        """
        path = f"{_episode(episode_id)}/eval"
        return await self._while_busy(await self._call(EpisodeView, "POST", path, wait_s=WORK_S))

    async def close_episode(self, episode_id: str) -> None:
        """Close an episode; returns once its sandbox is closed. Unknown episodes are ignored."""
        with contextlib.suppress(NotFound):
            await self._call(Health, "DELETE", _episode(episode_id), wait_s=WORK_S)

    async def _while_busy(self, view: EpisodeView, *, prompt: bool = False) -> EpisodeView:
        while view.state.busy:
            view = await self.episode(view.id, wait_s=20.0)
        return view if prompt else view.model_copy(update={"prompt": None})

    async def submit_batch(self, batch: BatchRequest) -> BatchView:
        """Submit a batch: a request for a number of informative groups.

        Raises:
            InputError: the request is wrong; Conflict: the id is taken, or there is nothing to carry over.
            NotFound: there is no batch to carry from.
            QueueFull, Unavailable: still so after the last try.
        """
        body = batch.model_dump(mode="json", exclude_unset=True)
        return await self._call(BatchView, "POST", "/v1/batches", json=body)

    async def append_tasks(
        self, batch_id: str, tasks: Sequence[BatchTask], *, first: int, stream_open: bool = True
    ) -> BatchView:
        """Append tasks to a batch's stream.

        Args:
            first: index of the first task: the number of tasks so far.
            stream_open: further tasks will follow.

        Raises:
            NotFound: no such batch; InputError: a task is wrong.
            Conflict: the stream is closed, or has other tasks at that index.
        """
        stream = BatchTasks(first=first, tasks=list(tasks), stream_open=stream_open)
        body = stream.model_dump(mode="json", exclude_unset=True)
        return await self._call(BatchView, "POST", f"/v1/batches/{_segment(batch_id)}/tasks", json=body)

    async def batch(self, batch_id: str, *, wait_s: float = 0.0) -> BatchView:
        """Return the progress of a batch; waits up to `wait_s` seconds until it is final or needs tasks.

        Raises:
            NotFound.
        """
        path, query = f"/v1/batches/{_segment(batch_id)}", {"wait_s": wait_s}
        return await self._call(BatchView, "GET", path, wait_s=wait_s, params=query)

    async def batches(self) -> list[BatchView]:
        """Return all batches that the service keeps, oldest first."""
        return (await self._call(BatchList, "GET", "/v1/batches")).batches

    async def cancel_batch(self, batch_id: str) -> BatchView:
        """Cancel the groups of a batch in flight; of a final batch, cancel its leftover groups.

        Raises:
            NotFound.
        """
        return await self._call(BatchView, "DELETE", f"/v1/batches/{_segment(batch_id)}")

    async def batch_groups(self, batch_id: str) -> SelectedGroups:
        """Return the informative groups of a batch so far. Raises: NotFound."""
        return await self._call(SelectedGroups, "GET", f"/v1/batches/{_segment(batch_id)}/groups")

    async def batch_results(
        self, batch_id: str, after: int = 0, *, wait_s: float = 20.0
    ) -> AsyncIterator[Result]:
        """Yield the results of a batch's informative groups as these are decided, until the batch is final.

        Args:
            after: number of results to skip.

        Raises:
            NotFound: no such batch, or a result is no longer kept.
            Unavailable: the service stays unavailable.
        """
        path = f"/v1/batches/{_segment(batch_id)}/results"
        while True:
            over = (await self.batch(batch_id)).state.over
            query: dict[str, float] = {"after": after, "wait_s": wait_s}
            page = await self._call(ResultPage, "GET", path, wait_s=wait_s, params=query)
            for result in page.results:
                yield result
            if over and not page.results:
                return
            after = page.next

    async def status(self) -> StatusView:
        return await self._call(StatusView, "GET", "/v1/status")

    async def pause(self, mode: Pause = Pause.HOLD) -> StatusView:
        """Pause the service.

        Args:
            mode: `hold` starts no stage; `finish` starts no job, but lets started jobs continue.
        """
        return await self._call(StatusView, "POST", "/v1/pause", json={"mode": mode})

    async def resume(self) -> StatusView:
        """Cancel a pause or a drain."""
        return await self._call(StatusView, "POST", "/v1/resume")

    async def drain(self, *, wait_s: float = 0.0) -> StatusView:
        """Drain the service: it accepts no more work and finishes its jobs; `unfinished` counts them.

        Args:
            wait_s: seconds to wait until no job is unfinished.
        """
        return await self._call(StatusView, "POST", "/v1/drain", wait_s=wait_s, params={"wait_s": wait_s})

    async def login_link(self) -> str:
        """Return a link that logs one browser in to the dashboard, once."""
        return self.url + (await self._call(LoginView, "POST", "/v1/logins")).path

    async def dashboard(self) -> DashboardView:
        """Return the state of the service and its last ten minutes."""
        return await self._call(DashboardView, "GET", "/v1/dashboard")

    async def jobs(self, *, states: Collection[str] = (), limit: int = 100) -> JobPage:
        """Return unfinished jobs; jobs whose stage is running come first.

        Args:
            states: queued, init, run, eval; an empty collection selects all.
            limit: most jobs, at most 1000.
        """
        query = {"state": sorted(states), "limit": limit}
        return await self._call(JobPage, "GET", "/v1/jobs", params=query)

    async def retry_job(self, job_id: str) -> GroupView:
        """Run a finished job again, as a group of its own.

        Raises:
            NotFound; Conflict: it is not finished.
        """
        return await self._call(GroupView, "POST", f"/v1/jobs/{_segment(job_id)}/retry")

    async def set_limits(self, limits: LimitsRequest) -> StatusView:
        """Change the limits of the service's own machine until the service stops."""
        body = limits.model_dump(exclude_none=True)
        return await self._call(StatusView, "PATCH", "/v1/limits", json=body)

    async def nodes(self) -> list[NodeView]:
        """Return the nodes that run jobs besides the service's own machine."""
        return (await self._call(NodeList, "GET", "/v1/nodes")).nodes

    async def drain_node(self, name: str) -> list[NodeView]:
        """Send a node no further jobs. Raises: NotFound."""
        return (await self._call(NodeList, "POST", f"/v1/nodes/{_segment(name)}/drain")).nodes

    async def resume_node(self, name: str) -> list[NodeView]:
        """Send a node jobs again. Raises: NotFound."""
        return (await self._call(NodeList, "POST", f"/v1/nodes/{_segment(name)}/resume")).nodes

    async def environments(self) -> list[EnvironmentView]:
        return (await self._call(EnvironmentList, "GET", "/v1/environments")).environments

    async def model_servers(self) -> list[ModelServerView]:
        return (await self._call(ModelServerList, "GET", "/v1/model_servers")).servers

    async def add_model_server(self, url: str, *, protocol: str | None = None) -> list[ModelServerView]:
        """Add a model server. Raises: InputError."""
        body = {"url": url} | ({"protocol": protocol} if protocol else {})
        return (await self._call(ModelServerList, "POST", "/v1/model_servers", json=body)).servers

    async def remove_model_server(self, url: str, *, wait_s: float = 0.0) -> list[ModelServerView]:
        """Remove a model server, and wait up to `wait_s` seconds for its turns in flight.

        Raises:
            NotFound.
        """
        query = {"url": url, "wait_s": wait_s}
        answer = await self._call(ModelServerList, "DELETE", "/v1/model_servers", wait_s=wait_s, params=query)
        return answer.servers

    async def pause_model_servers(
        self, mode: InFlight = "finish", *, resample: bool = False, wait_s: float = 0.0
    ) -> PauseView:
        """Hold turns while weights change; see `PauseRequest`. Weights may change once `in_flight` is 0, with
        `keep` at once."""
        body = {"mode": mode, "resample": resample, "wait_s": wait_s}
        path = "/v1/model_servers/pause"
        # Allows for servers that do not answer the notification.
        return await self._call(PauseView, "POST", path, wait_s=wait_s + 60, json=body)

    async def resume_model_servers(self, weight_version: str = "") -> PauseView:
        """Resume turns with the named weights."""
        body = {"weight_version": weight_version}
        return await self._call(PauseView, "POST", "/v1/model_servers/resume", wait_s=60, json=body)

    async def _call[V: BaseModel](
        self, view: type[V], method: str, path: str, *, wait_s: float = 0.0, **options: Any
    ) -> V:
        for attempt in range(1, self._attempts + 1):
            try:
                return await self._once(view, method, path, wait_s, options)
            except Retryable as later:
                if attempt == self._attempts:
                    raise
                await self._pause(attempt, later)
        raise AssertionError("attempts is at least 1")

    async def _pause(self, failures: int, later: Retryable) -> None:
        """Wait before the next try: the larger of the doubling pause and `Retry-After`, both bounded."""
        asked = min(later.retry_after_s, MAX_PAUSE_S)
        pause_s = self._pause_s * 2.0 ** min(failures - 1, _MOST_DOUBLINGS)
        await self._clock.sleep(max(min(pause_s, self._max_pause_s), asked))

    async def _once[V: BaseModel](
        self, view: type[V], method: str, path: str, wait_s: float, options: dict[str, Any]
    ) -> V:
        timeout = httpx.Timeout(self._timeout_s + wait_s)
        try:
            response = await self._http.request(method, path, timeout=timeout, **options)
        except httpx.TransportError as error:
            raise self._away(error) from error
        if not response.is_success:
            raise _error(response)
        # Parsing a page of long trajectories would block the event loop.
        return await asyncio.to_thread(_parse, view, response.content)

    def _away(self, error: httpx.TransportError) -> Unavailable:
        message = f"the rollout service at {self.url} does not answer: {error or type(error).__name__}"
        return Unavailable(message, hint="`prorl-envs serve` starts one; is it at another address?")


class Processed:
    """Results that a caller has processed, which are acknowledged some at a time.

    Args:
        client: of the service.
        after: cursor before the first of them, or an earlier one.
        only: filter that accepts them and no others in between; None: all results of their groups.
    """

    def __init__(self, client: RolloutClient, after: int = 0, only: Selection | None = None) -> None:
        self._client = client
        self._after, self._up_to = after, after
        self._only = only
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
        """Acknowledge the results that were added. Never raises: they stay unread if this fails."""
        if self._count:
            only = self._only or Selection(groups=frozenset(self._groups))
            try:
                await self._client.acknowledge(self._after, self._up_to, only=only)
            except ProrlError as error:
                logger.warning("results up to %d are not acknowledged: %s", self._up_to, error)
                return
        self._after, self._count = self._up_to, 0
        self._groups.clear()


async def _lines(response: httpx.Response) -> AsyncIterator[bytes]:
    """Yield the lines of a body, cut at line feeds only. httpx would also cut at U+2028 and others, which may
    occur in JSON strings."""
    rest = bytearray()
    async for chunk in response.aiter_bytes():
        *lines, last = chunk.split(b"\n")
        for line in lines:
            yield bytes(rest + line)
            rest.clear()
        rest += last
    yield bytes(rest)


def _parse[V: BaseModel](view: type[V], content: bytes | str) -> V:
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
    """Parse a `Retry-After` in seconds; 0 if missing or a date, which this service does not send."""
    return float(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0.0


def _filters(only: Selection) -> dict[str, list[str]]:
    """Return a selection as query parameters."""
    values = {"group": only.groups, "environment": only.environments, "state": only.states}
    return {name: sorted(wanted) for name, wanted in values.items() if wanted}


def _of_groups(group_ids: Collection[str]) -> Selection:
    """Return a filter for these groups if a URL can name them all, otherwise one for everything."""
    short = len(group_ids) <= MAX_FILTER and sum(map(len, group_ids)) <= MAX_FILTER_CHARS
    return Selection(groups=frozenset(group_ids)) if short else ALL


def _episode(episode_id: str) -> str:
    return f"/v1/episodes/{_segment(episode_id)}"


def _segment(identifier: str) -> str:
    """Return an id as one segment of a path: `/` is escaped, so that `a/../b` is not normalised."""
    return quote(identifier, safe="")
