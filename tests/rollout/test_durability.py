"""A service that is killed outright, again and again: nothing lost, nothing twice, nothing left behind."""

import asyncio
import os
import random
import socket
import subprocess
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

import prorl_envs
from prorl_envs.policy.rendering import TemplateRenderer
from prorl_envs.rollout.client import RolloutClient
from prorl_envs.rollout.types import AgentLimits, GroupRequest, Result
from prorl_envs.testing.audit import Counts
from prorl_envs.testing.leaks import Holdings
from prorl_envs.testing.scripted import Mix
from prorl_envs.testing.server import ScriptedServer
from tests.rollout.test_end_to_end import BOOK, TASK

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

#: `prorl-envs serve --llm MODEL --port PORT --store FILE`, with the built-in tokenizer.
SERVE = """
import asyncio, sys
from pathlib import Path
from prorl_envs.cli.compose import Model
from prorl_envs.cli.serving import serve
from prorl_envs.config import ServerSettings, ServiceSettings, Settings
from prorl_envs.testing.tokenizer import builtin_renderer

model, port, store, cache = sys.argv[1:]
settings = Settings(
    service=ServiceSettings(init=2, run=4, eval=2, drain_s=0, store=Path(store)),
    server=ServerSettings(port=int(port)),
    cache_dir=Path(cache),
)
asyncio.run(serve(settings, Model(servers=[model], renderer=builtin_renderer())))
"""
GROUPS, SAMPLES, KILLS = 12, 4, 6


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def service(model: str, port: int, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A service in a process of its own. Who enters ends it; here it is only waited for."""
    arguments = [model, str(port), str(folder / "store.db"), str(folder / "cache")]
    environ = {**os.environ, "PYTHONPATH": str(Path(prorl_envs.__file__).parents[1])}
    with (
        (folder / "service.log").open("ab") as log,
        subprocess.Popen([sys.executable, "-c", SERVE, *arguments], env=environ, stderr=log) as process,
    ):
        try:
            yield process
        except BaseException:
            process.kill()
            raise


def requests() -> list[GroupRequest]:
    limits = AgentLimits(max_turns=8)
    return [
        GroupRequest(id=f"g{i}", environment="bash", task=TASK, samples=SAMPLES, limits=limits)
        for i in range(GROUPS)
    ]


async def submit_all(client: RolloutClient) -> None:
    """Each group twice, as a caller does who did not hear the first answer."""
    for group in requests():
        await asyncio.gather(client.submit([group]), client.submit([group]))


async def read_all(client: RolloutClient) -> list[Result]:
    """Every result from the first cursor on, by a reader that knows nothing of the kills."""
    read: list[Result] = []
    async for result in client.results():
        read.append(result)
        if len(read) == GROUPS * SAMPLES:
            break
    return read


async def follow_two(client: RolloutClient) -> list[Result]:
    await client.submit(requests()[:2])
    return [result async for result in client.follow(["g0", "g1"])]


async def sandboxes_gone(run_dir: Path, before: Collection[object]) -> None:
    """Return once no process is there that was not there `before`. The test's own timeout bounds this."""
    while Holdings.now(run_dir).processes.keys() - before:  # noqa: ASYNC110 - other processes have no event
        await asyncio.sleep(0)


async def test_a_killed_service_loses_nothing_and_gives_nothing_twice(
    renderer: TemplateRenderer, run_dir: Path, tmp_path: Path
) -> None:
    chance, port = random.Random(11), free_port()
    async with (
        ScriptedServer(BOOK, mix=Mix.parse("solve=2,wrong=1,loop=1"), renderer=renderer) as model,
        RolloutClient(f"http://127.0.0.1:{port}", attempts=14) as client,
    ):
        before = Holdings.now(run_dir).processes.keys()
        callers = asyncio.gather(submit_all(client), read_all(client), follow_two(client))
        for _ in range(KILLS):
            target = model.counts.requests + chance.randrange(25)
            with service(model.url, port, tmp_path) as process:
                await model.until(partial(_asked, target))
                process.kill()
            await sandboxes_gone(run_dir, before)
        with service(model.url, port, tmp_path) as process:
            _, read, followed = await callers
            kept = (await client.page(0, limit=1000)).results
            assert (await client.status()).unfinished == 0
            process.terminate()
        assert process.returncode == 0
        assert model.counts.violations == 0
    assert [result.cursor for result in read] == list(range(1, GROUPS * SAMPLES + 1))
    assert {result.job_id for result in read} == {
        f"{group.id}/{sample}" for group in requests() for sample in range(SAMPLES)
    }
    assert read == kept, "a result is never written again"
    assert followed == [result for result in read if result.group_id in ("g0", "g1")]
    assert [result.failure for result in read if result.failure] == []
    assert any(result.attempts > 1 for result in read), "some were under way when the service was killed"
    assert max(result.attempts for result in read) <= KILLS + 1


def _asked(target: int, counts: Counts) -> bool:
    return counts.requests >= target
