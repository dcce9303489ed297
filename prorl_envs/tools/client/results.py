"""Conversion of a tool server's replies to tool results for the model. Pure."""

from dataclasses import replace

from prorl_envs.errors import printable
from prorl_envs.tools.protocol.messages import BashDone, PythonDone
from prorl_envs.tools.types import JsonObject, ToolResult


def server_lost(reason: str, kind: str, duration_s: float) -> ToolResult:
    """Return the result of a call whose server was lost. `kind` names the session: "shell", for example."""
    text = f"[{reason}; the next call gets a new {kind}, and what this one held is lost]"
    return ToolResult(text=text, ok=False, data={"toolserver_lost": True}, duration_s=duration_s)


def bash_result(done: BashDone, renewed: str, duration_s: float) -> ToolResult:
    """Return the result of a command; `renewed` names a session replaced after a server loss, or is empty."""
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
    """Return the result of a cell; `renewed` as for `bash_result`."""
    # A class name may be any text.
    name = printable(done.error).replace("\n", "\\n").replace("\t", "\\t")
    data: JsonObject = {"error": name or None, "timed_out": done.timed_out}
    if done.display:
        data["display"] = done.display
    return ToolResult(
        text=observation(renewed, done.output, done.notice),
        # A traceback is a valid answer; a stopped or lost session is not.
        ok=not done.notice,
        data=data,
        duration_s=duration_s,
        truncated_bytes=done.omitted,
    )


def with_notices(result: ToolResult, notices: list[str]) -> ToolResult:
    """Return the result with notices about enforced sandbox limits added."""
    if not notices:
        return result
    text = observation("", result.text, *notices)
    return replace(result, text=text, data={**result.data, "limits": notices})


def observation(renewed: str, output: str, *remarks: str) -> str:
    """Return the output unchanged, or with remarks on separate lines around it."""
    before = f"[the tool server was lost; this is a new {renewed}]" if renewed else ""
    if not before and not any(remarks):
        return output
    return "\n".join(filter(None, [before, output.removesuffix("\n"), *remarks]))
