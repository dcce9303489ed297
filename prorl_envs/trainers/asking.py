"""Requests of trainer adapters to the rollout service: groups of one environment, their results, and the
cancellation of groups that are no longer needed."""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
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

#: Environment variable of the service's bearer token, so that the token is in no file or log.
TOKEN = "PRORL_SERVER__TOKEN"
#: Environment variable of the groups' lease, in seconds.
LEASE = "PRORL_LEASE_S"
#: Adapters that read all results poll each group twice in this time.
MIN_LEASE_S = 60.0
#: Groups per request. A service accepts at most 16 MiB, and task rows may be long.
CHUNK = 32


@dataclass(frozen=True, slots=True)
class GroupTemplate:
    """Common properties of a trainer's groups.

    Args:
        url: base URL of the service. Its token is read from `$PRORL_SERVER__TOKEN`.
        environment: the service's environment that the tasks are of.
        sampling: sampling parameters; None leaves them to the adapter, or to the service.
        limits: limits of the agent loop; None uses the service's limits for the environment.
        run: prefix of all group ids, so that ids of two runs never collide.
        lease_s: lease of each group: it is cancelled after this many seconds without a sign of this process,
            60 or more. By default `$PRORL_LEASE_S`; None means no lease.
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
        """Return the request for a group called `<run>/<name>`; `sampling` applies if the template has
        none."""
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


def _lease() -> float | None:
    """Return the lease of the environment variable, in seconds.

    Raises:
        InputError: not a number of seconds, or too short for the adapters' polling.
    """
    given = os.environ.get(LEASE)
    if not given:
        return None
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not MIN_LEASE_S <= seconds <= 86_400:
        raise InputError(
            f"{LEASE} is {given[:40]!r}", hint=f"seconds, {MIN_LEASE_S:g} to 86400; leave it out for no lease"
        )
    return seconds


def connect(url: str) -> RolloutClient:
    """Open a client of the service at `url`, with the token of the environment."""
    return RolloutClient(url, token=os.environ.get(TOKEN))


def connect_sync(url: str) -> SyncRolloutClient:
    """Open a client of the service at `url` for threads without an event loop."""
    return SyncRolloutClient(url, token=os.environ.get(TOKEN))


def collect(client: SyncRolloutClient, groups: Sequence[GroupRequest]) -> list[list[Result]]:
    """Submit groups and wait for all of their results. The groups are cancelled if the wait stops early.

    Returns:
        for each group the results of its samples, in their order.

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
    """Collect as many groups with differing rewards as there are in `groups`. Groups of the tasks in reserve
    replace those with equal rewards; if the reserve does not suffice, groups with equal rewards fill up.

    Args:
        name: name of the resulting batch at the service.
        groups: at least one, alike but for their tasks.

    Returns:
        for each group the results of its samples, in their order: informative ones first.

    Raises:
        InputError: the groups differ in more than their tasks, or the service refuses them.
        QueueFull, Unavailable: the service stays full or unreachable.
    """
    one = groups[0]
    if any(group != one.model_copy(update={"id": group.id, "task": group.task}) for group in groups):
        raise InputError("the groups of a batch are alike", hint="ask for as many samples of each task")
    rows = [*(group.task for group in groups), *reserve]
    batch = BatchRequest(
        id=name,
        environment=one.environment,
        tasks=[BatchTask(task=dict(row)) for row in rows],
        groups=len(groups),
        samples=one.samples,
        sampling=one.sampling,
        limits=one.limits,
        lease_s=one.lease_s,
        metadata=one.metadata,
    )
    after = client.status().newest_cursor
    try:
        client.submit_batch(batch)
        while not (view := client.batch(name, wait_s=60.0)).state.over:
            pass
    except BaseException:
        with contextlib.suppress(ProrlError):  # it was not submitted, or the service is unreachable
            client.cancel_batch(name)
        raise
    informative = client.batch_groups(name).groups
    chosen = [group.group_id for group in informative]
    begun = [f"{name}/{index}" for index in range(view.started)]
    chosen += [group for group in begun if group not in chosen][: len(groups) - len(chosen)]
    results = {result.job_id: result for result in client.follow(chosen, after)}
    read = sum(len(group.job_ids) for group in informative)
    for _ in client.batch_results(name, read):  # none is left: the batch and its other groups are read
        pass
    return [[results[job_id(group, sample)] for sample in range(one.samples)] for group in chosen]


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
