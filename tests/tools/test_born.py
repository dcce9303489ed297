"""The shell that is started with a sandbox; a tool server takes over if a command needs one."""

import asyncio
import os
import signal
from pathlib import Path
from typing import NoReturn

import pytest

from prorl_envs.conformance.host import eventually
from prorl_envs.errors import SandboxError, ToolError
from prorl_envs.sandbox.base import OpenedTerminal, SandboxSpec
from prorl_envs.sandbox.drivers.namespaces import NamespaceDriver, NamespaceSandbox
from prorl_envs.tools.client.connection import ToolConnection
from prorl_envs.tools.client.toolbox import Toolbox
from prorl_envs.tools.protocol.messages import Content, Read, Setup
from prorl_envs.tools.server.initial_shell import plan, terminal_settings
from prorl_envs.tools.server.input_detection import settings
from tests.tools.conftest import LIMITS
from tests.tools.deadlines import at_deadline

pytestmark = pytest.mark.anyio
T = 60.0


def servers(box: Toolbox) -> list[int]:
    assert isinstance(box.sandbox, NamespaceSandbox)
    return box.sandbox.tool_servers


async def test_short_commands_need_no_tool_server(box: Toolbox) -> None:
    for number in range(10):
        done = await box.bash(f"echo {number} $kept; kept={number}; cd /; (exit {number})", timeout_s=T)
        assert done.text.splitlines()[0] == f"{number} {number - 1 if number else ''}".rstrip()
        assert (done.data["exit_code"], done.data["cwd"]) == (number, "/")
    assert servers(box) == []


@pytest.mark.parametrize(
    "what",
    [
        "sleep 0.3",
        "head -c 100000 /dev/zero | tr '\\0' x",
        "printf 'a\\x00b\\n'",
        "true " + "x" * 600,
        "true\ntrue",
    ],
    ids=["time", "output", "odd", "long", "lines"],
)
async def test_other_commands_start_a_tool_server_and_the_shell_survives(box: Toolbox, what: str) -> None:
    await box.bash("kept=here; cd /tmp; f() { echo function; }", timeout_s=T)
    done = await box.bash(f"{what}; echo end $kept", timeout_s=T)
    assert done.text.endswith("end here\n")
    pid = (await box.bash("f; pwd; echo $$", timeout_s=T)).text
    assert pid.startswith("function\n/tmp\n")
    assert (await box.bash("f; pwd; echo $$", timeout_s=T)).text == pid
    assert len(servers(box)) == (0 if what.startswith(("printf", "true")) else 1)


async def test_the_first_command_may_use_every_feature_of_a_shell(box: Toolbox) -> None:
    done = await box.bash("read -p 'name? ' name; echo got $name", timeout_s=T)
    assert done.data["waiting"] and done.text.startswith("name? ")
    assert (await box.bash("me", timeout_s=T, is_input=True)).text == "got me\n"
    assert (await box.bash("echo $name", timeout_s=T)).text == "me\n"


async def test_a_command_over_its_time_is_interrupted_and_the_shell_survives(box: Toolbox) -> None:
    await box.bash("kept=here", timeout_s=T)
    done = await box.bash("sleep 60", timeout_s=0.3)
    assert done.data["timed_out"] and "it was interrupted" in done.text
    assert (await box.bash("echo $kept", timeout_s=T)).text == "here\n"
    command = "trap '' INT; sh -c 'echo before; while :; do :; done'"
    done = await at_deadline(lambda limit_s: box.bash(command, timeout_s=limit_s))
    assert "was killed" in done.text
    assert (await box.bash("echo $kept", timeout_s=T)).text == "here\n"


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("exit 3", "exited with status 3"),
        ("kill -9 $$", "was killed by signal 9"),
        ("exec true", "exited with"),
    ],
)
async def test_the_exit_of_the_shell_is_reported(box: Toolbox, command: str, told: str, used: bool) -> None:
    if used:
        await box.bash("sleep 0.2", timeout_s=T)
    done = await box.bash(command, timeout_s=T)
    assert told in done.text
    assert (await box.bash("echo on", timeout_s=T)).text == "on\n"


async def test_an_exit_between_two_commands_is_reported_with_the_next(box: Toolbox) -> None:
    await box.bash("(sleep 0.1; kill -9 $$) > /dev/null 2>&1 & echo $$ > pid", timeout_s=T)
    await box.run(["sh", "-c", "while kill -0 $(cat pid); do sleep 0.01; done"], timeout_s=T)
    done = await box.bash("echo on", timeout_s=T)
    assert "before this command, the shell was killed by signal 9" in done.text and "on\n" in done.text


async def test_other_tools_and_sessions_do_not_affect_the_shell(box: Toolbox) -> None:
    await box.bash("kept=here", timeout_s=T)
    await box.write("/workspace/file", b"content")
    assert (await box.bash("echo $kept; cat file", timeout_s=T)).text == "here\ncontent"
    assert (await box.bash("echo other $kept", timeout_s=T, session="other")).text == "other\n"
    assert (await box.run(["/bin/echo", "run"], timeout_s=T)).output == b"run\n"
    assert (await box.bash("echo $kept", timeout_s=T)).text == "here\n"


async def test_a_restart_replaces_the_shell(box: Toolbox) -> None:
    await box.bash("kept=here", timeout_s=T)
    done = await box.bash("echo $kept.", timeout_s=T, restart=True)
    assert done.text == ".\n[this is a new shell]"


