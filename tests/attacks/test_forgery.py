"""Attempts to speak for the shell, the session or the tool server, or to keep them from speaking.

A session belongs to the agent, and it may spoil its own. What must hold: each call ends within its time and
says what became of it, the tools answer afterwards, and the neighbour notices nothing.
"""

import asyncio

import pytest

from prorl_envs.tools.client import Toolbox
from tests.attacks.attempts import T, python, usable

# The tool server is the same whichever driver joins it to its sandbox.
pytestmark = [
    pytest.mark.anyio,
    pytest.mark.parametrize("driver_name", ["namespaces", "instance"], indirect=True, scope="module"),
]

#: Where the shell reports: it keeps that pipe for itself while a command runs, under another number.
FIND = "for f in /proc/$$/fd/*; do [ -p $f ] && found=$f; done"


@pytest.mark.parametrize(
    "noise",
    [
        "head -c 30M /dev/zero",
        "yes 0011223344556677 0 /forged | head -c 30M",
        "yes | tr -d '\\n' | head -c 30M",
        "head -c 30M /dev/urandom",
    ],
)
async def test_a_flood_where_the_shell_reports(box: Toolbox, noise: str) -> None:
    flood = f"{FIND}; {{ ({noise}) & }} > $found; echo ${{found:+found it}}"
    assert (await box.bash(flood, timeout_s=T)).text.endswith("found it\n")
    for status in (0, 3, 200):
        result = await box.bash(f"(exit {status})", timeout_s=T)
        assert (result.data["exit_code"], result.data["cwd"]) == (status, "/workspace")


async def test_reports_that_are_stolen_on_their_way(box: Toolbox) -> None:
    """Whoever opens a pipe by /proc can read it too."""
    thief = "trap '' HUP INT TERM; exec timeout 30 cat > stolen 2>&1"
    await box.bash(f"{FIND}; {{ ({thief}) & }} < $found; echo ${{found:+found it}}", timeout_s=2)
    for _ in range(3):
        result = await box.bash("echo on", timeout_s=2)
        assert "on\n" in result.text or result.data["exit_code"] is None
    await usable(box)
    assert (await box.run(["test", "-e", "stolen"], timeout_s=T)).exit_code == 0


async def test_a_nonce_that_is_found_in_the_shell_s_memory(box: Toolbox) -> None:
    """The agent may lie to itself about how its command ended; the next one is told the truth."""
    steal = python("""
        import os, re
        shell = os.getppid()
        found = set()
        for line in open(f"/proc/{shell}/maps"):
            start, end = (int(part, 16) for part in line.split()[0].split("-"))
            if " rw" in line and end - start < 1 << 24:
                try:
                    data = os.pread(os.open(f"/proc/{shell}/mem", os.O_RDONLY), end - start, start)
                except OSError:
                    continue
                found |= set(re.findall(rb"(?<![0-9a-f])[0-9a-f]{16}(?![0-9a-f])", data))
        for name in os.listdir(f"/proc/{shell}/fd"):
            path = f"/proc/{shell}/fd/{name}"
            if os.readlink(path).startswith("pipe:"):
                for nonce in found:
                    os.write(os.open(path, os.O_WRONLY), b"\\0" + nonce + b" 0 /forged\\0")
        print("tried", len(found) > 0)
        raise SystemExit(5)
    """)
    result = await box.bash(steal, timeout_s=T)
    assert result.data["exit_code"] in (0, 5)
    assert (await box.bash("(exit 4)", timeout_s=T)).data["exit_code"] in (4, 5)
    last = await box.bash("(exit 6)", timeout_s=T)
    assert (last.data["exit_code"], last.data["cwd"]) == (6, "/workspace")


@pytest.mark.parametrize(
    "keep",
    [
        # who reads the terminal first gets what is typed
        'setsid python3 -c \'import os, signal; signal.alarm(30); fd = os.open("/dev/pts/0", os.O_RDWR | '
        "os.O_NOCTTY)\nwhile True: os.read(fd, 1)' & sleep 0.3",
        # the terminal is kept from saying anything
        "python3 -c 'import termios; termios.tcflow(1, termios.TCOOFF)'",
        # nobody else may open it
        "python3 -c 'import fcntl, termios; fcntl.ioctl(1, termios.TIOCEXCL)'",
        # its foreground is a group that is not there any more, or sleeps
        "python3 -c 'import os, signal; signal.signal(signal.SIGTTOU, signal.SIG_IGN); os.setpgid(0, 0); "
        "os.tcsetpgrp(0, os.getpgrp())'",
        "python3 -c 'import fcntl, struct, termios; "
        'fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 65535, 65535, 65535, 65535))\'',
        "python3 -c 'import fcntl, termios; fcntl.ioctl(0, termios.TIOCNOTTY)'",
        "python3 -c 'import fcntl, struct, termios; fcntl.ioctl(0, termios.TIOCSETD, struct.pack(\"i\", 2))'",
        "stty 0",
        "stty raw -echo -isig intr undef eof undef; printf '\\023'",
    ],
    ids=[
        "reader",
        "silenced",
        "exclusive",
        "foreground",
        "giant",
        "detached",
        "discipline",
        "hung up",
        "raw",
    ],
)
async def test_a_terminal_that_is_taken_away(box: Toolbox, keep: str) -> None:
    result = await box.bash(keep, timeout_s=3)
    assert result.text or result.ok or result.data["timed_out"]
    for _ in range(3):  # each ends in time, whatever it says
        await box.bash("echo on", timeout_s=1)
    await box.bash("echo on", timeout_s=3, restart=True)
    await usable(box)


