"""Memory use of sandboxes in the status for operators."""

import pytest

from prorl_envs.env.node import Node
from prorl_envs.sandbox.base import SandboxSpec

pytestmark = pytest.mark.anyio

#: Allocate 50 MB until killed.
HOLD = "python3 -c 'held = bytearray(50 << 20); print(1, flush=True); input()' < <(sleep 60) > out &"
SEEN = "until test -s out; do sleep 0.02; done"


async def test_memory_of_a_command_is_counted_for_its_sandbox(node: Node) -> None:
    first, second = await node.open_session(SandboxSpec()), await node.open_session(SandboxSpec())
    before = await node.memory()
    assert before.busy.keys() == {first.sandbox.id, second.sandbox.id} and not before.warm
    assert (await first.tools.bash(f"{HOLD}\n{SEEN}", timeout_s=30)).ok
    after = await node.memory()
    grown = after.busy[first.sandbox.id] - before.busy[first.sandbox.id]
    assert 50 << 20 <= grown < 70 << 20
    assert after.busy[second.sandbox.id] - before.busy[second.sandbox.id] < 5 << 20
    await first.aclose()
    assert (await node.memory()).busy.keys() == {second.sandbox.id}
    await second.aclose()
    assert first.sandbox.memory() is None
