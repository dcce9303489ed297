"""The synchronous client: all methods of the asynchronous client, from a thread without an event loop."""

import asyncio
import inspect
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from prorl_envs.config import ServerSettings
from prorl_envs.rollout.api.errors import NotFound, Unavailable
from prorl_envs.rollout.api.interactive import AgentStep, EpisodeRequest
from prorl_envs.rollout.api.types import GroupRequest, Selection
from prorl_envs.rollout.client.client import RolloutClient
from prorl_envs.rollout.client.sync import SyncRolloutClient
from prorl_envs.rollout.http.app import create_app
from prorl_envs.rollout.http.server import answering

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def over_tcp(bench: Any) -> AsyncIterator[str]:
    async with answering(create_app(bench.service, ServerSettings()), last_requests_s=1) as url:
        yield url


def test_the_synchronous_client_has_every_method_with_the_same_docstring() -> None:
    for name, method in inspect.getmembers(RolloutClient, inspect.isfunction):
        if not name.startswith("_") and name != "aclose":
            assert inspect.getdoc(getattr(SyncRolloutClient, name)) == inspect.getdoc(method), name


async def test_groups_and_results_from_a_thread_without_a_loop(bench: Any) -> None:
    def work(url: str) -> None:
        with SyncRolloutClient(url) as client:
            task = {"id": "t", "instruction": "do"}
            views = client.submit(
                [GroupRequest(id=f"g{i}", environment="toy", task=task, samples=2) for i in range(3)]
            )
            names = [view.id for view in views]
            assert len({result.job_id for result in client.follow(names)}) == 6
            assert client.group("g0", wait_s=5).complete
            page = client.page(only=Selection(groups=frozenset({"g1"})))
            assert [result.group_id for result in page.results] == ["g1", "g1"]
            with pytest.raises(NotFound):
                client.job("none/0")
            client.start_episode(EpisodeRequest(id="e", environment="toy", task=task))
            client.run_episode("e", AgentStep(agent=True))
            result = client.evaluate_episode("e").result
            assert result is not None and result.reward == 1.0
            assert client.drain(wait_s=1).state == "draining"
        client.close()
        with pytest.raises(RuntimeError, match="closed"):
            client.status()

    async with over_tcp(bench) as url:
        await asyncio.to_thread(work, url)
    assert not [thread for thread in threading.enumerate() if thread.name == "rollout-client"]


async def test_the_synchronous_client_works_beside_a_running_loop(bench: Any) -> None:
    async with over_tcp(bench) as url:
        with SyncRolloutClient(url) as client:  # its constructor blocks this loop for a moment
            status = await asyncio.to_thread(client.status)
        assert status.state == "serving"


def test_an_absent_service_is_unavailable() -> None:
    with (
        SyncRolloutClient("http://127.0.0.1:9", attempts=2, pause_s=0.01) as client,
        pytest.raises(Unavailable),
    ):
        client.status()


def test_wrong_options_leave_no_thread() -> None:
    with pytest.raises(TypeError):
        SyncRolloutClient("http://127.0.0.1:9", no_such_option=1)
    assert not [thread for thread in threading.enumerate() if thread.name == "rollout-client"]


FOLLOWING = """\
import sys
from prorl_envs.rollout.client.sync import SyncRolloutClient
from prorl_envs.rollout.api.types import GroupRequest

with SyncRolloutClient(sys.argv[1]) as client:
    client.pause()
    client.submit([GroupRequest(id="g", environment="toy", task={"id": "t", "instruction": "do"})])
    print("following", flush=True)
    try:
        next(client.follow(["g"]))
    except KeyboardInterrupt:
        print("interrupted", client.group("g").complete)
"""


async def test_an_interrupted_stream_stops_and_the_client_stays_usable(bench: Any) -> None:
    async with over_tcp(bench) as url:
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", FOLLOWING, url, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert child.stdout is not None
        assert await child.stdout.readline() == b"following\n"
        await asyncio.sleep(0.2)  # an interrupt may also come before the first await
        child.send_signal(signal.SIGINT)
        output, errors = await child.communicate()
    assert (output, errors) == (b"interrupted False\n", b"")
