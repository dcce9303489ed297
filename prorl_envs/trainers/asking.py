"""Requests of trainer adapters to the rollout service: submission of groups, collection of their results, and
cancellation of groups that are no longer needed."""

import asyncio
import contextlib
import os
import random
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from prorl_envs.errors import InputError, ProrlError
from prorl_envs.model.types import Sampling
from prorl_envs.rollout.api.batches import BatchRequest, BatchTask
from prorl_envs.rollout.api.types import AgentLimits, GroupRequest, Result, job_id
from prorl_envs.rollout.client.client import RolloutClient
from prorl_envs.rollout.client.sync import SyncRolloutClient

#: Environment variable with the service's bearer token, so that no file or log contains the token.
TOKEN = "PRORL_SERVER__TOKEN"
#: Environment variable with the lease of groups in seconds.
LEASE = "PRORL_LEASE_S"
#: Minimum lease: adapters request the state of each group twice in this time.
MIN_LEASE_S = 60.0
#: Number of groups per request. A service accepts at most 16 MiB, and task rows may be long.
CHUNK = 32


@dataclass(frozen=True, slots=True)
class GroupTemplate:
    """Common properties of a trainer's groups.

    Args:
        url: base URL of the service. Its token is read from `$PRORL_SERVER__TOKEN`.
        environment: name of the tasks' environment at the service.
        sampling: sampling parameters; None uses those of the adapter, or of the service.
        limits: limits of the agent loop; None uses the service's limits for the environment.
        run: prefix of all group ids, so that ids of two runs never collide.
        lease_s: seconds without a request of this process after which a group is cancelled, at least 60. The
            default is `$PRORL_LEASE_S`; None means no lease.
    """

    url: str
    environment: str
    sampling: Sampling | None = None
    limits: AgentLimits | None = None
    run: str = field(default_factory=lambda: f"run-{uuid4().hex[:12]}")
    lease_s: float | None = field(default_factory=lambda: _lease())

    def group(
        self,
        name: str,
        task: Mapping[str, Any],
        samples: int,
        *,
        sampling: Sampling | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> GroupRequest:
        """Return the request for a group with the id `<run>/<name>`. `sampling` applies if the template has
        no sampling parameters."""
        chosen = {"sampling": self.sampling or sampling, "limits": self.limits}
        return GroupRequest(
            id=f"{self.run}/{name}",
            environment=self.environment,
            task=dict(task),
            samples=samples,
            lease_s=self.lease_s,
            metadata=dict(metadata or {}),
            **{key: value for key, value in chosen.items() if value is not None},  # type: ignore[arg-type]
        )


def sampling_of(params: Mapping[str, Any]) -> Sampling:
    """Convert a trainer's sampling parameters, which have the names of vLLM or SGLang; others are ignored.

    Raises:
        InputError: `top_p` is 0.
    """
    names = {"temperature": "temperature", "top_p": "top_p"}
    names |= {"max_tokens": "max_tokens", "max_new_tokens": "max_tokens"}
    chosen = {mine: params[theirs] for theirs, mine in names.items() if params.get(theirs) is not None}
    if chosen.get("top_p") == 0:
        raise InputError("top_p is 0", hint="top_p is a share of the probability: 1 allows all tokens")
    return Sampling(**chosen)


def _lease() -> float | None:
    """Return the lease in the environment variable `LEASE`, in seconds.

    Raises:
        InputError: the value is not a number of seconds, or out of range.
    """
    text = os.environ.get(LEASE)
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not MIN_LEASE_S <= seconds <= 86_400:
        raise InputError(
            f"{LEASE} is {text[:40]!r}", hint=f"seconds, {MIN_LEASE_S:g} to 86400; unset it for no lease"
        )
    return seconds


def connect(url: str) -> RolloutClient:
    """Open a client of the service at `url`, with the token in the environment variable `TOKEN`."""
    return RolloutClient(url, token=os.environ.get(TOKEN))


def connect_sync(url: str) -> SyncRolloutClient:
    """Open a client like `connect`, for threads without an event loop."""
    return SyncRolloutClient(url, token=os.environ.get(TOKEN))


def collect(client: SyncRolloutClient, groups: Sequence[GroupRequest]) -> list[list[Result]]:
    """Submit groups and wait for all of their results. If the wait stops early, the groups are cancelled.

    Returns:
        For each group, the results of its samples in order.

    Raises:
        InputError: the service refuses a group.
        QueueFull, Unavailable: the service stays full or unreachable.
    """
    after = client.status().newest_cursor
    results: dict[str, dict[int, Result]] = {group.id: {} for group in groups}
    with cancelled_on_error(client, list(results)):
        for first in range(0, len(groups), CHUNK):
            client.submit(groups[first : first + CHUNK])
        for result in client.follow(list(results), after):
            results[result.group_id][result.sample] = result
    return [[samples[sample] for sample in sorted(samples)] for samples in results.values()]


def collect_informative(
    client: SyncRolloutClient,
    name: str,
    groups: Sequence[GroupRequest],
    reserve: Sequence[Mapping[str, Any]],
) -> list[list[Result]]:
    """Collect as many groups with differing rewards as there are in `groups`. Groups of tasks in `reserve`
    replace groups with equal rewards. If there are not enough, groups with equal rewards are returned too.

    Args:
        client: client of the service.
        name: id of the batch at the service.
        groups: at least one request. All must be equal except for their tasks and ids.
        reserve: further task rows.

    Returns:
        For each group, the results of its samples in order. Informative groups come first.

    Raises:
        InputError: the groups differ otherwise, or the service refuses them.
        QueueFull, Unavailable: the service stays full or unreachable.
    """
    first_group = groups[0]
    if any(group != first_group.model_copy(update={"id": group.id, "task": group.task}) for group in groups):
        raise InputError("the groups of a batch differ", hint="request the same number of samples per task")
    rows = [*(group.task for group in groups), *reserve]
    batch = BatchRequest(
        id=name,
        environment=first_group.environment,
        tasks=[BatchTask(task=dict(row)) for row in rows],
        groups=len(groups),
        samples=first_group.samples,
        sampling=first_group.sampling,
        limits=first_group.limits,
        lease_s=first_group.lease_s,
        metadata=first_group.metadata,
    )
    after = client.status().newest_cursor
    try:
        client.submit_batch(batch)
        while not (view := client.batch(name, wait_s=60.0)).state.over:
            pass
    except BaseException:
        with contextlib.suppress(ProrlError):  # the batch was not submitted, or the service is unreachable
            client.cancel_batch(name)
        raise
    informative = client.batch_groups(name).groups
    chosen = [group.group_id for group in informative]
    started = [f"{name}/{index}" for index in range(view.started)]
    chosen += [group for group in started if group not in chosen][: len(groups) - len(chosen)]
    results = {result.job_id: result for result in client.follow(chosen, after)}
    read = sum(len(group.job_ids) for group in informative)
    # There are no further results. This request marks the batch, with its other groups, as read.
    for _ in client.batch_results(name, read):
        pass
    return [[results[job_id(group, sample)] for sample in range(first_group.samples)] for group in chosen]


@contextmanager
def cancelled_on_error(client: SyncRolloutClient, group_ids: Sequence[str]) -> Iterator[None]:
    """Cancel these groups if the block fails or is interrupted."""
    try:
        yield
    except BaseException:
        for group_id in group_ids:
            with contextlib.suppress(ProrlError):  # not submitted yet, or the service is unreachable
                client.cancel_group(group_id)
        raise


def shuffled(tasks: Sequence[Mapping[str, Any]], seed: int = 0) -> Iterator[Mapping[str, Any]]:
    """Yield tasks without end, each time in a new random order."""
    order = random.Random(seed)
    while True:
        yield from order.sample(list(tasks), len(tasks))


async def keep_in_flight(
    start: Callable[[], asyncio.Task[None] | None],
    must_wait: Callable[[int], Awaitable[bool]],
    tick_s: float,
) -> None:
    """Keep tasks in flight. If one fails, or this call stops, all others are cancelled.

    Args:
        start: starts the next task, which its caller may cancel; None ends this call.
        must_wait: returns True while no task may start; called with the number of those in flight.
        tick_s: seconds between two calls of `must_wait`, less if a task ends.
    """
    in_flight: set[asyncio.Task[None]] = set()
    try:
        while True:
            while await must_wait(len(in_flight)):
                if not in_flight:
                    await asyncio.sleep(tick_s)
                    continue
                done, in_flight = await asyncio.wait(
                    in_flight, timeout=tick_s, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    if not task.cancelled():
                        task.result()
            if (started := start()) is None:
                return
            in_flight.add(started)
    finally:
        for task in in_flight:
            task.cancel()
        if in_flight:
            await asyncio.wait(in_flight)
