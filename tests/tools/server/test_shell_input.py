"""Commands that wait for input: detected, answered, interrupted, kept and replaced."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from prorl_envs.sandbox.base import SandboxSpec
from prorl_envs.sandbox.drivers.bubblewrap import BubblewrapDriver
from prorl_envs.sandbox.drivers.local import LocalDriver, NoIsolationWarning
from prorl_envs.sandbox.filesystem.python_runtime import python_runtime
from prorl_envs.tools.client.toolbox import Toolbox
from prorl_envs.tools.types import ToolCall, ToolResult
from tests.tools.conftest import LIMITS
from tests.tools.deadlines import at_deadline

pytestmark = pytest.mark.anyio
T = 60.0


@pytest.fixture
async def programs(shared_driver: BubblewrapDriver) -> AsyncIterator[Toolbox]:
    """Toolbox with a `python3`."""
    mounts, masks, env = python_runtime()
    sandbox = await shared_driver.start(SandboxSpec(mounts=mounts, masks=masks, env=env))
    toolbox = await Toolbox.open(sandbox, limits=LIMITS)
    yield toolbox
    await toolbox.aclose()
    await sandbox.close()


async def answer(box: Toolbox, text: str) -> ToolResult:
    return await box.bash(text, timeout_s=T, is_input=True)


def waits(result: ToolResult) -> bool:
    """Return whether the command waits; check that the result's data and text agree."""
    said = "[the command waits for input" in result.text
    assert said == result.data["waiting"]
    assert not said or (result.ok and result.data["exit_code"] is None)
    return said


async def test_a_question_is_asked_and_answered(box: Toolbox) -> None:
    question = await box.bash("read -p 'name? ' x; echo hello $x; (exit 3)", timeout_s=T)
    assert waits(question)
    assert question.text.startswith("name? \n[")
    answered = await answer(box, "bob")
    assert answered.text == "hello bob\n[exit status 3]"
    assert not waits(answered)
    assert (await box.bash("echo $x", timeout_s=T)).text == "bob\n"


@pytest.mark.parametrize(
    "command",
    [
        "cat",
        "read x",
        "read -s x",
        "(read x)",
        "read -t 1000 x",
        "select x in a b; do :; done",
        "set +m; cat",
        "cat < /dev/tty | cat",
        "bash --norc",
        "sh -i",
        "stty -icanon -echo; read -n 1",
        "sleep 1000 & cat",
    ],
)
async def test_a_waiting_command_is_detected_and_can_be_interrupted(box: Toolbox, command: str) -> None:
    assert waits(await box.bash(command, timeout_s=T))
    if "sh" in command:
        assert waits(await answer(box, "C-c"))
        assert not waits(await answer(box, "C-d"))
    else:
        result = await answer(box, "C-c")
        while waits(result):  # `select` and a raw terminal need not exit at Ctrl-C
            result = await box.bash("", timeout_s=T, restart=True)
        assert result.data["exit_code"] in (130, 0)
    assert (await box.bash("echo fine", timeout_s=T)).text == "fine\n"


@pytest.mark.parametrize(
    "code",
    [
        "print(input('> '))",
        "import getpass; print(getpass.getpass('> '))",
        "import select, sys; select.select([0], [], []); print(sys.stdin.readline())",
        "import select; p = select.poll(); p.register(0, 1); p.poll(); print(input('> '))",
        "import select; p = select.epoll(); p.register(0, 1); p.poll(); print(input('> '))",
        "import sys, threading; t = threading.Thread(target=sys.stdin.readline); t.start(); t.join()",
        "import os, select, tty; tty.setcbreak(0); select.select([0, os.pipe()[0]], [], []); os.read(0, 9)",
        "import curses; curses.setupterm('xterm'); w = curses.initscr(); w.getch(); curses.endwin()",
    ],
)
async def test_programs_wait_in_many_ways(programs: Toolbox, code: str) -> None:
    assert waits(await programs.bash(f"TERM=xterm python3 -c {code!r}", timeout_s=T))
    assert (await answer(programs, "x")).data["exit_code"] == 0
    assert (await programs.bash("echo fine", timeout_s=T)).text == "fine\n"


