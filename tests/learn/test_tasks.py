"""Tasks of the small model: training has no held-out topics, and demonstrations are correct."""

import itertools
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from learn.demonstrations import demonstrations
from learn.tasks import LEVELS, LearnTask, Split, held_out, tasks
from prorl_envs.env.audit.audit import validate
from prorl_envs.env.node import Node
from prorl_envs.envs.bash.env import BashEnvironment
from prorl_envs.sandbox.drivers.bubblewrap import BubblewrapDriver
from prorl_envs.tools.types import ToolCall


@pytest.fixture
async def node(run_dir: Path, tmp_path: Path) -> AsyncIterator[Node]:
    async with Node(BubblewrapDriver(run_dir), tmp_path) as node:
        yield node


def tasks_of(split: Split, count: int, seed: int = 0) -> list[LearnTask]:
    return list(itertools.islice(tasks(split, seed), count))


def topic_of(task: LearnTask) -> tuple[str, ...]:
    """Return the topic in a task's instruction."""
    words = str(task.row["instruction"]).replace(".txt", "").replace(".sh", "").split()
    if task.level == 3:
        return (words[1], words[7], task.found)
    return (words[4], words[2])


def test_a_seed_gives_the_same_tasks_and_another_seed_others() -> None:
    assert tasks_of("train", 30) == tasks_of("train", 30)
    assert tasks_of("train", 30) != tasks_of("train", 30, seed=1)
    assert [task.level for task in tasks_of("train", 6)] == [*LEVELS, *LEVELS]


def test_topics_of_held_out_tasks_never_occur_in_training() -> None:
    trained = {topic_of(task) for task in tasks_of("train", 1500)}
    examined = {topic_of(task) for task in tasks_of("held_out", 300)}
    assert not trained & examined
    assert all(held_out(*topic) for topic in examined) and not any(held_out(*topic) for topic in trained)


def test_ids_differ_between_splits_and_seeds() -> None:
    sets = [tasks_of("train", 50), tasks_of("train", 50, seed=1), tasks_of("held_out", 50)]
    assert len({task.row["id"] for one in sets for task in one}) == 150


@pytest.mark.anyio
async def test_references_score_1_and_untouched_workspaces_0(node: Node) -> None:
    given = [BashEnvironment.load(task.row) for task in tasks_of("held_out", 9)]
    verdicts = await validate(BashEnvironment, node, given)
    assert [(verdict.task_id, verdict.findings) for verdict in verdicts if not verdict.ok] == []


@pytest.mark.anyio
async def test_a_real_shell_prints_the_output_in_the_demonstrations(node: Node) -> None:
    shown = [one for one in itertools.islice(demonstrations(tasks("train", 0), 0), 20) if one[1]]
    printed, said = [], []
    for task, steps in shown:
        async with BashEnvironment(node) as env:
            await env.init(BashEnvironment.load(task.row))
            for number, step in enumerate(steps):
                if not step.broken:
                    call = ToolCall(id=str(number), name="bash", arguments={"command": step.command})
                    printed.append((step.command, (await env.call(call, timeout_s=20)).text))
                    said.append((step.command, step.output))
    assert printed == said


def test_demonstrations_are_right_sometimes() -> None:
    """If a demonstration needs only one call, the call is the reference in some demonstrations."""
    shown = [one for one in itertools.islice(demonstrations(tasks("train", 0), 0), 3000) if one[0].level == 2]
    right = sum(
        bool(steps) and steps[0].command == task.row["reference"][0]["arguments"]["command"]
        for task, steps in shown
    )
    assert 0.15 < right / len(shown) < 0.35
    assert len({json.dumps([step.command for step in steps]) for _, steps in shown}) > 100