async def test_a_cancelled_command_stops_and_the_shell_survives(box: Toolbox) -> None:
    await box.bash("kept=here", timeout_s=T)
    for delay_s in (0.0, 0.01, 0.05, 0.2):
        call = asyncio.ensure_future(box.bash("sleep 60", timeout_s=T))
        await asyncio.wait([call], timeout=delay_s)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
    assert (await box.bash("echo $kept", timeout_s=T)).text.endswith("here\n")


async def test_a_first_command_cancelled_at_any_moment_leaves_a_shell(shared_driver: NamespaceDriver) -> None:
    for delay_ms in (0, 0.2, 0.5, 1, 2, 5):
        sandbox = await shared_driver.start(SandboxSpec())
        box = await Toolbox.open(sandbox, limits=LIMITS)
        call = asyncio.ensure_future(box.bash("sleep 60", timeout_s=T))
        await asyncio.wait([call], timeout=delay_ms / 1000)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        assert (await box.bash("echo on", timeout_s=T)).text.endswith("on\n")
        await box.aclose()
        await sandbox.close()


async def test_closing_the_tools_stops_the_shell_and_its_command(shared_driver: NamespaceDriver) -> None:
    sandbox = await shared_driver.start(SandboxSpec())
    box = await Toolbox.open(sandbox, limits=LIMITS)
    pids = [int((await box.bash("trap '' HUP; echo $$", timeout_s=T)).text)]
    call = asyncio.ensure_future(
        box.bash("trap '' HUP; sh -c 'echo $$ > pid; while :; do :; done'", timeout_s=T)
    )
    written = sandbox.workspace / "pid"
    assert await eventually(lambda: written.exists() and bool(written.read_text()))
    pids.append(int(written.read_text()))
    await box.aclose()
    await asyncio.gather(call, return_exceptions=True)
    # Process numbers inside: looked up in the sandbox's own view.
    assert await eventually(lambda: not any(lives(sandbox, pid) for pid in pids))
    await sandbox.close()


def lives(sandbox: NamespaceSandbox, pid: int) -> bool:
    stat = Path(f"/proc/{sandbox.first_pid}/root/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(") ")[2][:1] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False


async def test_a_lost_server_is_replaced(box: Toolbox) -> None:
    await box.bash("kept=here; sleep 0.3", timeout_s=T)
    [server] = servers(box)
    os.kill(server, signal.SIGKILL)
    assert await eventually(lambda: not servers(box))
    done = await box.bash("echo on $kept", timeout_s=T)
    assert "on" in done.text and "here" not in done.text


async def test_a_closed_sandbox_is_reported(shared_driver: NamespaceDriver) -> None:
    sandbox = await shared_driver.start(SandboxSpec())
    box = await Toolbox.open(sandbox, limits=LIMITS)
    await box.bash("echo", timeout_s=T)
    await sandbox.close()
    with pytest.raises(SandboxError, match="has ended"):
        await box.bash("echo", timeout_s=T)
    await box.aclose()


async def test_only_the_first_toolbox_gets_the_shell(box: Toolbox) -> None:
    await box.bash("kept=here", timeout_s=T)
    other = await Toolbox.open(box.sandbox, limits=LIMITS)
    assert (await other.bash("echo other $kept", timeout_s=T)).text == "other\n"
    assert (await box.bash("echo $kept", timeout_s=T)).text == "here\n"
    await other.aclose()


async def test_a_server_that_cannot_be_started_fails_the_waiting_requests() -> None:
    async def fails() -> NoReturn:
        raise SandboxError("no process in the sandbox")

    connection = ToolConnection(1000, fails, lambda id_: Setup(id_, "/", {}, 1000, 1.0, False))
    with pytest.raises(SandboxError, match="no process in the sandbox"):
        await connection.request(lambda id_: Read(id_, "/x", 1), Content, deadline_s=T)
    assert connection.lost
    with pytest.raises(ToolError):
        await connection.request(lambda id_: Read(id_, "/x", 1), Content, deadline_s=T)


def test_the_plan_matches_a_shell_of_a_server() -> None:
    made = plan({"PATH": "/a:relative:/b", "TERM": "xterm", "X": "1"}, {"X": "2"})
    assert made.programs == ("/a/bash", "/b/bash")
    assert (made.env["TERM"], made.env["X"], made.env["PS1"]) == ("dumb", "2", "")
    assert plan({"PATH": "/a"}, {"TERM": "vt100"}).env["TERM"] == "vt100"
    assert terminal_settings().startswith(made.settings)


async def test_the_state_matches_a_shell_of_a_server(box: Toolbox) -> None:
    look = (
        "env | sort; stty -a; ulimit -a; umask; set -o; tty > /dev/null; ls -l /proc/$$/fd | wc -l; echo $-"
    )
    born = (await box.bash(look, timeout_s=T)).text
    assert servers(box) == []
    forked = (await box.bash(look, timeout_s=T, session="other")).text
    assert born == forked


async def test_the_terminal_is_as_planned(shared_driver: NamespaceDriver) -> None:
    sandbox = await shared_driver.start(SandboxSpec())
    begun = await sandbox.open_shell()
    assert isinstance(begun, OpenedTerminal)
    assert settings(begun.terminal) == terminal_settings()
    assert await sandbox.open_shell() is None
    for fd in (begun.terminal, begun.report, begun.process, begun.text, begun.exits):
        os.close(fd)
    await sandbox.close()
