"""Each example problem scores 1 for its reference and 0 if nothing is done, twice, in real sandboxes."""

import pytest

from prorl_envs.env.audit.audit import validate
from prorl_envs.env.node import Node
from prorl_envs.env.registry import example_path, load_tasks
from prorl_envs.envs.code.env import CodeEnvironment
from prorl_envs.envs.code.task import CodeTask


@pytest.mark.anyio
@pytest.mark.thorough
@pytest.mark.timeout(600)
async def test_every_example_discriminates(node: Node) -> None:
    tasks = [task for task in load_tasks("code", example_path("code")) if isinstance(task, CodeTask)]
    verdicts = await validate(CodeEnvironment, node, tasks, concurrency=2)
    assert len(verdicts) == 9
    assert {verdict.task_id: verdict.findings for verdict in verdicts if not verdict.ok} == {}
