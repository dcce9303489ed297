"""Calls by name, and servers or sandboxes that are lost, violate the protocol, or do not answer."""

import asyncio
import contextlib
import os
import re
import resource
import socket
import struct
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from prorl_envs.errors import SandboxError, ToolError
from prorl_envs.sandbox.base import SandboxSpec
from prorl_envs.sandbox.drivers.base import NodeDriver
from prorl_envs.sandbox.drivers.select import make_driver
from prorl_envs.tools.client.connection import ServerLost, ToolConnection, ToolLimits
from prorl_envs.tools.client.python import PythonEngine
from prorl_envs.tools.client.toolbox import Toolbox
from prorl_envs.tools.protocol.messages import Content, Done, Read, RunDone, encode
from prorl_envs.tools.server.server import rehearse
from prorl_envs.tools.types import ToolCall
from tests.tools.deadlines import TRIES_S

pytestmark = pytest.mark.anyio
T = 60.0


#: Processes of an idle sandbox: the first process, and the one that lists them.
ALONE = (["sandbox", "sh"], ["sh", "sh"])
#: By the shell alone: not every system has `ps`.
LOOK = 'for stat in /proc/[0-9]*/stat; do read -r line < "$stat" && echo "$line"; done'


async def alive(box: Toolbox) -> list[str]:
    """Return the names of the sandbox's processes, except zombies."""
    listed = (await box.run(["sh", "-c", LOOK], timeout_s=T)).output.decode()
    found = re.findall(r"^\d+ \((.*)\) (\w)", listed, re.MULTILINE)
    return [name for name, state in found if state != "Z"]


@pytest.fixture(scope="module")
async def shared_driver(run_dir: Path, driver_name: str) -> AsyncIterator[NodeDriver[Any]]:
    """Name of each isolating driver: toolboxes are the same for all."""
    driver = make_driver(driver_name)
    try:
        await driver.warm()
        yield driver
    finally:
        await driver.aclose()


@pytest.mark.parametrize(
    ("name", "arguments", "ok", "said"),
    [
        ("bash", {"command": "echo hi"}, True, "hi\n"),
        ("ipython", {"code": "1 + 1"}, True, "2\n"),
        ("str_replace_editor", {"command": "view", "path": "/workspace"}, True, "/workspace\n"),
        ("bash", {}, False, "'command' is missing"),
        ("bash", {"command": ["ls"]}, False, "must be a string"),
        ("ipython", {"code": 1}, False, "must be a string"),
        ("str_replace_editor", {"command": "view"}, False, "'path' is missing"),
        ("bash", {"command": "x", "more": 1}, False, ""),
        ("bash", {"command": "\ud800"}, False, ""),
        ("bash", {"command": "a\0b"}, False, ""),
        ("str_replace_editor", {"command": "delete", "path": "/x"}, False, ""),
        ("str_replace_editor", {"command": "view", "path": "relative"}, False, ""),
        ("str_replace_editor", {"command": "view", "path": "/x", "view_range": [2**70, -1]}, False, ""),
        ("rm", {}, False, "there is no tool 'rm'"),
        ("", {}, False, "there is no tool ''"),
    ],
)
async def test_a_call_is_validated_and_executed(
    python_box: Toolbox, name: str, arguments: dict[str, object], ok: bool, said: str
) -> None:
    result = await python_box.call(ToolCall("1", name, arguments), timeout_s=T)
    assert result.ok is ok
    assert result.text and said in result.text


async def test_without_a_session_there_is_no_python_tool(box: Toolbox) -> None:
    result = await box.call(ToolCall("1", "ipython", {"code": "1"}), timeout_s=T)
    assert result.text == "there is no tool 'ipython'"


async def test_a_server_lost_between_calls_is_replaced_and_reported(box: Toolbox) -> None:
    await box.bash("x=1; cd /tmp", timeout_s=T)
    box._server.give_up("the test took it away")
    result = await box.bash("echo ${x-unset}; pwd", timeout_s=T)
    assert result.text == "[the tool server was lost; this is a new shell]\nunset\n/workspace"
    assert (await box.bash("echo again", timeout_s=T)).text == "again\n"


async def test_a_server_lost_during_a_call_is_an_answer_and_is_replaced(box: Toolbox) -> None:
    call = asyncio.create_task(box.bash("touch begun; sleep 100", timeout_s=T))
    other = asyncio.create_task(box.run(["sleep", "100"], timeout_s=T))
    await box.run(["sh", "-c", "until [ -e begun ]; do sleep 0.01; done"], timeout_s=T)
    box._server.give_up("the test took it away")
    result = await call
    assert not result.ok
    assert "the test took it away; the next call gets a new shell" in result.text
    with pytest.raises(ToolError, match="took it away"):
        await other
    assert (await box.bash("echo back", timeout_s=T)).text == "back\n"


