"""A typed client of the rollout service.

async with RolloutClient("http://127.0.0.1:8600") as client:
    await client.submit([GroupRequest(id="g1", environment="bash", task=row, samples=8)])
    async for result in client.follow({"g1"}):
        ...
"""

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import httpx
from pydantic import BaseModel, TypeAdapter, ValidationError

from prorl_envs.clock import Clock, SystemClock
from prorl_envs.errors import ProrlError
from prorl_envs.rollout.batch_types import (
    BatchList,
    BatchRequest,
    BatchTask,
    BatchTasks,
    BatchView,
    SelectedGroups,
)
from prorl_envs.rollout.errors import Full, NotFound, ServerFault, Unavailable, from_wire
from prorl_envs.rollout.types import GroupRequest, Result, split_job_id
from prorl_envs.rollout.views import (
    EnvironmentList,
    EnvironmentView,
    ErrorBody,
    GroupList,
    GroupView,
    JobView,
    ModelServerList,
    ModelServerView,
    ResultPage,
    StatusView,
)

_REQUESTS = TypeAdapter(list[GroupRequest])


class RolloutClient:
    """Talks to one rollout service. Everything it asks for may be asked for twice, so what fails on the way
    is tried again.

    Args:
        url: base URL of the service.
        token: its bearer token, or None.
        timeout_s: seconds one answer may take, on top of the wait that was asked for.
        attempts: how often a request is tried when the connection fails or the service is full or away.
        pause_s: seconds before the second try; doubles each time.
        transport: how to reach the service; None uses TCP.
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
        transport: httpx.AsyncBaseTransport | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._attempts = attempts
        self._pause_s = pause_s
        self._clock = clock or SystemClock()
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {token}"} if token else {},
            transport=transport,
            trust_env=False,  # a proxy of the environment must not see the token
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
            Full, Unavailable: still so after the last try.
        """
        body = _REQUESTS.dump_python(list(groups), mode="json")
        return (await self._call(GroupList, "POST", "/v1/groups", json=body)).groups

    async def group(self, group_id: str) -> GroupView:
        """Raises: NotFound."""
        return await self._call(GroupView, "GET", f"/v1/groups/{_segment(group_id)}")

    async def cancel_group(self, group_id: str) -> GroupView:
        """Raises: NotFound."""
        return await self._call(GroupView, "DELETE", f"/v1/groups/{_segment(group_id)}")

    async def job(self, job_id: str) -> JobView:
        """Raises: NotFound."""
        return await self._call(JobView, "GET", f"/v1/jobs/{_segment(job_id)}")

    async def cancel_job(self, job_id: str) -> JobView:
        """Raises: NotFound."""
        return await self._call(JobView, "DELETE", f"/v1/jobs/{_segment(job_id)}")

    async def result(self, job_id: str) -> Result:
        """Raises: NotFound: no such job, not finished, or no longer kept."""
        return await self._call(Result, "GET", f"/v1/jobs/{_segment(job_id)}/result")

    async def page(self, after: int = 0, *, wait_s: float = 0.0, limit: int = 100) -> ResultPage:
        """Results after a cursor, waiting up to `wait_s` seconds for the first.

        Raises:
            CursorExpired: results in between are no longer kept.
        """
        query = {"after": after, "wait_s": wait_s, "limit": limit}
        return await self._call(ResultPage, "GET", "/v1/results", wait_s=wait_s, params=query)

    async def results(self, after: int = 0, *, wait_s: float = 20.0) -> AsyncIterator[Result]:
        """Every result after a cursor, as they come, without end. Goes on where it was after a broken
        connection; resume another time with the last result's `cursor`.

        Raises:
            CursorExpired: results in between are no longer kept.
            Unavailable: the service stays away.
        """
        while True:
            page = await self.page(after, wait_s=wait_s)
            for result in page.results:
                yield result
            after = page.next

    async def follow(self, group_ids: Collection[str], after: int = 0) -> AsyncIterator[Result]:
        """The results of these groups, as they come, until all of them are complete.

        Args:
            group_ids: groups that were submitted.
            after: a cursor from before their submission; 0 is always early enough.

        Raises:
            NotFound: a group is not known, or a result of one is no longer kept.
            CursorExpired, Unavailable: as `results`.
        """
        missing = {job.id for name in group_ids for job in (await self.group(name)).jobs}
        while missing:
            page = await self.page(after, wait_s=20.0)
            for result in page.results:
                if result.job_id in missing:
                    missing.discard(result.job_id)
                    yield result
            after = page.next
            if not page.results and missing:  # recorded, and gone before it was read?
                await self._check_still_to_come(missing, after)

    async def _check_still_to_come(self, jobs: Collection[str], after: int) -> None:
        for group_id in {split_job_id(job)[0] for job in jobs}:
            for job in (await self.group(group_id)).jobs:
                if job.id in jobs and job.cursor is not None and job.cursor <= after:
                    raise NotFound(f"the result of {job.id!r} is no longer kept", hint="read sooner")

    async def submit_batch(self, batch: BatchRequest) -> BatchView:
        """Ask for a number of informative groups.

        Raises:
            InputError: the request is wrong; Conflict: the id is taken, or there is nothing to carry over.
            NotFound: there is no batch to carry from.
            Full, Unavailable: still so after the last try.
        """
        return await self._call(BatchView, "POST", "/v1/batches", json=batch.model_dump(mode="json"))

    async def append_tasks(
        self, batch_id: str, tasks: Sequence[BatchTask], *, first: int, more: bool = True
    ) -> BatchView:
        """Append tasks to a batch's stream.

        Args:
            first: index of the first one: the number of tasks so far.
            more: further ones will come.

        Raises:
            NotFound: no such batch; InputError: a task is wrong.
            Conflict: the stream has ended, or has other tasks at that index.
        """
        body = BatchTasks(first=first, tasks=list(tasks), more=more).model_dump(mode="json")
        return await self._call(BatchView, "POST", f"/v1/batches/{_segment(batch_id)}/tasks", json=body)

    async def batch(self, batch_id: str, *, wait_s: float = 0.0) -> BatchView:
        """How far a batch is; waits up to `wait_s` seconds until it is over, or waits for tasks.

        Raises:
            NotFound.
        """
        path, query = f"/v1/batches/{_segment(batch_id)}", {"wait_s": wait_s}
        return await self._call(BatchView, "GET", path, wait_s=wait_s, params=query)

    async def batches(self) -> list[BatchView]:
        """All batches that the service keeps, oldest first."""
        return (await self._call(BatchList, "GET", "/v1/batches")).batches

    async def cancel_batch(self, batch_id: str) -> BatchView:
        """End what is under way of a batch, and of one that is over what it left over.

        Raises:
            NotFound.
        """
        return await self._call(BatchView, "DELETE", f"/v1/batches/{_segment(batch_id)}")

    async def batch_groups(self, batch_id: str) -> SelectedGroups:
        """The informative groups of a batch so far. Raises: NotFound."""
        return await self._call(SelectedGroups, "GET", f"/v1/batches/{_segment(batch_id)}/groups")

    async def batch_results(
        self, batch_id: str, after: int = 0, *, wait_s: float = 20.0
    ) -> AsyncIterator[Result]:
        """Results of a batch's informative groups, group by group as these are decided, until it is over.

        Args:
            after: how many of them to leave out.

        Raises:
            NotFound: no such batch, or a result is no longer kept.
            Unavailable: the service stays away.
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

    async def environments(self) -> list[EnvironmentView]:
        return (await self._call(EnvironmentList, "GET", "/v1/environments")).environments

    async def model_servers(self) -> list[ModelServerView]:
        return (await self._call(ModelServerList, "GET", "/v1/model_servers")).servers

    async def add_model_server(self, url: str) -> list[ModelServerView]:
        """Raises: InputError."""
        return (await self._call(ModelServerList, "POST", "/v1/model_servers", json={"url": url})).servers

    async def remove_model_server(self, url: str) -> list[ModelServerView]:
        """Raises: NotFound."""
        answer = await self._call(ModelServerList, "DELETE", "/v1/model_servers", params={"url": url})
        return answer.servers

    async def _call[V: BaseModel](
        self, view: type[V], method: str, path: str, *, wait_s: float = 0.0, **options: Any
    ) -> V:
        for attempt in range(1, self._attempts + 1):
            try:
                return await self._once(view, method, path, wait_s, options)
            except (Full, Unavailable):
                if attempt == self._attempts:
                    raise
            await self._clock.sleep(self._pause_s * 2 ** (attempt - 1))
        raise AssertionError("attempts is at least 1")

    async def _once[V: BaseModel](
        self, view: type[V], method: str, path: str, wait_s: float, options: dict[str, Any]
    ) -> V:
        timeout = httpx.Timeout(self._timeout_s + wait_s)
        try:
            response = await self._http.request(method, path, timeout=timeout, **options)
        except httpx.TransportError as error:
            message = f"the rollout service at {self.url} does not answer: {type(error).__name__} {error}"
            raise Unavailable(message.strip(), hint="is it running there?") from error
        if not response.is_success:
            raise _error(response)
        # Parsing a page of long trajectories takes a while: not in the event loop.
        return await asyncio.to_thread(_parse, view, response)


def _parse[V: BaseModel](view: type[V], response: httpx.Response) -> V:
    try:
        return view.model_validate_json(response.content)
    except ValidationError as error:
        raise ServerFault(f"the answer is not a {view.__name__}", hint="do the versions match?") from error


def _error(response: httpx.Response) -> ProrlError:
    try:
        detail = ErrorBody.model_validate_json(response.content).error
    except ValidationError:
        return ServerFault(f"HTTP {response.status_code} without a typed error", hint="is this the service?")
    return from_wire(detail.type, detail.message, detail.hint)


def _segment(identifier: str) -> str:
    """An id as one segment of a path: `/` escaped, so that `a/../b` stays what it is."""
    return quote(identifier, safe="")
