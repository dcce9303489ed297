"""Groups whose samples share their first turns."""

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from prorl_envs.env.registry import environments
from prorl_envs.errors import InputError, SandboxError
from prorl_envs.model.tokens.rendering import TemplateRenderer
from prorl_envs.rollout.api.errors import NotFound
from prorl_envs.rollout.api.types import BranchRequest, GroupRequest, JobState, Result, Stage, StopReason
from prorl_envs.rollout.client.token_files import LocalToken
from prorl_envs.tools.types import ToolCall, ToolResult
from tests.docs.blocks import BLOCKS
from tests.support.rollout_site import RANDOM_TASK, TASK, TURNS, running

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("run_dir")]


def check_branches(results: Sequence[Result]) -> None:
    """Check that the samples after the first one continue its second turn."""
    trunk, *branches = results
    assert trunk.trajectory is not None and trunk.branch is None
    assert trunk.trajectory.shared_prefix_len == 0 and len(trunk.trajectory.turns) == 4
    shared = trunk.trajectory.turns[2].start
    for result in branches:
        row = result.trajectory
        assert row is not None and result.branch is not None
        assert (result.branch.job_id, result.branch.turns) == (trunk.job_id, 2)
        assert row.shared_prefix_len == shared and row.ids[:shared] == trunk.trajectory.ids[:shared]
        assert not any(row.loss_mask[:shared]) and not any(row.logprobs[:shared])
        assert row.turns[0].start == shared and len(row.turns) == 2
        assert row.drift == 0
        assert result.messages[:6] == trunk.messages[:6]


@pytest.mark.parametrize("nodes", [(), ("one", "two")], ids=["head", "nodes"])
async def test_samples_go_on_from_the_turns_of_the_first(
    renderer: TemplateRenderer, tmp_path: Path, nodes: tuple[str, ...]
) -> None:
    async with running(renderer, tmp_path, nodes=nodes) as site:
        results = await site.run()
        assert [result.reward for result in results] == [1, 1, 1, 1]
        check_branches(results)
        assert site.server.counts.requests == 4 + 3 * 2, "no shared turn is sampled twice"
        await site.idle()


async def test_a_first_sample_that_ends_before_leaves_the_others_their_own_turns(
    renderer: TemplateRenderer, tmp_path: Path
) -> None:
    async with running(renderer, tmp_path, mix="idle=1") as site:
        results = await site.run()
        assert {result.stop_reason for result in results} == {StopReason.FINISHED}
        assert not any(result.branch for result in results)


async def test_a_sample_that_fails_goes_on_from_the_shared_turns_again(
    renderer: TemplateRenderer, tmp_path: Path
) -> None:
    failures = iter([SandboxError("it broke")] * 3)

    class Fragile(environments()["bash"]):  # type: ignore[misc]
        async def call(self, call: ToolCall, *, timeout_s: float | None = None) -> ToolResult:
            if call.arguments.get("command") == TURNS[2] and (failure := next(failures, None)):
                raise failure
            result: ToolResult = await super().call(call, timeout_s=timeout_s)
            return result

    async with running(renderer, tmp_path, attempts=4, fragile=Fragile) as site:
        results = await site.run(environment="fragile")
        assert [result.reward for result in results] == [1, 1, 1, 1]
        assert sum(result.attempts for result in results) == 4 + 3
        check_branches(results)
        assert site.server.counts.requests == 4 + 3 * 2  # none is sampled again
        await site.idle()


async def test_samples_whose_checkpoint_is_lost_take_their_own_turns(
    renderer: TemplateRenderer, tmp_path: Path
) -> None:
    async with running(renderer, tmp_path, nodes=("one", "two"), tokens_per_s=100.0) as site:
        running_group = asyncio.create_task(site.run(samples=8))
        while not (waiting := [record.name for record in site.records if record.queues[Stage.INIT]]):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await site.nodes[waiting[0]].cut()
        results = await running_group
        assert [result.reward for result in results] == [1] * 8
        assert not all(result.branch for result in results[1:])


