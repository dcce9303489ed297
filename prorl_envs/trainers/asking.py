"""What every adapter asks the rollout service for: groups of one environment, their results, and the end of
those that nobody needs any more."""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from prorl_envs.errors import ProrlError
from prorl_envs.policy.types import Sampling
from prorl_envs.rollout.client import RolloutClient
from prorl_envs.rollout.sync_client import SyncRolloutClient
from prorl_envs.rollout.types import AgentLimits, GroupRequest, Result

#: The service's bearer token, where it has one: in the environment, so that it is in no file or log.
TOKEN = "PRORL_SERVER__TOKEN"
#: Groups of one request. A service takes 16 MiB at once, and task rows may be long.
CHUNK = 32


@dataclass(frozen=True, slots=True)
class Asking:
    """What a trainer's groups have in common.

    Args:
        url: base URL of the service. Its token is read from `$PRORL_SERVER__TOKEN`.
        environment: the service's environment that the tasks are of.
        sampling: how to sample; None leaves it to the adapter, or to the service.
        limits: of the agent loop; None is what the service has for the environment.
        run: begins the ids of all groups, so that two runs never meet.
    """

    url: str
    environment: str
    sampling: Sampling | None = None
    limits: AgentLimits | None = None
    run: str = field(default_factory=lambda: f"run-{uuid4().hex[:12]}")

    def group(
        self,
        name: str,
        task: Mapping[str, Any],
        samples: int,
        *,
        sampling: Sampling | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> GroupRequest:
        """A group called `<run>/<name>`; `sampling` where these have none of their own."""
        chosen = {"sampling": self.sampling or sampling, "limits": self.limits}
        return GroupRequest(
            id=f"{self.run}/{name}",
            environment=self.environment,
            task=dict(task),
            samples=samples,
            metadata=dict(metadata or {}),
            **{key: value for key, value in chosen.items() if value is not None},  # type: ignore[arg-type]
        )


def connect(url: str) -> RolloutClient:
    """A client of the service at `url`, with the token of the environment."""
    return RolloutClient(url, token=os.environ.get(TOKEN))


def connect_sync(url: str) -> SyncRolloutClient:
    """A client of the service at `url` for threads without an event loop."""
    return SyncRolloutClient(url, token=os.environ.get(TOKEN))


def collect(client: SyncRolloutClient, groups: Sequence[GroupRequest]) -> list[list[Result]]:
    """Submit groups and wait for all of their results. Where that ends early, they are cancelled.

    Returns:
        for each group the results of its samples, in their order.

    Raises:
        InputError: the service refuses a group.
        Full, Unavailable: the service is full or away, and stays so.
    """
    after = client.status().newest
    results: dict[str, dict[int, Result]] = {group.id: {} for group in groups}
    with cancelled_on_error(client, list(results)):
        for first in range(0, len(groups), CHUNK):
            client.submit(groups[first : first + CHUNK])
        for result in client.follow(list(results), after):
            results[result.group_id][result.sample] = result
    return [[samples[sample] for sample in sorted(samples)] for samples in results.values()]


@contextmanager
def cancelled_on_error(client: SyncRolloutClient, group_ids: Sequence[str]) -> Iterator[None]:
    """Cancel these groups where the block fails or is interrupted."""
    try:
        yield
    except BaseException:
        for group_id in group_ids:
            with contextlib.suppress(ProrlError):  # not submitted yet, or the service is away
                client.cancel_group(group_id)
        raise
