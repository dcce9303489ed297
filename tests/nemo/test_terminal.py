"""Interactive sessions on real sandboxes, without NeMo Gym (see also `test_provider_terminal.py`)."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from prorl_envs.nemo.terminal import ENTRY, TerminalSession
from prorl_envs.sandbox.base import Sandbox, SandboxSpec
from prorl_envs.sandbox.drivers.bubblewrap import BubblewrapDriver
from prorl_envs.tools.protocol.messages import encode
from prorl_envs.tools.protocol.terminal import Open

pytestmark = pytest.mark.anyio
T = 60.0


class Over(Exception):
    """Error that a failed session raises."""


@pytest.fixture
async def sandbox(shared_driver: BubblewrapDriver) -> AsyncIterator[Sandbox]:
    sandbox = await shared_driver.start(SandboxSpec())
    yield sandbox
    await sandbox.close()


async def session(sandbox: Sandbox, *argv: str, terminal: bool = True) -> TerminalSession:
    request = Open([*argv], "/workspace", {"A": "b"}, terminal, 30, 100)
    return await TerminalSession.open(sandbox, request, error=Over)


async def everything(session: TerminalSession) -> bytes:
    return b"".join([chunk async for chunk in session])


async def test_a_program_has_a_terminal_of_its_own(sandbox: Sandbox) -> None:
    command = "tty; stty size; echo $A $TERM; pwd; cut -d' ' -f8 /proc/$$/stat; echo $$; exit 3"
    async with await session(sandbox, "bash", "-c", command) as one:
        lines = (await everything(one)).decode().split("\r\n")
        assert lines[0].startswith("/dev/pts/")
        assert lines[1:4] == ["30 100", "b xterm-256color", "/workspace"]
        assert lines[4] == lines[5]  # it is in the foreground
        assert await one.wait_exit(timeout_s=T) == 3


async def test_the_two_outputs_are_separate_on_pipes(sandbox: Sandbox) -> None:
    async with await session(
        sandbox, "sh", "-c", "echo out; echo err >&2; kill -15 $$", terminal=False
    ) as one:
        assert (await everything(one), await one.read_stderr()) == (b"out\n", b"err\n")
        assert await one.wait_exit() == 143


async def test_a_background_process_does_not_keep_a_session_open(sandbox: Sandbox) -> None:
    async with await session(sandbox, "sh", "-c", "sleep 1000 & echo done") as one:
        assert await everything(one) == b"done\r\n"


async def test_closing_kills_a_program_that_ignores_signals_and_keeps_writing(sandbox: Sandbox) -> None:
    one = await session(sandbox, "sh", "-c", "trap '' HUP INT TERM; yes", terminal=False)
    await one.read(timeout_s=T)
    await one.write(b"x" * 1_000_000)
    await one.close()
    async with await session(sandbox, "sh", "-c", "while pgrep -x yes; do :; done; echo gone") as two:
        assert (await everything(two)).endswith(b"gone\r\n")


async def test_closing_the_sandbox_closes_a_session(sandbox: Sandbox) -> None:
    one = await session(sandbox, "sleep", "1000")
    reading = asyncio.create_task(one.read())
    await sandbox.close()
    with pytest.raises(Over):
        await reading
    assert one.closed
    await one.close()


async def test_a_missing_program_raises(sandbox: Sandbox) -> None:
    async with await session(sandbox, "/no/such") as one:
        with pytest.raises(Over, match="No such file"):
            await one.wait_exit(timeout_s=T)


async def test_a_host_that_violates_the_protocol_loses_only_that_session(sandbox: Sandbox) -> None:
    sock = await sandbox.spawn(ENTRY)
    sock.send(b"\0\0\0\1x")
    sock.close()
    async with await session(sandbox, "echo", "fine") as one:
        assert await everything(one) == b"fine\r\n"


async def test_a_session_that_violates_the_protocol_is_closed() -> None:
    one = TerminalSession("s", "pty", Over)
    one.data_received(bytes(encode(Open(["x"], "/", {}, True, 1, 1))))
    with pytest.raises(Over, match="broke the protocol"):
        await one.read()