@pytest.mark.parametrize("branch_at", [0, 2, 3])
@pytest.mark.parametrize("nodes", [(), ("one",)], ids=["head", "node"])
async def test_samples_start_with_turns_of_an_earlier_job(
    renderer: TemplateRenderer, tmp_path: Path, nodes: tuple[str, ...], branch_at: int
) -> None:
    async with running(renderer, tmp_path, nodes=nodes) as site:
        [earlier] = await site.run("earlier", samples=1, branch_at=0)
        assert earlier.trajectory is not None
        before = site.server.counts.requests
        start = {"job_id": earlier.job_id, "turns": 2}
        results = await site.run(samples=3, branch_at=branch_at, start=start)
        shared = [2, *[max(branch_at, 2)] * 2]
        assert site.server.counts.requests - before == sum(4 - turns for turns in shared)
        for result, turns in zip(results, shared, strict=True):
            row = result.trajectory
            assert row is not None and result.branch is not None and result.reward == 1
            assert result.branch.turns == turns and row.drift == 0
            length = earlier.trajectory.turns[turns].start
            assert row.shared_prefix_len == length and row.ids[:length] == earlier.trajectory.ids[:length]
            assert not any(row.loss_mask[:length]) and row.turns[0].start == length
        assert {result.branch.job_id for result in results if result.branch} == (
            {"g/0", "earlier/0"} if branch_at else {"earlier/0"}
        )
        await site.idle()


async def test_a_start_ends_at_the_first_result_that_differs(
    renderer: TemplateRenderer, tmp_path: Path
) -> None:
    async with running(renderer, tmp_path) as site:
        [earlier] = await site.run("earlier", samples=1, branch_at=0, task=RANDOM_TASK)
        start = {"job_id": "earlier/0", "turns": 3}
        [result] = await site.run(samples=1, branch_at=0, task=RANDOM_TASK, start=start)
        assert result.branch is not None and result.branch.turns == 2
        assert earlier.trajectory is not None and result.trajectory is not None
        same = earlier.trajectory.turns[1].end
        assert result.trajectory.ids[:same] == earlier.trajectory.ids[:same]
        assert result.reward == 1 and result.trajectory.drift == 0


@pytest.mark.parametrize(
    ("start", "error"),
    [
        ({"job_id": "earlier/0", "turns": 5}, InputError),
        ({"job_id": "unknown/0", "turns": 1}, NotFound),
        ({"job_id": "earlier/0", "turns": 30}, InputError),
    ],
)
async def test_an_impossible_start_is_refused(
    renderer: TemplateRenderer, tmp_path: Path, start: dict[str, Any], error: type[Exception]
) -> None:
    async with running(renderer, tmp_path) as site:
        await site.run("earlier", samples=1, branch_at=0)
        with pytest.raises(error):
            await site.run(start=start)


async def test_a_known_group_is_accepted_again_without_the_result_it_starts_with(
    renderer: TemplateRenderer, tmp_path: Path
) -> None:
    async with running(renderer, tmp_path) as site:
        await site.run("earlier", samples=1, branch_at=0)
        start = {"job_id": "earlier/0", "turns": 1}
        await site.run(samples=1, branch_at=0, start=start)
        site.service.store._max_results = 2
        await site.run("later", samples=1, branch_at=0)
        with pytest.raises(NotFound):
            await site.client.result("earlier/0")
        assert (await site.run(samples=1, branch_at=0, start=start))[0].reward == 1


async def test_a_start_with_another_prompt_fails(renderer: TemplateRenderer, tmp_path: Path) -> None:
    async with running(renderer, tmp_path) as site:
        await site.run("earlier", samples=1, branch_at=0)
        start = {"job_id": "earlier/0", "turns": 1}
        [result] = await site.run(samples=1, branch_at=0, task=RANDOM_TASK, start=start)
        assert result.failure is not None and "another prompt" in result.failure.message


async def test_a_running_job_is_branched_and_goes_on(renderer: TemplateRenderer, tmp_path: Path) -> None:
    async with running(renderer, tmp_path, tokens_per_s=50.0) as site:
        await site.client.submit([site.group(samples=1, branch_at=0)])
        while len(await site.service.store.turns("g/0")) < 2:  # noqa: ASYNC110 - the store has no event for it
            await asyncio.sleep(0.01)
        request = BranchRequest(turns=[1, 2], samples=2)
        groups = await site.client.branch_job("g/0", request)
        assert not (await site.client.job("g/0")).state.final
        assert [group.id for group in groups] == ["g:branch-0-1", "g:branch-0-2"]
        assert await site.client.branch_job("g/0", request) != [], "a repeated request has no further effect"
        branches = [result async for result in site.client.follow([group.id for group in groups])]
        trunk = await site.client.result("g/0")
        assert trunk.reward == 1 and trunk.branch is None and trunk.trajectory is not None
        assert len(branches) == 4
        for result in branches:
            assert result.branch is not None and result.trajectory is not None and result.reward == 1
            turns = int(result.group_id[-1])
            assert (result.branch.job_id, result.branch.turns) == ("g/0", turns)
            shared = result.trajectory.shared_prefix_len
            assert shared == trunk.trajectory.turns[turns].start
            assert result.trajectory.ids[:shared] == trunk.trajectory.ids[:shared]
        assert site.server.counts.requests == 4 + 2 * 3 + 2 * 2


