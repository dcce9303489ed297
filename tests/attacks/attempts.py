"""Helpers that all attack tests share."""

import textwrap
from collections.abc import Awaitable, Callable
from typing import Any

from prorl_envs.sandbox.drivers.base import NodeDriver
from prorl_envs.tools.client.toolbox import Toolbox
from prorl_envs.tools.types import ToolResult

type Driver = NodeDriver[Any]
type OpenBox = Callable[..., Awaitable[Toolbox]]

#: Seconds a call may take that should return much earlier.
T = 60.0


def python(text: str) -> str:
    """Return a shell command that runs a Python program. The program always stops by itself."""
    return f"python3 - <<'EOF'\nimport signal\nsignal.alarm(40)\n{textwrap.dedent(text)}\nEOF\n"


async def usable(box: Toolbox) -> ToolResult:
    """Check that the bash tool answers correctly, if necessary after one call that reports a lost shell."""
    result = await box.bash("echo $((6 * 7))", timeout_s=5)
    if not result.text.startswith("42\n") or result.data["waiting"] or result.data["exit_code"] != 0:
        result = await box.bash("echo $((6 * 7))", timeout_s=T, restart=True)
    assert result.text.startswith("42\n"), result.text
    assert result.data["exit_code"] == 0
    return result
