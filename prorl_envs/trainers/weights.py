"""Handshake of a weight update: hold the turns, change the weights, announce the version, release the turns.

    async with weights_change(client, version=step):
        await push_weights_into_my_servers()

Within the block no turn starts, and no turn is in flight, unless the servers hold it (`keep`). Jobs continue
with everything else: sandboxes start, tools run, graders grade. A hold fails no job, and timeouts do not
count it. If the block fails, the weights of the servers are unknown. The turns then stay held, and the error
is raised: repeat the update in another block, or stop the service.
"""

import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from prorl_envs.errors import ProrlError
from prorl_envs.model.types import InFlight
from prorl_envs.rollout.client.client import RolloutClient
from prorl_envs.rollout.client.sync import SyncRolloutClient

#: Maximum seconds for which one request waits for turns in flight.
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
        version: version of the weights after the block. Staleness can only be computed from numbers.
        mode: handling of turns in flight. `finish` waits for them. `abort` stops them; they continue from
            their sampled tokens with the new weights. `keep` freezes them in the servers, if supported.
        resample: with `abort`, sample the stopped turns again from the start.
        timeout_s: timeout for turns in flight in seconds.

    Raises:
        WeightUpdateFailed: turns were still in flight after `timeout_s`, so the block did not run and the
            turns were released. Or a server failed to resume.
        Conflict: the service's model is not a set of servers.
    """
    await _hold(client, mode, resample, timeout_s)
    yield
    await _release(client, version)


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
    client.run(lambda inner: _hold(inner, mode, resample, timeout_s))
    yield
    client.run(lambda inner: _release(inner, version))


async def _hold(client: RolloutClient, mode: InFlight, resample: bool, timeout_s: float) -> None:
    """Hold the turns, and wait until the weights may change."""
    deadline = time.monotonic() + timeout_s
    try:
        view = await client.pause_model_servers(mode, resample=resample)
        while view.in_flight and not (
            mode == "keep" and all(ack.supported and not ack.problem for ack in view.acknowledgements)
        ):
            if time.monotonic() > deadline:
                raise WeightUpdateFailed(
                    f"{view.in_flight} turns are still in flight", hint="raise the timeout, or use mode abort"
                )
            view = await client.pause_model_servers(mode, resample=resample, wait_s=WAIT_S)
    except BaseException:  # the weights are unchanged
        await client.resume_model_servers()
        raise


async def _release(client: RolloutClient, version: int | str) -> None:
    """Announce the version, and release the turns. Raise WeightUpdateFailed if a server failed to resume."""
    view = await client.resume_model_servers(str(version))
    failed = [f"{ack.url}: {ack.problem}" for ack in view.acknowledgements if ack.problem]
    if failed:
        raise WeightUpdateFailed(f"not resumed: {'; '.join(failed)}", hint="is the server running?")
