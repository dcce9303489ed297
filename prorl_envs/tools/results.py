"""From a tool server's replies to what the model sees. Pure."""

from dataclasses import replace

from prorl_envs.tools.connection import ServerLost
from prorl_envs.tools.types import JsonObject, ToolResult
from prorl_envs.tools.wire import BashDone, PythonDone


def server_lost(error: ServerLost, what: str, duration_s: float) -> ToolResult:
    """The answer to a call during which its server was lost; `what` names what went with it."""
    text = f"[{error.message}; the next call gets a new {what}, and what this one held is lost]"
    return ToolResult(text=text, ok=False, data={"toolserver_lost": True}, duration_s=duration_s)


def bash_result(done: BashDone, renewed: str, duration_s: float) -> ToolResult:
    """The answer to a command; `renewed` names what is new because the server had been lost, or is empty."""
    status = f"[exit status {done.exit_code}]" if done.exit_code else ""
    return ToolResult(
        text=observation(renewed, done.output, status, done.notice),
        ok=done.exit_code is not None or (done.waiting and not done.refused),
        data={
            "exit_code": done.exit_code,
            "cwd": done.cwd,
            "timed_out": done.timed_out,
            "waiting": done.waiting,
        },
        duration_s=duration_s,
        truncated_bytes=done.omitted,
    )


def python_result(done: PythonDone, renewed: str, duration_s: float) -> ToolResult:
    """The answer to a cell; `renewed` as for `bash_result`."""
    data: JsonObject = {"error": done.error or None, "timed_out": done.timed_out}
    if done.display:
        data["display"] = done.display
    return ToolResult(
        text=observation(renewed, done.output, done.notice),
        # A traceback is an answer; a session that was stopped or ended is not.
        ok=not done.notice,
        data=data,
        duration_s=duration_s,
        truncated_bytes=done.omitted,
    )


def with_notices(result: ToolResult, notices: list[str]) -> ToolResult:
    """The result, with what was done meanwhile to keep the sandbox's limits."""
    if not notices:
        return result
    text = observation("", result.text, *notices)
    return replace(result, text=text, data={**result.data, "limits": notices})


def observation(renewed: str, output: str, *remarks: str) -> str:
    """The output as it is, or with remarks on lines of their own around it."""
    before = f"[the tool server was lost; this is a new {renewed}]" if renewed else ""
    if not before and not any(remarks):
        return output
    return "\n".join(filter(None, [before, output.removesuffix("\n"), *remarks]))
