"""Commands that exceed their deadline, on machines of any speed."""

from collections.abc import Awaitable, Callable

from prorl_envs.tools.client.toolbox import Toolbox
from prorl_envs.tools.types import Completed, ToolResult

#: Seconds. On a busy machine a command may need longer than the first to start.
TRIES_S = (0.3, 3.0, 15.0)


async def at_deadline(call: Callable[[float], Awaitable[ToolResult]], shown: str = "before") -> ToolResult:
    """Call a tool with a short deadline, or a longer one if the command has not printed `shown` by then.

    Args:
        call: calls a tool with a deadline in seconds.
        shown: a line that the command prints once it has reached the state for the deadline.
    """
    for limit_s in TRIES_S:
        result = await call(limit_s)
        assert result.data["timed_out"] is True
        if result.text.startswith(f"{shown}\n"):
            assert f"[timed out after {limit_s:g} s: " in result.text
            return result
    raise AssertionError(f"{shown!r} was not printed within {limit_s} s: {result.text}")


async def run_at_deadline(
    box: Toolbox, script: str, *, apart: bool = False, output_limit: int = 1000
) -> Completed:
    """Run a new process like `at_deadline`; its output shows its progress."""
    for limit_s in TRIES_S:
        done = await box.run(["sh", "-c", script], apart=apart, output_limit=output_limit, timeout_s=limit_s)
        assert done.timed_out
        if done.output:
            return done
    raise AssertionError(f"nothing was printed within {limit_s} s")
