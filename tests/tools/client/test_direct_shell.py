"""Shells that a tool server lends to the host. The host uses a shell directly and returns it."""

import asyncio
import os
import socket

import pytest

from prorl_envs.errors import ToolError
from prorl_envs.tools.client.connection import ToolConnection
from prorl_envs.tools.client.toolbox import Toolbox
from prorl_envs.tools.protocol.messages import Bash, BashDone, Done, Read, encode
from tests.tools.deadlines import at_deadline

pytestmark = pytest.mark.anyio
T = 60.0


async def is_lent(box: Toolbox, session: str = "main") -> bool:
    return session in (await box._tools.connection())._lent


@pytest.fixture
async def lent(box: Toolbox) -> Toolbox:
    """Toolbox whose main shell is lent."""
    await box.bash("kept=yes", timeout_s=T)
    assert await is_lent(box)
    return box


async def usable(box: Toolbox) -> bool:
    """Check that the shell is the same, and is soon lent again; on a busy machine, this may take several
    commands."""
    for _ in range(8):
        if (await box.bash("echo $kept", timeout_s=T)).text != "yes\n":
            return False
        if await is_lent(box):
            return True
    return False


async def test_a_lent_shell_gives_the_servers_answer(lent: Toolbox) -> None:
    shell = (await lent._tools.connection())._lent["main"]
    result = await lent.bash("cd /tmp; printf 'a\\xffb'; (exit 7)", timeout_s=T)
    assert result.text == "a\ufffdb\n[exit status 7]"
    assert result.data == {"exit_code": 7, "cwd": "/tmp", "timed_out": False, "waiting": False}
    assert (await lent.bash("echo $? $PWD", timeout_s=T)).text == "7 /tmp\n"
    assert (await lent._tools.connection())._lent["main"] is shell


async def test_the_last_status_returns_with_the_shell(lent: Toolbox) -> None:
    await lent.bash("cd /tmp; (exit 7)", timeout_s=T)
    assert await is_lent(lent)
    several_lines = "echo $?\necho $PWD"  # the server evaluates them
    assert (await lent.bash(several_lines, timeout_s=T)).text == "7\n/tmp\n"


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("echo first; sleep 0.1; echo last", "first\nlast\n"),
        ("head -c 100000 /dev/zero | tr '\\0' x", "bytes of output left out"),
        (f"echo {'x' * 600}", f"{'x' * 600}\n"),
        ("echo 'a\nb'", "a\nb\n"),
        ("read -p 'name? '", "waits for input"),
        ("stty -icanon; echo set", "set\n"),
        ("exit 3", "[exit status 3]\n[the shell exited with status 3"),
        ("kill -9 $$", "the shell was killed by signal 9"),
        ("exec 41>&-; sleep 0.1; echo on", "on\n"),
    ],
)
async def test_unusual_commands_are_handled_by_the_server(lent: Toolbox, command: str, said: str) -> None:
    result = await lent.bash(command, timeout_s=T)
    assert said in result.text
    again = await lent.bash("kept=yes", timeout_s=T, restart=result.data["waiting"])
    assert "lost" not in again.text
    assert await usable(lent)


async def test_output_between_commands_returns_the_shell(lent: Toolbox) -> None:
    await lent.bash("(sleep 0.1; head -c 300000 /dev/zero | tr '\\0' x; touch written) & disown", timeout_s=T)
    await lent.run(["sh", "-c", "until [ -e written ]; do sleep 0.01; done"], timeout_s=T)
    assert not await is_lent(lent)
    result = await lent.bash("echo now", timeout_s=T)
    assert result.text.startswith("xxx")
    assert result.text.endswith("x" * 100 + "now\n")
    assert await usable(lent)


async def test_a_lent_shell_that_exits_between_commands_is_reported(lent: Toolbox) -> None:
    await lent.end_processes()
    result = await lent.bash("echo ${kept-unset}", timeout_s=T)
    assert result.text.startswith("unset\n[before this command, the shell was killed by signal 9")


async def test_a_command_is_interrupted_at_its_deadline(lent: Toolbox) -> None:
    result = await at_deadline(lambda limit_s: lent.bash("echo before; sleep 100", timeout_s=limit_s))
    assert result.text.endswith(" s: it was interrupted]")
    assert await usable(lent)


async def test_a_command_can_be_cancelled_at_once(lent: Toolbox) -> None:
    for _ in range(8):  # at any stage of its start
        call = asyncio.create_task(lent.bash("sleep 100", timeout_s=T))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert (await lent.bash("echo $kept", timeout_s=T)).duration_s < 10
        assert await usable(lent)


async def test_sessions_are_lent_independently(lent: Toolbox) -> None:
    await lent.bash("kept=other", timeout_s=T, session="second")
    calls = (lent.bash("echo $kept", timeout_s=T, session=name) for name in ("main", "second"))
    assert [result.text for result in await asyncio.gather(*calls)] == ["yes\n", "other\n"]
    assert await is_lent(lent, "second")


# A hostile server, played by the test


async def lend(descriptors: list[int], request: Bash | Read) -> ToolConnection:
    """Open a connection whose server answers a request by lending these descriptors."""
    ours, theirs = socket.socketpair()
    with theirs:
        connection = await ToolConnection.open(ours)
        answer = encode(BashDone(1, "", 0, 0, "/", False, "", lent=b"settings"))
        socket.send_fds(theirs, [answer], descriptors)
        try:
            await connection.request(lambda _: request, type(answer_of(request)), deadline_s=T)
        except ToolError:
            await connection.aclose()
            raise
        return connection


def answer_of(request: Bash | Read) -> BashDone | Done:
    return BashDone(1, "", 0, 0, "", False, "") if isinstance(request, Bash) else Done(1)


@pytest.mark.parametrize("count", [0, 1, 3])
async def test_descriptors_of_the_wrong_kind_are_rejected(count: int) -> None:
    connection = await lend([0] * count, Bash(1, "main", ":", T))
    assert not connection._lent
    await connection.aclose()


async def test_a_terminal_with_blocking_reads_is_rejected() -> None:
    master, slave = os.openpty()
    reading, writing = os.pipe()
    try:
        connection = await lend([master, reading, slave], Bash(1, "main", ":", T))
        assert not connection._lent
        await connection.aclose()
    finally:
        for fd in (master, slave, reading, writing):
            os.close(fd)


async def test_only_the_answer_to_a_command_may_lend() -> None:
    with pytest.raises(ToolError, match="in a wrong reply"):
        await lend([0, 0, 0], Read(1, "/", 1))
