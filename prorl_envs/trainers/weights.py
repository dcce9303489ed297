"""Handshake of a weight update: hold the turns, change the weights, announce them, release the turns.

    async with weights_change(client, version=step):
        await push_weights_into_my_servers()

Within the block no turn starts, and none is in flight (or, with `keep`, the servers hold those that are).
Jobs continue with everything else meanwhile: sandboxes start, tools run, graders grade. Holding fails no job
and counts for no timeout. If the block fails, the weights of the servers are unknown, so the turns stay held,
and the error is raised: repeat the update in another block, or stop the service.
"""

import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from prorl_envs.errors import ProrlError
from prorl_envs.model.types import InFlight
from prorl_envs.rollout.api.views import PauseView
from prorl_envs.rollout.client.client import RolloutClient
from prorl_envs.rollout.client.sync import SyncRolloutClient

#: Longest wait of one request for turns in flight, in seconds.
WAIT_S = 20.0


class WeightUpdateFailed(ProrlError):
    """Error: turns stayed in flight, or a server did not accept the new version."""


@asynccontextmanager
async def weights_change(
    client: RolloutClient,
    version: int | str,
    *,
    mode: InFlight = "finish",
    resample: bool = False,
    timeout_s: float = 1800.0,
) -> AsyncIterator[None]:
    """Hold the turns while the block changes the model servers' weights.

    Args:
        client: client of the service.
        version: version of the weights after the block. Only numbers allow staleness to be computed.
        mode: treatment of turns in flight: `finish` waits for them; `abort` stops them, and they resume from
            their sampled tokens with the new weights, or, with `resample`, start anew; `keep` has the servers
            freeze them, if supported.
        timeout_s: timeout for turns in flight, in seconds.

    Raises:
        WeightUpdateFailed: turns are still in flight after `timeout_s`; the weights are unchanged and the
            turns are released. Or a server failed to resume.
        Conflict: the service's model is not a set of servers.
    """
    end = time.monotonic() + timeout_s
    try:
        view = await client.pause_model_servers(mode, resample=resample)
        while not _still(view, mode):
            _check_time(view, end)
            view = await client.pause_model_servers(mode, resample=resample, wait_s=WAIT_S)
    except BaseException:  # the weights are unchanged
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
    """Hold the turns like `weights_change`, for trainers without an event loop."""
    end = time.monotonic() + timeout_s
    try:
        view = client.pause_model_servers(mode, resample=resample)
        while not _still(view, mode):
            _check_time(view, end)
            view = client.pause_model_servers(mode, resample=resample, wait_s=WAIT_S)
    except BaseException:  # the weights are unchanged
        client.resume_model_servers()
        raise
    yield
    _check_told(client.resume_model_servers(str(version)))


def _still(view: PauseView, mode: InFlight) -> bool:
    """Return true if the weights may change."""
    frozen = mode == "keep" and all(told.supported and not told.problem for told in view.acknowledgements)
    return frozen or view.in_flight == 0


def _check_time(view: PauseView, end: float) -> None:
    """Raise WeightUpdateFailed if it is later than `end`."""
    if time.monotonic() > end:
        raise WeightUpdateFailed(
            f"{view.in_flight} turns are still in flight", hint="wait longer, or end them with mode abort"
        )


def _check_told(view: PauseView) -> None:
    """Raise WeightUpdateFailed if a server failed to resume."""
    failed = [f"{told.url}: {told.problem}" for told in view.acknowledgements if told.problem]
    if failed:
        raise WeightUpdateFailed(f"not resumed: {'; '.join(failed)}", hint="is the server there?")
