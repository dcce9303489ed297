"""Each example task scores 1 for its reference and 0 if nothing is done, twice, in real sandboxes."""

from collections.abc import Mapping

import pytest

from prorl_envs.env.audit.audit import validate
from prorl_envs.env.node import Node
from prorl_envs.env.registry import example_path, load_tasks
from prorl_envs.envs.ipython.env import IPythonEnvironment
from prorl_envs.envs.ipython.task import IPythonTask
from prorl_envs.sandbox.template.template import TEMPLATES, TemplateSpec


@pytest.fixture(scope="module")
def templates() -> Mapping[str, TemplateSpec]:
    """Import the libraries of sessions beforehand, as a node does."""
    return TEMPLATES


@pytest.mark.anyio
@pytest.mark.thorough
@pytest.mark.timeout(600)
async def test_every_example_discriminates(node: Node) -> None:
    tasks = [task for task in load_tasks("ipython", example_path("ipython")) if isinstance(task, IPythonTask)]
    verdicts = await validate(IPythonEnvironment, node, tasks, concurrency=2)
    assert len(verdicts) == 12
    assert {verdict.task_id: verdict.findings for verdict in verdicts if not verdict.ok} == {}