async def test_commands_of_a_lost_server_are_killed(box: Toolbox) -> None:
    calls = [
        asyncio.create_task(box.bash("touch one; sleep 100", timeout_s=T)),
        asyncio.create_task(box.run(["sh", "-c", "touch two; sleep 100"], timeout_s=T)),
    ]
    wait = "until [ -e one -a -e two ]; do sleep 0.01; done"
    await box.run(["sh", "-c", wait], timeout_s=T)
    box._server.give_up("the test took it away")
    await asyncio.gather(*calls, return_exceptions=True)
    done = await box.run(
        ["sh", "-c", "while grep -qsE 'sleep|bash' /proc/[0-9]*/comm; do :; done"], timeout_s=T
    )
    assert not done.timed_out


async def test_a_lost_python_server_is_replaced_and_reported(python_box: Toolbox) -> None:
    await python_box.python("x = 1", timeout_s=T)
    assert python_box._forked is not None
    python_box._forked.give_up("the test took it away")
    result = await python_box.python("'x' in globals()", timeout_s=T)
    assert result.text == "[the tool server was lost; this is a new Python session]\nFalse"


async def test_the_agent_can_kill_all_visible_processes_and_the_tools_survive(python_box: Toolbox) -> None:
    result = await python_box.bash("kill -9 -1; kill -9 $$", timeout_s=T)
    assert "the shell was killed by signal 9" in result.text
    assert (await python_box.bash("echo back", timeout_s=T)).text == "back\n"
    # A killed process takes a moment to exit; a cell sent meanwhile would be reported as killed with it.
    while any("python" in name for name in await alive(python_box)):
        pass
    result = await python_box.python("1", timeout_s=T)
    assert result.text.startswith("1\n[before this cell, the Python session was killed by signal 9")


async def test_every_process_of_the_sandbox_can_be_killed(python_box: Toolbox) -> None:
    await python_box.bash("setsid sleep 100 & (trap '' TERM HUP; sleep 100) &", timeout_s=T)
    await python_box.end_processes()
    assert await alive(python_box) in ALONE
    assert (await python_box.bash("echo back", timeout_s=T)).text.startswith("back\n[before this command")
    assert (await python_box.python("1", timeout_s=T)).text.startswith("1\n[before this cell")


@pytest.mark.parametrize("number", ["KILL", "STOP"])
async def test_processes_that_restart_each_other_are_killed(box: Toolbox, number: str) -> None:
    fighter = f"touch begun; while :; do kill -{number} -1; done"
    # The process that starts it is its first victim.
    for limit_s in TRIES_S:
        await box.run(["/bin/bash", "-c", 'setsid /bin/bash -c "$0" & sleep 100', fighter], timeout_s=limit_s)
        await box.end_processes()
        if (await box.run(["test", "-e", "begun"], timeout_s=T)).exit_code == 0:
            break
    assert await alive(box) in ALONE
    assert await box.read("/workspace/begun") == b""


async def test_without_its_sandbox_every_call_is_a_sandbox_error(shared_driver: NodeDriver[Any]) -> None:
    sandbox = await shared_driver.start(SandboxSpec())
    toolbox = await Toolbox.open(sandbox)
    call = asyncio.create_task(toolbox.bash("sleep 100", timeout_s=T))
    await toolbox.bash("true", timeout_s=T, session="other")
    await sandbox.close()
    with pytest.raises(SandboxError):
        await call
    with pytest.raises(SandboxError):
        await toolbox.bash("true", timeout_s=T)
    with pytest.raises(SandboxError):
        await toolbox.run(["true"], timeout_s=T)
    with pytest.raises(SandboxError):
        await toolbox.read("/etc/passwd")
    await toolbox.aclose()
    with pytest.raises(SandboxError):
        await Toolbox.open(sandbox)


async def test_a_closed_toolbox_refuses_calls_and_closes_again(shared_driver: NodeDriver[Any]) -> None:
    sandbox = await shared_driver.start(SandboxSpec())
    toolbox = await Toolbox.open(sandbox, python=PythonEngine.NONE)
    await toolbox.aclose()
    await toolbox.aclose()
    with pytest.raises(ToolError, match="closed"):
        await toolbox.bash("true", timeout_s=T)
    other = await Toolbox.open(sandbox)
    assert (await other.bash("echo on", timeout_s=T)).text == "on\n"
    await other.aclose()
    starting = await Toolbox.open(sandbox)
    call = asyncio.create_task(starting.bash("true", timeout_s=T))
    await asyncio.sleep(0)
    await starting.aclose()
    assert "closed" in str(await asyncio.gather(call, return_exceptions=True))
    await sandbox.close()


async def test_variables_of_the_spec_override_those_of_the_tools(shared_driver: NodeDriver[Any]) -> None:
    sandbox = await shared_driver.start(SandboxSpec(env={"TERM": "vt100", "PAGER": "less"}))
    toolbox = await Toolbox.open(sandbox)
    done = await toolbox.run(["sh", "-c", "echo $TERM $PAGER $MANPAGER"], timeout_s=T)
    assert done.output == b"vt100 less cat\n"
    await toolbox.aclose()
    await sandbox.close()


