"""`prorl-envs play`: a person solves a task in place of the model."""

import asyncio
import json
import re
import sys
from pathlib import Path
from typing import Any

from prorl_envs.app.compose import node
from prorl_envs.cli.commands.show import message_panel
from prorl_envs.cli.options import catalog_without_harness
from prorl_envs.cli.output.console import err, out, plain
from prorl_envs.config import Settings
from prorl_envs.env.base import Environment, Prompt
from prorl_envs.env.conversation import MessageLog
from prorl_envs.env.sandboxed import SandboxedEnvironment
from prorl_envs.errors import InputError, name_hint
from prorl_envs.tools.types import ToolCall, ToolSpec

HELP = """\
Each line calls the first tool. Other tools: /TOOL {"json": "arguments"}, or /TOOL text for a tool with one
argument. Put several lines between \"\"\" and \"\"\". /tools lists the tools; /say TEXT answers without a
call and ends the episode; /done ends the episode without an answer; /quit stops without a grade.
/jupyter shows how to attach a Jupyter client, if Python cells run in a kernel."""
_QUOTES = '"""'
_CALL = re.compile(r"/(\w+)(?:\s+(.*))?", re.DOTALL)


def parse_line(line: str, tools: list[ToolSpec], number: int) -> ToolCall:
    """Parse typed input, of one or several lines, as a tool call.

    Raises:
        InputError: there is no such tool, or the arguments cannot be parsed.
    """
    named = _CALL.fullmatch(line)
    name = named[1] if named else tools[0].name if tools else "say"
    tool = next((tool for tool in tools if tool.name == name), None)
    if tool is None:
        raise InputError(f"no tool is called {name!r}", hint=", ".join(t.name for t in tools))
    text = (named[2] or "") if named else line
    as_json = named is not None and text.startswith("{")
    return ToolCall(f"call-{number}", name, _json(text) if as_json else _only_argument(tool, text))


def _json(text: str) -> dict[str, Any]:
    try:
        return dict(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise InputError(f"not JSON: {error}") from error


def _only_argument(tool: ToolSpec, text: str) -> dict[str, Any]:
    text = text.strip().removeprefix(_QUOTES).removesuffix(_QUOTES).strip("\n")
    names = list(tool.parameters.get("properties", {}))
    if not text:
        return {}
    if not names:
        raise InputError(f"{tool.name} takes no arguments")
    return {names[0]: text}


async def play(settings: Settings, environment: str, task_id: str | None, data: Path | None) -> None:
    """Run a task with a person in place of the model.

    Raises:
        InputError: no such family or task.
    """
    catalog = catalog_without_harness(settings, environment)
    chosen = catalog.family(environment)
    tasks = catalog.tasks(environment, data)
    task = next((task for task in tasks if task_id in (None, task.id)), None)
    if not tasks:
        raise InputError(f"{data} contains no task")
    if task is None:
        raise InputError(f"no task {task_id!r}", hint=name_hint(str(task_id), (task.id for task in tasks)))
    async with node(settings) as opened, chosen(opened) as env:
        with err.status("starting the episode"):
            prompt = await env.init(task)
        for message in prompt.messages:
            out.print(message_panel(message))
        err.print(HELP)
        await _episode(env, prompt)


async def _episode(env: Environment[Any], prompt: Prompt) -> None:
    number, tools, conversation = 0, list(prompt.tools), MessageLog(prompt)
    while True:
        line = await _ask("> ")
        if line is not None and line.rstrip().endswith(_QUOTES) and line.count(_QUOTES) == 1:
            line = await _until_quotes(line)
        if line is None or line.strip() == "/quit":
            return
        if line.strip() == "/done":
            break
        if line.startswith("/say "):
            conversation.said(line.removeprefix("/say ").strip())
            break
        if line.strip() == "/tools":
            for tool in tools:
                out.print(plain(f"{tool.name}: {tool.description}\n{json.dumps(tool.parameters)}\n"))
            continue
        if not line.strip():
            continue
        number += 1
        try:
            if line.strip() == "/jupyter":
                out.print(f"jupyter console --existing {_connection_file(env)}", soft_wrap=True)
                continue
            call = parse_line(line, tools, number)
        except InputError as error:
            err.print(plain(str(error)), style="yellow")
            continue
        result = await env.call(call)
        conversation.called(call, result)
        out.print(plain(result.text))
        if call.name == env.finish_tool and result.ok:
            break
    env.on_transcript(conversation.messages)
    grade = await env.eval()
    out.print(f"reward {grade.reward:g}")
    out.print(plain(json.dumps(grade.evidence, indent=2, ensure_ascii=False)))


def _connection_file(env: Environment[Any]) -> Path:
    if not isinstance(env, SandboxedEnvironment):
        raise InputError(f"{env.name} has no sandbox here")
    return env.jupyter_connection_file()


async def _until_quotes(first: str) -> str | None:
    """Read lines up to closing quotes, and return them with the first line; None if the input ends before."""
    lines = [first]
    while (line := await _ask(". ")) is not None:
        lines.append(line)
        if line.rstrip().endswith(_QUOTES):
            return "\n".join(lines)
    return None


async def _ask(prompt: str) -> str | None:
    """Read one line from the terminal; None at the end of input."""
    err.print(prompt, end="")
    loop = asyncio.get_running_loop()
    line: asyncio.Future[str] = loop.create_future()

    def readable() -> None:
        loop.remove_reader(sys.stdin.fileno())
        if not line.done():
            line.set_result(sys.stdin.readline())

    try:
        loop.add_reader(sys.stdin.fileno(), readable)
    except PermissionError:  # epoll refuses files and /dev/null, which are always readable
        text = sys.stdin.readline()
    else:
        try:
            text = await line
        finally:
            loop.remove_reader(sys.stdin.fileno())
    return text.rstrip("\n") if text else None
