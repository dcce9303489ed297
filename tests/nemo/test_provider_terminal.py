"""Interactive sessions through NeMo Gym's `sandbox.pty` (0.7)."""

import asyncio
from typing import Any

import pytest

pytest.importorskip("nemo_gym", reason="run by scripts/test-nemo.sh in an environment of its own")

# mypy: disable-error-code="import-not-found,import-untyped"
from nemo_gym.sandbox.providers import base

if not hasattr(base, "SandboxPtySpec"):
    pytest.skip("this NeMo Gym has no terminals", allow_module_level=True)

pytestmark = [pytest.mark.nemo, pytest.mark.anyio]
T = 60.0


async def read_until(session: Any, text: bytes) -> bytes:
    seen = b""
    while text not in seen:
        chunk = await session.read(timeout_s=T)
        assert chunk, f"ended after {seen!r}"
        seen += chunk
    return seen


async def test_a_shell_keeps_its_state_on_a_terminal(box: Any) -> None:
    async with await box.pty.create(rows=30, cols=100, env={"PS1": "$ "}) as shell:
        assert shell.mode == "pty"
        assert (await box.pty.exec("x=1; cd /tmp", session=shell)).return_code == 0
        done = await box.pty.exec("echo $x $PWD; stty size < /dev/tty; false", session=shell)
        assert "1 /tmp" in done.stdout and "30 100" in done.stdout  # besides prompts and echo
        assert done.return_code == 1
        await shell.resize(40, 120)
        await shell.write(b"stty size; exit 7\n")
        assert b"40 120" in await read_until(shell, b"40 120")
        assert await shell.wait_exit(timeout_s=T) == 7
        while await shell.read(timeout_s=T):
            pass
    assert shell.closed


async def test_a_command_runs_to_its_end_on_a_terminal(box: Any) -> None:
    done = await box.pty.exec("tty; echo $TERM; echo err >&2; exit 3", cwd="/tmp")
    assert done.return_code == 3
    assert done.stdout.replace("\r", "").splitlines()[0].startswith("/dev/pts/")
    assert "err" in done.stdout


async def test_without_a_terminal_the_outputs_are_separate(box: Any) -> None:
    done = await box.pty.exec("tty; echo err >&2; kill -9 $$", pty=False, env={"A": "b"})
    assert (done.stdout, done.stderr, done.return_code) == ("not a tty\n", "err\n", 137)


async def test_ctrl_c_and_signals_reach_the_program(box: Any) -> None:
    async with await box.pty.create(
        "trap 'echo got it; exit 4' INT; echo ready; while :; do sleep 0.01; done"
    ) as one:
        await read_until(one, b"ready")
        await one.write(b"\x03")
        await read_until(one, b"got it")
        assert await one.wait_exit(timeout_s=T) == 4
    async with await box.pty.create("echo ready; sleep 1000") as two:
        await read_until(two, b"ready")
        await two.send_signal("SIGTERM")
        assert await two.wait_exit(timeout_s=T) == 143
        with pytest.raises(ValueError, match="SIGINT"):
            await two.send_signal("SIGSTOP")


async def test_large_output_waits_for_its_reader(box: Any) -> None:
    async with await box.pty.create("head -c 30000000 /dev/zero; echo done > finished", pty=False) as session:
        assert (await box.exec("sleep 0.2; ls")).stdout == ""  # it is still blocked: no reader yet
        size = 0
        while chunk := await session.read(timeout_s=T):
            assert len(chunk) < 6_000_000
            size += len(chunk)
        assert size == 30_000_000 and await session.wait_exit(timeout_s=T) == 0


async def test_large_input_arrives(box: Any) -> None:
    async with await box.pty.create("head -c 20000000 | wc -c", pty=False) as session:
        await session.write(b"x" * 20_000_000)
        assert await read_until(session, b"\n") == b"20000000\n"


async def test_a_closed_session_leaves_no_process(box: Any) -> None:
    session = await box.pty.create("sleep 1000 & echo ready; sleep 1000")
    await read_until(session, b"ready")
    await session.close()
    await session.close()
    assert (await box.exec("while pgrep -x sleep; do :; done", timeout_s=T)).return_code == 0
    with pytest.raises(base.SandboxPtyError):
        await session.write(b"x")
    with pytest.raises(base.SandboxPtyError):
        await session.read()


async def test_failed_starts_and_a_closed_sandbox_raise_errors(box: Any) -> None:
    with pytest.raises(base.SandboxPtyError, match="No such file"):
        await (await box.pty.create(cwd="/no/such")).read(timeout_s=T)
    with pytest.raises(ValueError, match="nobody"):
        await box.pty.create(user="nobody")
    session = await box.pty.create("sleep 1000")
    reading = asyncio.create_task(session.read())
    await asyncio.sleep(0)
    await box.stop()
    with pytest.raises(base.SandboxPtyError):
        await reading
    with pytest.raises(base.SandboxPtyError):
        await session.wait_exit()
    await session.close()


async def test_a_paused_sandbox_does_nothing_until_it_is_resumed(box: Any) -> None:
    async with await box.pty.create("while :; do echo tick; sleep 0.01; done") as session:
        await read_until(session, b"tick")
        await box.pause()
        assert await box.status() == base.SandboxStatus.PAUSED
        assert (await box.exec("true")).error_type == "sandbox"
        with pytest.raises(TimeoutError):
            while True:  # earlier output still arrives
                await session.read(timeout_s=0.3)
        await box.resume()
        assert await box.status() == base.SandboxStatus.RUNNING
        await read_until(session, b"tick")
