"""What the attacks have in common."""

import textwrap
from collections.abc import Awaitable, Callable
from typing import Any

from prorl_envs.sandbox.driver import NodeDriver
from prorl_envs.tools.client import Toolbox
from prorl_envs.tools.types import ToolResult

type Driver = NodeDriver[Any]
type OpenBox = Callable[..., Awaitable[Toolbox]]

#: Seconds a call may take that should end much earlier.
T = 60.0


def python(text: str) -> str:
    """A shell's command that runs a Python program, which ends by itself whatever becomes of it."""
    return f"python3 - <<'EOF'\nimport signal\nsignal.alarm(40)\n{textwrap.dedent(text)}\nEOF\n"


async def usable(box: Toolbox) -> ToolResult:
    """The bash tool answers as it should, if need be after one call that tells of the loss."""
    result = await box.bash("echo $((6 * 7))", timeout_s=5)
    if not result.text.startswith("42\n") or result.data["waiting"] or result.data["exit_code"] != 0:
        result = await box.bash("echo $((6 * 7))", timeout_s=T, restart=True)
    assert result.text.startswith("42\n"), result.text
    assert result.data["exit_code"] == 0
    return result
