"""The handshake of a weight update: hold the turns, change the weights, name them, let the turns go on.

    async with weights_change(client, version=step):
        await push_weights_into_my_servers()

Within the block no turn begins, and none is in flight (or, with `keep`, the servers hold those that are).
Jobs go on with everything else meanwhile: sandboxes start, tools run, graders grade. No job fails for being
held, and none loses time. Where the block fails nobody knows what weights the servers have, so the turns stay
held, and the error goes on: do the update again, in another block, or end the service.
"""

import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from prorl_envs.errors import ProrlError
from prorl_envs.policy.types import InFlight
from prorl_envs.rollout.client import RolloutClient
from prorl_envs.rollout.sync_client import SyncRolloutClient
from prorl_envs.rollout.views import PauseView

#: Seconds that one request waits for turns in flight.
WAIT_S = 20.0


class WeightUpdateFailed(ProrlError):
    """The turns could not be brought to a halt, or a server did not take the new version."""


@asynccontextmanager
async def weights_change(
    client: RolloutClient,
    version: int | str,
    *,
    mode: InFlight = "finish",
    resample: bool = False,
    timeout_s: float = 1800.0,
) -> AsyncIterator[None]:
    """Change the model servers' weights within the block.

    Args:
        client: of the service.
        version: of the weights that the servers have after the block. With numbers, staleness can be told.
        mode: what becomes of turns in flight: `finish` waits for them; `abort` ends them, and they go on
            from what was sampled with the new weights, or, with `resample`, anew; `keep` has the servers
            freeze them, those that can.
        timeout_s: seconds for turns in flight to end.

    Raises:
        WeightUpdateFailed: turns are still in flight after `timeout_s`, the weights were not touched and
            the turns go on; or a server was told to go on and failed.
        Conflict: the service's model is no set of servers.
    """
    end = time.monotonic() + timeout_s
    try:
        view = await client.pause_model_servers(mode, resample=resample)
        while not _still(view, mode):
            _check_time(view, end)
            view = await client.pause_model_servers(mode, resample=resample, wait_s=WAIT_S)
    except BaseException:  # the weights are as they were
        await client.resume_model_servers()
        raise
    yield
    _check_told(await client.resume_model_servers(str(version)))


@contextmanager
def weights_change_sync(
    client: SyncRolloutClient,
    version: int | str,
    *,
    mode: InFlight = "finish",
    resample: bool = False,
    timeout_s: float = 1800.0,
) -> Iterator[None]:
    """`weights_change` for trainers without an event loop."""
    end = time.monotonic() + timeout_s
    try:
        view = client.pause_model_servers(mode, resample=resample)
        while not _still(view, mode):
            _check_time(view, end)
            view = client.pause_model_servers(mode, resample=resample, wait_s=WAIT_S)
    except BaseException:  # the weights are as they were
        client.resume_model_servers()
        raise
    yield
    _check_told(client.resume_model_servers(str(version)))


def _still(view: PauseView, mode: InFlight) -> bool:
    """The weights may change."""
    frozen = mode == "keep" and all(told.supported and not told.problem for told in view.told)
    return frozen or view.in_flight == 0


def _check_time(view: PauseView, end: float) -> None:
    """Raises: WeightUpdateFailed: it is later than `end`."""
    if time.monotonic() > end:
        raise WeightUpdateFailed(
            f"{view.in_flight} turns are still in flight", hint="wait longer, or end them with mode abort"
        )


def _check_told(view: PauseView) -> None:
    """Raises: WeightUpdateFailed: a server was told to go on, and that failed."""
    failed = [f"{told.url}: {told.problem}" for told in view.told if told.problem]
    if failed:
        raise WeightUpdateFailed(f"not told to go on: {'; '.join(failed)}", hint="is the server there?")
