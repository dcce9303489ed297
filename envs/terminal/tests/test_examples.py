"""Each example task scores 1 for its reference and 0 if nothing is done."""

import pytest

from prorl_envs.env.audit.audit import validate
from prorl_envs.env.node import Node
from prorl_envs.env.registry import example_path, load_tasks
from prorl_envs.envs.terminal.env import TerminalEnvironment
from prorl_envs.envs.terminal.task import TerminalTask

pytestmark = pytest.mark.anyio

#: Tasks whose Dockerfile installs packages.
INSTALL = frozenset({"webshop-orders", "undelete-commit", "web-log"})
TASKS = {
    task.id: task
    for task in load_tasks("terminal", example_path("terminal"))
    if isinstance(task, TerminalTask)
}


def test_the_tasks_that_install_packages_are_known() -> None:
    assert len(TASKS) == 8
    assert {name for name, task in TASKS.items() if "apt-get" in str(task)} == INSTALL


@pytest.mark.parametrize("name", sorted(TASKS.keys() - INSTALL))
async def test_every_example_discriminates(node: Node, name: str) -> None:
    (verdict,) = await validate(TerminalEnvironment, node, [TASKS[name]])
    assert verdict.ok, verdict
    assert verdict.reference == (1, 1) and verdict.untouched == 0
