"""`prorl-envs play`: a person at the keyboard in the model's place."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from prorl_envs.catalog import Catalog
from prorl_envs.cli.compose import by_hand, node
from prorl_envs.cli.console import err, out, plain
from prorl_envs.cli.show import message_panel
from prorl_envs.config import Settings
from prorl_envs.env.base import Environment, Prompt
from prorl_envs.env.conversation import Conversation
from prorl_envs.errors import InputError
from prorl_envs.tools.types import ToolCall, ToolSpec

HELP = """\
A line is a call of the first tool. Other tools: /TOOL {"json": "arguments"}, or /TOOL text for a tool with
one argument. /tools lists them; /say TEXT answers without a call, which ends the episode; /done ends it
without an answer; /quit leaves without a grade."""


def parse_line(line: str, tools: list[ToolSpec], number: int) -> ToolCall:
    """The tool call that a typed line means.

    Raises:
        InputError: no such tool, or arguments that cannot be read.
    """
    name, text = (tools[0].name if tools else "say"), line
    if line.startswith("/"):
        name, _, text = line[1:].partition(" ")
    tool = next((tool for tool in tools if tool.name == name), None)
    if tool is None:
        raise InputError(f"no tool is called {name!r}", hint=", ".join(t.name for t in tools))
    return ToolCall(id=f"call-{number}", name=name, arguments=_arguments(tool, text.strip()))


def _arguments(tool: ToolSpec, text: str) -> dict[str, Any]:
    if text.startswith("{"):
        try:
            arguments = json.loads(text)
        except ValueError as error:
            raise InputError(f"not JSON: {error}") from error
        return dict(arguments)
    names = list(tool.parameters.get("properties", {}))
    if not text:
        return {}
    if not names:
        raise InputError(f"{tool.name} takes no arguments")
    return {names[0]: text}


async def play(settings: Settings, environment: str, task_id: str | None, data: Path | None) -> None:
    """Let a person solve a task.

    Raises:
        InputError: no such family or task.
    """
    catalog = by_hand(Catalog.of(settings), environment)
    chosen = catalog.family(environment)
    tasks = catalog.tasks(environment, data)
    task = next((task for task in tasks if task_id in (None, task.id)), None)
    if not tasks:
        raise InputError(f"{data} holds no task")
    if task is None:
        raise InputError(f"no task {task_id!r}", hint=", ".join(task.id for task in tasks))
    async with node(settings) as opened, catalog, chosen(opened) as env:
        with err.status("starting the episode"):
            prompt = await env.init(task)
        for message in prompt.messages:
            out.print(message_panel(message))
        err.print(HELP)
        await _episode(env, prompt)


async def _episode(env: Environment[Any], prompt: Prompt) -> None:
    number, tools, conversation = 0, list(prompt.tools), Conversation(prompt)
    while True:
        line = await _ask()
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
            call = parse_line(line, tools, number)
        except InputError as error:
            err.print(plain(str(error)), style="yellow")
            continue
        result = await env.call(call)
        conversation.called(call, result)
        out.print(plain(result.text))
        if call.name == env.finish_tool and result.ok:
            break
    env.listen(conversation.messages)
    grade = await env.eval()
    out.print(f"reward {grade.reward:g}")
    out.print(plain(json.dumps(grade.evidence, indent=2, ensure_ascii=False)))


async def _ask() -> str | None:
    """One line from the terminal; None at its end. Reading blocks, so it has a thread of its own."""
    err.print("> ", end="")
    loop = asyncio.get_running_loop()
    line: asyncio.Future[str] = loop.create_future()

    def readable() -> None:
        loop.remove_reader(sys.stdin.fileno())
        if not line.done():
            line.set_result(sys.stdin.readline())

    loop.add_reader(sys.stdin.fileno(), readable)
    try:
        text = await line
    finally:
        loop.remove_reader(sys.stdin.fileno())
    return text.rstrip("\n") if text else None