async def test_a_branch_is_branched_at_turns_of_its_trunk_and_at_its_own(
    renderer: TemplateRenderer, tmp_path: Path
) -> None:
    async with running(renderer, tmp_path) as site:
        await site.run(samples=2, branch_at=2)
        asked = site.server.counts.requests
        groups = await site.client.branch_job("g/1", BranchRequest(turns=[1, 3]))
        results = [result async for result in site.client.follow([group.id for group in groups])]
        assert sorted(result.branch.turns for result in results if result.branch) == [1, 3]
        assert [result.reward for result in results] == [1, 1]
        assert site.server.counts.requests == asked + 3 + 1


async def test_a_rewound_job_is_cancelled_and_goes_on_from_an_earlier_turn(
    renderer: TemplateRenderer, tmp_path: Path
) -> None:
    async with running(renderer, tmp_path, tokens_per_s=50.0) as site:
        await site.client.submit([site.group(samples=1, branch_at=0)])
        while len(await site.service.store.turns("g/0")) < 2:  # noqa: ASYNC110 - the store has no event for it
            await asyncio.sleep(0.01)
        with pytest.raises(InputError):
            await site.client.rewind_job("g/0", 4)
        assert not (await site.client.job("g/0")).state.final
        group = await site.client.rewind_job("g/0", 1)
        assert group.id == "g:rewind-0-1"
        [result] = [result async for result in site.client.follow([group.id])]
        assert (await site.client.job("g/0")).state is JobState.CANCELLED
        assert result.reward == 1 and result.branch is not None
        assert (result.branch.job_id, result.branch.turns) == ("g/0", 1)
        again = await site.client.rewind_job(result.job_id, 3)  # turns count from the start of the episode
        [result] = [result async for result in site.client.follow([again.id])]
        assert result.reward == 1 and result.branch is not None and result.branch.turns == 3


async def test_the_requests_of_the_page_are_answered(renderer: TemplateRenderer, tmp_path: Path) -> None:
    page = [block for block in BLOCKS if block.page == "docs/branching.md"]
    requests = [block.body for block in page if block.language == "http"]
    branches: Counter[int] = Counter()
    async with (
        running(renderer, tmp_path) as site,
        httpx.AsyncClient(base_url=site.client.url, auth=LocalToken()) as http,
    ):
        for request in requests:
            asked, answer = request.split("\n\n200\n")
            line, _, body = asked.partition("\n")
            method, path = line.split()
            got = await http.request(method, path, content=body, headers={"content-type": "application/json"})
            assert got.status_code == 200, got.text
            expected, given = json.loads(answer), got.json()
            names = [group["id"] for group in given.get("groups", [given])]
            assert names == [group["id"] for group in expected.get("groups", [expected])]
            results = [result async for result in site.client.follow(names)]
            assert [result.reward for result in results] == [1] * len(results)
            branches.update(result.branch.turns for result in results if result.branch)
    assert branches == {3: 7 + 4, 2: 4 + 4 + 1}


async def test_a_cancelled_group_leaves_no_checkpoint(renderer: TemplateRenderer, tmp_path: Path) -> None:
    async with running(renderer, tmp_path, tokens_per_s=200.0) as site:
        for number in range(6):
            name = f"g{number}"
            await site.client.submit(
                [
                    GroupRequest.model_validate(
                        {
                            "id": name,
                            "environment": "bash",
                            "task": TASK,
                            "samples": 5,
                            "branch_at": 1 + number % 3,
                        }
                    )
                ]
            )
            while (await site.client.group(name)).jobs[0].state is JobState.QUEUED:
                pass
            for _ in range(3 * number):
                await site.client.status()
            await site.client.cancel_group(name)
        await site.idle()
        assert (await site.client.status()).jobs_with_sandbox == 0


@pytest.mark.parametrize(
    "fields",
    [{"branch_at": 8, "limits": {"max_turns": 8}}, {"environment": "fixed"}],
    ids=["after the last turn", "environment without checkpoints"],
)
async def test_groups_that_cannot_branch_are_refused(
    renderer: TemplateRenderer, tmp_path: Path, fields: dict[str, Any]
) -> None:
    async with running(renderer, tmp_path) as site:
        with pytest.raises(InputError, match="branch"):
            await site.run(**fields)
