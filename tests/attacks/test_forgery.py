"""Attempts to forge or block messages of the shell, the session or the tool server.

An agent may break its own session. The tests check that each call returns in time and reports the outcome,
that the tools answer afterwards, and that the neighbour is not affected.
"""

import asyncio

import pytest

from prorl_envs.tools.client.toolbox import Toolbox
from tests.attacks.attempts import T, python, usable

# The tool server is the same for each driver.
pytestmark = [
    pytest.mark.anyio,
    pytest.mark.parametrize(
        "driver_name", ["bubblewrap", "apptainer-instance"], indirect=True, scope="module"
    ),
]

#: Path of the shell's report pipe: while a command runs, the shell holds it under another number.
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
async def test_a_flood_on_the_report_pipe(box: Toolbox, noise: str) -> None:
    flood = f"{FIND}; {{ ({noise}) & }} > $found; echo ${{found:+found it}}"
    assert (await box.bash(flood, timeout_s=T)).text.endswith("found it\n")
    for status in (0, 3, 200):
        result = await box.bash(f"(exit {status})", timeout_s=T)
        assert (result.data["exit_code"], result.data["cwd"]) == (status, "/workspace")


async def test_reports_that_are_stolen(box: Toolbox) -> None:
    """A process that can open the pipe through /proc can also read from it."""
    thief = "trap '' HUP INT TERM; exec timeout 30 cat > stolen 2>&1"
    await box.bash(f"{FIND}; {{ ({thief}) & }} < $found; echo ${{found:+found it}}", timeout_s=2)
    begun = await box.run(["sh", "-c", "until [ -e stolen ]; do sleep 0.01; done"], timeout_s=T)
    assert begun.exit_code == 0
    for _ in range(3):
        result = await box.bash("echo on", timeout_s=2)
        assert "on\n" in result.text or result.data["exit_code"] is None
    await usable(box)


async def test_a_nonce_found_in_the_shell_s_memory(box: Toolbox) -> None:
    """The agent may forge its own command's status; the next command's report is correct."""
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
        # the process that reads the terminal first gets the typed text
        'setsid python3 -c \'import os, signal; signal.alarm(30); fd = os.open("/dev/pts/0", os.O_RDWR | '
        "os.O_NOCTTY)\nwhile True: os.read(fd, 1)' & sleep 0.3",
        # the terminal's output is stopped
        "python3 -c 'import termios; termios.tcflow(1, termios.TCOOFF)'",
        # no other process may open it
        "python3 -c 'import fcntl, termios; fcntl.ioctl(1, termios.TIOCEXCL)'",
        # its foreground is a group that no longer exists, or sleeps
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
async def test_a_terminal_that_is_taken_over(box: Toolbox, keep: str) -> None:
    result = await box.bash(keep, timeout_s=3)
    assert result.text or result.ok or result.data["timed_out"]
    for _ in range(3):  # each returns in time, with any content
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
        # an endless frame, byte by byte
        'os.write(3, struct.pack(">I", 1000))\nimport time\nwhile True: os.write(3, b"x"); time.sleep(0.3)',
        # end messages for other cells, finished or not yet started
        'for n in range(100000, 103000): send(b"\\x93\\xce" + struct.pack(">I", n) + b"\\xa0\\x90")\n'
        "while True: pass",
    ],
    ids=["slow", "wrong ids"],
)
async def test_a_cell_whose_end_message_never_arrives(python_box: Toolbox, forged: str) -> None:
    result = await python_box.python(f"{CHANNEL}\n{forged}", timeout_s=1)
    assert not result.ok and result.data["timed_out"] is True
    result = await python_box.python("6 * 7", timeout_s=T)
    assert result.text.endswith("42\n") or BROKE in result.text  # the bytes after a half frame are garbage
    assert (await python_box.python("6 * 7", timeout_s=T)).text == "42\n"


async def test_an_end_message_forged_for_the_next_cell(python_box: Toolbox) -> None:
    """The agent may forge answers of its own session; the answer after a restart is correct."""
    ahead = 'for number in range(1, 300): send(b"\\x93\\xcd" + struct.pack(">H", number) + b"\\xa3lie\\x90")'
    result = await python_box.python(f"{CHANNEL}\n{ahead}", timeout_s=T)
    assert result.data["error"] in ("lie", None)
    told = (await python_box.python("exit()", timeout_s=T)).text
    async with asyncio.timeout(T):
        while "the Python session exited with status 0" not in told:  # a forgery may come before its end
            told = (await python_box.python("1", timeout_s=T)).text
    assert (await python_box.python("6 * 7", timeout_s=T)).text == "42\n"


async def test_a_child_that_holds_the_session_s_channel(python_box: Toolbox) -> None:
    """The cell's fork outlives the session, and sends answers for all cell numbers that it can guess."""
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


async def test_every_descriptor_and_process_that_can_be_found(box: Toolbox) -> None:
    """Frames of every kind, written to every path below /proc that can be opened."""
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


async def test_a_command_s_text_changed_before_the_shell_reads_it(box: Toolbox) -> None:
    """A long command is in a memory file, which the agent's processes can open and write to."""
    spoil = "while :; do for f in /proc/$$/fd/*; do printf 'echo spoiled' 1<>$f; done; done 2> /dev/null & :"
    await box.bash(f"({spoil}) & sleep 0.2", timeout_s=5)
    for number in range(4):
        await box.bash(f"echo whole {number} #{'x' * 600}", timeout_s=3)
    await box.end_processes()
    await usable(box)
