"""Each example task scores 1 for its reference and 0 if nothing is done, twice, in real sandboxes."""

import pytest

from prorl_envs.env.audit.audit import validate
from prorl_envs.env.node import Node
from prorl_envs.env.registry import example_path, load_tasks
from prorl_envs.envs.bash.env import BashEnvironment
from prorl_envs.envs.bash.task import BashTask


@pytest.mark.anyio
@pytest.mark.timeout(600)
async def test_every_example_discriminates(node: Node) -> None:
    tasks = [task for task in load_tasks("bash", example_path("bash")) if isinstance(task, BashTask)]
    verdicts = await validate(BashEnvironment, node, tasks)
    assert len(verdicts) == 12
    assert {verdict.task_id: verdict.findings for verdict in verdicts if not verdict.ok} == {}
