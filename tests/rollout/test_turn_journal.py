"""Jobs that go on after a failure: no turn is sampled twice."""

import asyncio
import random
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from prorl_envs.env.registry import environments
from prorl_envs.errors import SandboxError
from prorl_envs.model.tokens.rendering import TemplateRenderer
from prorl_envs.rollout.api.types import AgentLimits, GroupRequest, Result
from prorl_envs.rollout.client.client import RolloutClient
from prorl_envs.rollout.store.sqlite import SqliteStore
from prorl_envs.testing.scripted import ScriptBook
from prorl_envs.tools.types import ToolCall, ToolResult
from tests.rollout.killed import free_port, sandboxes_gone, service
from tests.support.audit import AuditCounts
from tests.support.leaks import OpenResources
from tests.support.rollout_site import RANDOM_TASK, TURNS, Site, running
from tests.support.timed_server import TimedServer

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("run_dir")]

#: Size of the thorough test. The acceptance of this feature ran it with 200 episodes.
EPISODES, LENGTH, KILLS = 12, 30, 4

LONG_TASK = {
    "id": "long",
    "instruction": f"Write 1 to {LENGTH - 1} to log, one by one.",
    "checks": [{"type": "file_equals", "path": "log", "text": "".join(f"{n}\n" for n in range(1, LENGTH))}],
}
LONG_BOOK = ScriptBook.from_tapes(
    {
        str(LONG_TASK["instruction"]): [
            *([{"tool": "bash", "arguments": {"command": f"echo {n} >> log"}}] for n in range(1, LENGTH)),
            [{"tool": "finish", "arguments": {}}],
        ]
    }
)


def fragile(command: str, failures: int) -> Any:
    """Environment whose sandbox breaks at a command, in the first attempts of a job."""
    left = iter([SandboxError("it broke")] * failures)

    class Fragile(environments()["bash"]):  # type: ignore[misc]
        async def call(self, call: ToolCall, *, timeout_s: float | None = None) -> ToolResult:
            if call.arguments.get("command") == command and (failure := next(left, None)):
                raise failure
            result: ToolResult = await super().call(call, timeout_s=timeout_s)
            return result

    return Fragile


def check(results: Iterable[Result], turns: int) -> None:
    """Check that all results are right, and as if nothing had failed."""
    for result in results:
        row = result.trajectory
        assert result.reward == 1 and not result.mask_sample
        assert row is not None and len(row.turns) == turns and row.drift == 0 and row.token_exact
        assert sum(row.loss_mask) == sum(turn.end - turn.start for turn in row.turns)
        assert all(turn.server and turn.finish_reason == "stop" for turn in row.turns)


@pytest.mark.parametrize("nodes", [(), ("one", "two")], ids=["head", "nodes"])
async def test_a_job_whose_sandbox_breaks_samples_no_turn_again(
    renderer: TemplateRenderer, tmp_path: Path, nodes: tuple[str, ...]
) -> None:
    fields: dict[str, Any] = {"attempts": 3, "fragile": fragile(TURNS[2], 2)}
    async with running(renderer, tmp_path, nodes=nodes, **fields) as site:
        results = await site.run(samples=2, branch_at=0, environment="fragile")
        assert sum(result.attempts for result in results) == 2 + 2
        check(results, 4)
        assert site.server.counts.requests == 2 * 4
        assert await turns_stored(site) == 0
        await site.idle()


async def test_results_that_differ_are_answered_anew(renderer: TemplateRenderer, tmp_path: Path) -> None:
    broken = fragile("echo 6 > total.txt", 1)
    async with running(renderer, tmp_path, fragile=broken) as site:
        results = await site.run(samples=1, branch_at=0, environment="fragile", task=RANDOM_TASK)
        check(results, 4)
        # The first two turns are kept. The third was sampled with another random number.
        assert site.server.counts.requests == 3 + 2


async def test_a_job_whose_node_is_lost_goes_on_at_another(
    renderer: TemplateRenderer, tmp_path: Path
) -> None:
    async with running(renderer, tmp_path, nodes=("one", "two"), tokens_per_s=200.0) as site:
        group = asyncio.create_task(site.run(samples=4, branch_at=0))
        await site.server.until(partial(_asked, 8))
        await site.nodes["one"].cut()
        results = await group
        check(results, 4)
        assert any(result.attempts == 2 for result in results)
        counts = site.server.counts
        assert counts.violations == counts.restarts == 0
        assert counts.requests <= 4 * 4 + 2, "only the turns in progress, of two jobs, are sampled again"


async def test_a_restarted_service_goes_on(renderer: TemplateRenderer, tmp_path: Path) -> None:
    requests = 0
    for last in (False, True):
        store = SqliteStore(tmp_path / "store.db")
        async with running(renderer, tmp_path, tokens_per_s=200.0, store=store) as site:
            if not last:
                await site.client.submit([site.group(samples=3, branch_at=0)])
                await site.server.until(partial(_asked, 7))
            else:
                check([result async for result in site.client.follow(["g"])], 4)
                assert await turns_stored(site) == 0
            requests += site.server.counts.requests
        await store.aclose()
    assert requests <= 3 * 4 + 3, "only the turns in progress are sampled again"


async def turns_stored(site: Site) -> int:
    store = site.service.store
    return int(await store._read(lambda: store._view.execute("SELECT count(*) FROM turns").fetchone()[0]))


@pytest.mark.thorough
async def test_a_repeatedly_killed_service_keeps_every_finished_turn(
    renderer: TemplateRenderer, run_dir: Path, tmp_path: Path
) -> None:
    """With a real process and a real SIGKILL."""
    chance, port = random.Random(5), free_port()
    group = GroupRequest.model_validate(
        {"id": "g", "environment": "bash", "task": LONG_TASK, "samples": EPISODES}
        | {"limits": AgentLimits(max_turns=LENGTH)}
    )
    async with (
        TimedServer(LONG_BOOK, mix="solve=1", renderer=renderer, tokens_per_s=500.0) as model,
        RolloutClient(f"http://127.0.0.1:{port}", attempts=2000, max_pause_s=0.2) as client,
    ):
        before = OpenResources.now(run_dir).processes.keys()
        submitting = asyncio.create_task(client.submit([group]))
        for _ in range(KILLS):
            target = model.counts.requests + chance.randrange(20, EPISODES * LENGTH // KILLS)
            with service(model.url, port, tmp_path) as process:
                await submitting
                await model.until(partial(_asked, target))
                process.kill()
            await sandboxes_gone(run_dir, before)
        with service(model.url, port, tmp_path) as process:
            results = [result async for result in client.follow(["g"])]
            process.terminate()
        counts = model.counts
    assert sorted(result.sample for result in results) == list(range(EPISODES))
    check(results, LENGTH)
    assert counts.violations == counts.restarts == 0
    # A kill loses turns in progress, and those of the last 0.05 s, of at most four jobs in RUN.
    assert counts.requests - EPISODES * LENGTH <= 3 * 4 * KILLS


def _asked(target: int, counts: AuditCounts) -> bool:
    return counts.requests >= target
