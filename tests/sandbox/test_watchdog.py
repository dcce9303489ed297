"""When a sandbox is looked at."""

from typing import cast

import pytest

from prorl_envs.sandbox.base import Limits
from prorl_envs.sandbox.usage import NodeUse
from prorl_envs.sandbox.watch import Watch, Watched
from prorl_envs.sandbox.watchdog import half_way, is_due

DUE_S = 10.0


def idle(node: NodeUse, *, memory_left: int | None, processes_left: int | None) -> Watch:
    """One that was just looked at, and had so much left."""
    watch = Watch(sandbox=cast(Watched, None), limits=Limits(), group=None, due=DUE_S)
    watch.room = half_way(memory_left, processes_left)
    watch.wake = node + watch.room
    return watch


def use(memory: int, tasks: int) -> NodeUse:
    return NodeUse(memory, 0, tasks)


@pytest.mark.parametrize(
    ("uses", "due"),
    [
        ([use(1000, 500), use(1099, 516)], False),
        ([use(1000, 517)], True),
        ([use(1100, 500)], True),
        ([use(1000, 440), use(1000, 456)], False),
        ([use(1000, 440), use(1000, 457)], True),  # sixty others ended, and hide nothing
        ([use(300, 500), use(400, 500)], True),
        ([use(1000, 440), use(1000, 450), use(1000, 457)], True),
    ],
)
def test_an_idle_one_is_looked_at_once_the_machine_uses_so_much_more(uses: list[NodeUse], due: bool) -> None:
    watch = idle(use(1000, 500), memory_left=200, processes_left=34)
    *before, last = uses
    assert not any(is_due(watch, node, 1.0) for node in before)
    assert is_due(watch, last, 1.0) == due


def test_without_a_limit_its_time_decides() -> None:
    watch = idle(use(1000, 500), memory_left=None, processes_left=None)
    assert not is_due(watch, use(10**12, 10**6), DUE_S - 1)
    assert is_due(watch, use(1000, 500), DUE_S)


def test_one_that_is_not_idle_has_its_time() -> None:
    watch = Watch(sandbox=cast(Watched, None), limits=Limits(), group=None, due=DUE_S)
    assert not is_due(watch, use(10**12, 10**6), DUE_S - 1)
    assert is_due(watch, use(0, 0), DUE_S)