@pytest.mark.parametrize(
    "command",
    [
        "sleep 0.4",
        "sleep 0.4 | cat",
        "sleep 0.4 & wait",
        "sleep 0.4; true",
        "mkfifo f; (sleep 0.4; echo x > f) & read x < f",
        "coproc sleep 0.4; read -u ${COPROC[0]} x; true",
        "for i in {1..60000}; do :; done; sleep 0.2",
        "(sleep 0.4; exit 0)",
        "python3 -c 'import time; time.sleep(0.4)'",
        "python3 -c 'x = sum(range(10**7))'",
        # In line mode, a command that polls more than the terminal waits for the others, like ssh.
        "python3 -c 'import os, select; select.select([0, os.pipe()[0]], [], [], 0.4)'",
        "python3 -c 'import select; select.select([], [], [], 0.4)'",
        "python3 -c 'import select; select.poll().poll(400)'",
    ],
)
async def test_a_working_or_sleeping_command_does_not_wait_for_input(programs: Toolbox, command: str) -> None:
    result = await programs.bash(command, timeout_s=T)
    assert not waits(result)
    assert result.data["exit_code"] == 0


async def test_a_conversation_with_an_interpreter(programs: Toolbox) -> None:
    assert waits(await programs.bash("python3 -i -q", timeout_s=T))
    assert (await answer(programs, "6 * 7")).text.startswith("42\n")
    looped = await answer(programs, "for i in range(2):\n    print(i)\n\n")
    assert waits(looped)
    assert "0\n1\n" in looped.text
    assert "KeyboardInterrupt" in (await answer(programs, "C-c")).text
    assert (await answer(programs, "raise SystemExit(4)")).data["exit_code"] == 4


async def test_an_empty_input_continues_to_wait(box: Toolbox) -> None:
    assert waits(await box.bash("mkfifo gate; while read -t 1000 x; do (cat gate); done", timeout_s=T))
    more = asyncio.create_task(answer(box, "go"))
    await box.bash("echo opened > gate", timeout_s=T, session="other")
    assert "opened\n" in (await more).text
    assert waits(await answer(box, ""))


async def test_end_of_input_is_a_key(box: Toolbox) -> None:
    assert waits(await box.bash("cat > file", timeout_s=T))
    assert waits(await answer(box, "one\ntwo"))
    assert (await answer(box, "C-d")).data["exit_code"] == 0
    assert await box.read("/workspace/file") == b"one\ntwo\n"


async def test_long_input_arrives_completely(box: Toolbox) -> None:
    lines = "".join(f"{n} {'x' * 3000}\n" for n in range(30))
    assert waits(await box.bash("cat > file", timeout_s=T))
    assert waits(await answer(box, lines))
    await answer(box, "C-d")
    assert (await box.read("/workspace/file")).decode() == lines


async def test_a_line_too_long_for_terminals_is_refused(box: Toolbox) -> None:
    assert waits(await box.bash("cat", timeout_s=T))
    refused = await answer(box, "x" * 5000)
    assert not refused.ok
    assert "[nothing was typed: a line of the input is longer than 4000 bytes]" in refused.text
    assert not waits(await answer(box, "C-d"))


async def test_input_that_the_command_does_not_read_never_reaches_the_shell(box: Toolbox) -> None:
    assert waits(await box.bash("read x; echo got $x", timeout_s=T))
    result = await answer(box, "one\ntouch stray\ntouch stray")
    assert result.text == "got one\n[the command did not read all of the input]"
    assert (await box.bash("ls", timeout_s=T)).text == ""


async def test_half_a_line_never_reaches_the_next_command(box: Toolbox) -> None:
    assert waits(await box.bash("read -n 1 x; echo $x", timeout_s=T))
    assert (await answer(box, "yes")).text.startswith("y\n")
    assert (await box.bash("echo next", timeout_s=T)).text == "next\n"


async def test_a_new_command_is_refused_while_another_waits(box: Toolbox) -> None:
    await box.bash("cat", timeout_s=T)
    refused = await box.bash("touch no", timeout_s=T)
    assert not refused.ok
    assert refused.data["waiting"] is True
    assert "[not run: the command before still waits for input in this session." in refused.text
    assert (await box.bash("ls", timeout_s=T, session="other")).text == ""
    assert waits(await box.bash("", timeout_s=T))
    assert (await box.bash("C-c", timeout_s=T)).data["exit_code"] == 130
    assert (await box.bash("ls", timeout_s=T)).text == ""


@pytest.mark.parametrize("text", ["yes", "", "C-c"])
async def test_input_without_a_waiting_command_is_refused(box: Toolbox, text: str) -> None:
    for _ in range(2):
        result = await answer(box, text)
        assert not result.ok
        assert result.text == "[nothing was typed: no command waits for input in this session]"
        await box.bash("true", timeout_s=T)