async def test_closing_a_toolbox_kills_its_shells_and_commands(shared_driver: NodeDriver[Any]) -> None:
    sandbox = await shared_driver.start(SandboxSpec())
    toolbox, other = await Toolbox.open(sandbox), await Toolbox.open(sandbox)
    await toolbox.bash("true", timeout_s=T)
    call = asyncio.create_task(toolbox.run(["sh", "-c", "touch begun; sleep 100"], timeout_s=T))
    await other.run(["sh", "-c", "until [ -e begun ]; do sleep 0.01; done"], timeout_s=T)
    await toolbox.aclose()
    await asyncio.gather(call, return_exceptions=True)
    gone = "while grep -qsxE 'bash|sleep' /proc/[0-9]*/comm; do :; done"
    assert (await other.run(["sh", "-c", gone], timeout_s=T)).exit_code == 0
    assert sandbox.alive
    await other.aclose()
    await sandbox.close()


async def test_a_server_that_cannot_start_fails_its_call_alone(box: Toolbox) -> None:
    free = os.dup(0)  # the lowest number without a descriptor: at this limit, none can be opened
    os.close(free)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        with pytest.raises(ToolError, match="the tool server cannot be started"):
            await box.bash("true", timeout_s=T)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (await box.bash("echo on", timeout_s=T)).text == "on\n"


async def test_two_toolboxes_of_one_sandbox_are_independent(box: Toolbox) -> None:
    async def use(toolbox: Toolbox, value: int) -> str:
        await toolbox.bash(f"x={value}", timeout_s=T)
        return (await toolbox.bash("echo $x", timeout_s=T)).text

    other = await Toolbox.open(box.sandbox, limits=ToolLimits(output_bytes=64))
    first, second = await asyncio.gather(use(box, 1), use(other, 2))
    assert (first, second) == ("1\n", "2\n")
    await other.aclose()


# A hostile or broken server, played by the test at the other end of a real socket


def connected(box: Toolbox, sock: socket.socket) -> ToolConnection:
    """Return a connection whose server is played by the peer of `sock`."""
    connection = ToolConnection(box.sandbox, ToolLimits(margin_s=0.0))
    connection._take_over(sock)
    return connection


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"\xff\xff\xff\xff", "announced"),
        (struct.pack(">I", 3) + b"\xc1\xc1\xc1", "not a reply"),
        (bytes(encode(Done(99))), "a reply without a request"),
        (bytes(encode(RunDone(1, b"", 0, 0, False, 0.0))), "answered RunDone, not Done"),
        (b"", "did not answer within 0.2 s"),
        (b"\0\0", "did not answer within 0.2 s"),
    ],
)
async def test_a_server_that_breaks_the_protocol_is_abandoned(box: Toolbox, answer: bytes, said: str) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        connection = connected(box, ours)
        theirs.sendall(answer)
        with pytest.raises(ToolError, match=said):
            await connection.ask(lambda id_: Read(id_, "/", 1), Done, timeout_s=0.2)
        await connection.aclose()


async def test_a_server_that_exits_fails_all_pending_requests_and_is_replaced(box: Toolbox) -> None:
    ours, theirs = socket.socketpair()
    connection = connected(box, ours)
    requests = [
        asyncio.create_task(connection.ask(lambda id_: Read(id_, "/", 1), Done, timeout_s=T))
        for _ in range(3)
    ]
    await asyncio.sleep(0)
    theirs.close()
    results = await asyncio.gather(*requests, return_exceptions=True)
    assert all(isinstance(result, ServerLost) for result in results)
    read = await connection.ask(lambda id_: Read(id_, "/etc/passwd", 4), Content, timeout_s=T)
    assert read.data == b"root"
    await connection.aclose()


async def test_a_message_that_is_too_long_is_refused_and_the_connection_survives(box: Toolbox) -> None:
    with pytest.raises(ToolError, match="the limit is"):
        await box.run(["true"], stdin=b"x" * 60_000_000, timeout_s=T)
    assert (await box.bash("echo fine", timeout_s=T)).text == "fine\n"


# The way of a tool call, as docs/ten-files.md lists it


@contextlib.contextmanager
def classes_crossed() -> Iterator[set[str]]:
    """Collect the classes of the tools whose methods run, except codecs, readers and the event loop."""
    found: set[str] = set()
    helpers = ("/protocol/", "/loop.py", "/reader.py", "/shell_syntax.py")

    def note(frame: FrameType, event: str, _: object) -> None:
        path, method, owner = frame.f_code.co_filename, frame.f_code.co_name, frame.f_locals.get("self")
        counts = "/prorl_envs/tools/" in path and not any(helper in path for helper in helpers)
        if (
            counts
            and event == "call"
            and owner is not None
            and method not in ("__init__", "close", "discard")
        ):
            found.add(type(owner).__name__)

    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize(("tool", "argument"), [("bash", "command"), ("ipython", "code")])
async def test_a_call_crosses_two_classes_on_the_host(python_box: Toolbox, tool: str, argument: str) -> None:
    call = ToolCall("1", tool, {argument: "1"})
    await python_box.call(call, timeout_s=T)
    with classes_crossed() as found:
        await python_box.call(call, timeout_s=T)
    assert found == {"Toolbox", "ToolConnection"}


def test_a_command_crosses_three_classes_of_the_server() -> None:
    with classes_crossed() as found:
        rehearse()
    assert found == {"ToolServer", "ShellSession", "Terminal"}