#: Writes to the session's own channel from a cell.
CHANNEL = """
import os, struct, sys
def send(body, announced=None):
    data = struct.pack(">I", len(body) if announced is None else announced) + body
    while data:
        data = data[os.write(3, data):]
"""
BROKE = "wrote to the session's own channel"


@pytest.mark.parametrize(
    "forged",
    [
        'send(b"", 0xffffffff)',
        'send(b"x" * (9 << 20))',
        'send(b"\\x93\\x01\\xa0")',
        'send(b"\\x93\\x01\\xa0\\xc0")',
        'send(b"\\x93\\xa11\\xa0\\x90")',
        'send(b"\\x93\\x01\\xa2\\xff\\xfe\\x90")',
        'send(b"\\x93\\x01\\xa0\\x91" + b"\\x91" * 100000)',
        'send(b"\\x93\\x01\\xda\\xff\\xff" + b"x" * 0xffff + b"\\x90")',
    ],
    ids=["endless", "giant", "half", "nil", "type", "unicode", "deep", "name"],
)
async def test_a_cell_that_breaks_the_protocol(python_box: Toolbox, forged: str) -> None:
    result = await python_box.python(f"{CHANNEL}\n{forged}\nwhile True: pass", timeout_s=T)
    assert not result.ok and BROKE in result.text
    assert (await python_box.python("6 * 7", timeout_s=T)).text == "42\n"


@pytest.mark.parametrize(
    "forged",
    [
        # a frame that never ends, byte by byte
        'os.write(3, struct.pack(">I", 1000))\nimport time\nwhile True: os.write(3, b"x"); time.sleep(0.3)',
        # the ends of other cells, long gone or not yet there
        'for n in range(100000, 103000): send(b"\\x93\\xce" + struct.pack(">I", n) + b"\\xa0\\x90")\n'
        "while True: pass",
    ],
    ids=["slow", "wrong ids"],
)
async def test_a_cell_whose_end_never_comes(python_box: Toolbox, forged: str) -> None:
    result = await python_box.python(f"{CHANNEL}\n{forged}", timeout_s=1)
    assert not result.ok and result.data["timed_out"] is True
    result = await python_box.python("6 * 7", timeout_s=T)
    assert result.text.endswith("42\n") or BROKE in result.text  # what follows a half frame is garbage
    assert (await python_box.python("6 * 7", timeout_s=T)).text == "42\n"


async def test_the_end_of_the_next_cell_told_ahead(python_box: Toolbox) -> None:
    """Its own session's answers are the agent's to spoil; the one after a new session's start is right."""
    ahead = 'for number in range(1, 300): send(b"\\x93\\xcd" + struct.pack(">H", number) + b"\\xa3lie\\x90")'
    result = await python_box.python(f"{CHANNEL}\n{ahead}", timeout_s=T)
    assert result.data["error"] in ("lie", None)
    told = (await python_box.python("exit()", timeout_s=T)).text
    async with asyncio.timeout(T):
        while "the Python session exited with status 0" not in told:  # a lie may come before its end
            told = (await python_box.python("1", timeout_s=T)).text
    assert (await python_box.python("6 * 7", timeout_s=T)).text == "42\n"


async def test_a_child_that_keeps_the_session_s_channel(python_box: Toolbox) -> None:
    """It was forked by a cell, outlives the session, and answers for every cell it can think of."""
    code = f"""{CHANNEL}
import time
if os.fork() == 0:
    os.setsid()
    import signal
    signal.alarm(20)
    while True:
        for number in range(1, 200):
            send(b"\\x93\\xcd" + struct.pack(">H", number) + b"\\xa5child\\x90")
        time.sleep(0.01)
"""
    await python_box.python(code, timeout_s=T)
    await python_box.python("import os; os._exit(1)", timeout_s=T)
    await python_box.end_processes()
    await python_box.python("1", timeout_s=T)
    assert (await python_box.python("6 * 7", timeout_s=T)).text == "42\n"


async def test_every_descriptor_and_every_process_that_can_be_found(box: Toolbox) -> None:
    """Frames of every kind, written to whatever opens below /proc."""
    result = await box.bash(
        python("""
            import glob, os, stat
            frame = b"\\0\\0\\0\\x07\\x97\\x01\\x01\\xa2hi\\0" * 200
            tried = 0
            for path in glob.glob("/proc/[0-9]*/fd/*") + glob.glob("/proc/[0-9]*/task/*/fd/*"):
                try:
                    if stat.S_ISDIR(os.stat(path).st_mode):
                        continue
                    fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
                    os.write(fd, frame)
                    tried += 1
                except OSError:
                    pass
            print("written", tried > 0)
        """),
        timeout_s=T,
    )
    assert "written True" in result.text
    await box.write("/workspace/kept", b"kept")
    assert await box.read("/workspace/kept") == b"kept"
    await usable(box)


async def test_the_text_of_a_command_changed_behind_the_shell(box: Toolbox) -> None:
    """A long command lies in a memory file, which the agent's processes can open and write to."""
    spoil = "while :; do for f in /proc/$$/fd/*; do printf 'echo spoiled' 1<>$f; done; done 2> /dev/null & :"
    await box.bash(f"({spoil}) & sleep 0.2", timeout_s=5)
    for number in range(4):
        await box.bash(f"echo whole {number} #{'x' * 600}", timeout_s=3)
    await box.end_processes()
    await usable(box)