async def test_a_command_that_exits_by_itself_is_reported_with_the_next_call(box: Toolbox) -> None:
    await box.bash("sh -c 'echo $$ > pid; exec cat'; echo over; (exit 4)", timeout_s=T)
    await box.run(["sh", "-c", "kill $(cat pid)"], timeout_s=T)
    result = await answer(box, "")
    while waits(result):  # it takes a moment to exit
        result = await answer(box, "")
    assert result.text.endswith("over\n[exit status 4]")


async def test_a_shell_that_exits_while_its_command_waits_is_replaced(box: Toolbox) -> None:
    await box.bash("cat", timeout_s=T)
    await box.end_processes()
    result = await box.bash("echo back", timeout_s=T)
    assert result.text.startswith("back\n[before this command, the shell was killed by signal 9")


async def test_an_answered_command_still_has_a_deadline(box: Toolbox) -> None:
    async def answered(limit_s: float) -> ToolResult:
        await box.bash("kept=yes; read x; echo before; sleep 1000", timeout_s=T)
        return await box.bash("go", timeout_s=limit_s, is_input=True)

    result = await at_deadline(answered)
    assert result.text.endswith(" s: it was interrupted]")
    assert (await box.bash("echo $kept", timeout_s=T)).text == "yes\n"


async def test_a_cancelled_answer_leaves_the_session_usable(box: Toolbox) -> None:
    await box.bash("kept=yes; read x; touch begun; sleep 1000; touch ended", timeout_s=T)
    call = asyncio.create_task(answer(box, "go"))
    await box.run(["sh", "-c", "until [ -e begun ]; do sleep 0.01; done"], timeout_s=T)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert (await box.bash("echo $kept; ls", timeout_s=T)).text == "yes\nbegun\n"


async def test_a_session_can_be_restarted(box: Toolbox) -> None:
    await box.bash("x=1; cd /tmp; cat", timeout_s=T)
    result = await box.bash("echo ${x-unset} $PWD", timeout_s=T, restart=True)
    assert result.text == "unset /workspace\n[this is a new shell]"
    assert (await box.bash("", timeout_s=T, restart=True)).text == "[this is a new shell]"


async def test_restarting_kills_the_waiting_shell(box: Toolbox) -> None:
    result = await box.bash("exec cat", timeout_s=T)
    assert (
        "[the shell could not report any more (was it replaced by `exec`, `ulimit -n` lowered, or "
        in result.text
    )
    assert (await box.bash("echo back", timeout_s=T)).text == "back\n"


async def test_a_flood_before_the_question_is_bounded(box: Toolbox) -> None:
    result = await box.bash("head -c 3000000 /dev/zero | tr '\\0' x; echo; read -p '? ' y", timeout_s=T)
    assert waits(result)
    assert "x\n? \n[" in result.text
    assert result.truncated_bytes == 3_000_003 - box.limits.output_bytes


async def test_the_model_uses_the_shell_by_its_schema(box: Toolbox) -> None:
    async def call(**arguments: object) -> ToolResult:
        return await box.call(ToolCall("1", "bash", arguments), timeout_s=T)

    assert waits(await call(command="read x; echo $x", session="b"))
    assert (await call(command="echo apart")).text == "apart\n"
    assert (await call(command="yes", is_input=True, session="b")).text == "yes\n"
    assert (await call(command="echo a", restart=True, session="b")).text.startswith("a\n")
    assert "must be true or false" in (await call(command="a", is_input="yes")).text
    assert "at most 64 characters" in (await call(command="a", session="x" * 65)).text


async def test_too_many_sessions_are_the_models_error(box: Toolbox) -> None:
    for n in range(16):
        assert (await box.bash(f"x={n}", timeout_s=T, session=str(n))).ok
    refused = await box.bash("true", timeout_s=T, session="one more")
    assert not refused.ok
    assert refused.text == "[not run: 16 sessions are open already; use one of them]"
    assert (await box.bash("echo $x", timeout_s=T, session="0")).text == "0\n"


async def test_a_waiting_command_is_detected_without_isolation_too(run_dir: Path) -> None:
    """Without isolation, /proc shows the processes of the whole machine, with the server's numbers."""
    with pytest.warns(NoIsolationWarning):
        driver = LocalDriver()
    try:
        toolbox = await Toolbox.open(await driver.start(SandboxSpec()))
        assert waits(await toolbox.bash("read x; echo $x", timeout_s=T))
        assert (await answer(toolbox, "yes")).text == "yes\n"
        assert not waits(await toolbox.bash("sleep 0.4", timeout_s=T))
        await toolbox.aclose()
    finally:
        await driver.aclose()
