"""Attempts to exhaust resources that sandboxes share. The simpler ones are in tests/sandbox."""

import asyncio

import pytest

from prorl_envs.errors import SandboxError, SandboxLimit
from prorl_envs.tools.client.toolbox import Toolbox
from tests.attacks.attempts import OpenBox, T, python, usable

pytestmark = [pytest.mark.anyio, pytest.mark.thorough]

TOO_MANY = "limit of 40 processes was reached: all but its shells were killed"


async def test_a_bomb_whose_processes_fork_and_exit_all_the_time(box: Toolbox) -> None:
    """Each of its processes forks and exits, so a kill by process number always comes too late."""
    result = None
    try:
        result = await box.bash(
            python("""
                import os
                for _ in range(6):
                    try:
                        os.fork()
                    except OSError:  # at the limit: whoever ended here would make room
                        pass
                signal.alarm(20)
                forks = 0
                while forks < 3000:  # also those that are refused for the dead which nobody has collected yet
                    try:
                        if os.fork():
                            os._exit(0)
                        signal.alarm(20)
                        forks += 1
                    except OSError:
                        pass
                signal.pause()
            """),
            timeout_s=T,
        )
        said = result.text + (await box.bash("sleep 3; echo later", timeout_s=T)).text
        assert TOO_MANY in said
    except SandboxLimit as ended:
        assert "faster than they can be killed" in str(ended)  # either outcome is fair
    else:
        await usable(box)


async def test_a_process_limit_that_leaves_no_process_for_the_tool_server(box: Toolbox) -> None:
    """At the process limit, each call is answered or refused, and the agent can recover."""
    fill = "(trap '' TERM INT HUP; for i in {1..30}; do sleep 60 & done; wait) > /dev/null 2>&1 & echo filled"
    assert (await box.bash(fill, timeout_s=T)).text.endswith("filled\n")
    calls = (box.run(["sleep", "0.2"], timeout_s=T) for _ in range(20))
    for outcome in await asyncio.gather(*calls, return_exceptions=True):
        assert not isinstance(outcome, BaseException) or isinstance(outcome, OSError | SandboxError)
    await box.end_processes()
    assert (await box.run(["echo", "room"], timeout_s=T)).output == b"room\n"
    await usable(box)


@pytest.mark.parametrize("place", ["/tmp", '"$HOME"', "/var/tmp"])
async def test_a_disk_filled_outside_the_workspace(box: Toolbox, place: str) -> None:
    # Never twice the limit, at which the sandbox would be killed. Files that others remove meanwhile can hide
    # what this one writes, until its tree is measured.
    write = "for i in {1..36}; do head -c 1M /dev/zero > $RANDOM.$i; sleep 0.1; done"
    write += "; for i in {1..200}; do sleep 0.1; done; echo wrote all"
    result = await box.bash(f"cd {place}; {write}", timeout_s=T)
    # /var/tmp is /tmp, or small and in memory.
    full = "disk limit of 20 MB was reached" in result.text or "No space left" in result.text
    assert full, result.text
    await usable(box)


async def test_a_tree_of_1500_nested_directories(box: Toolbox) -> None:
    nest = """
        import os
        for _ in range(1500):
            os.mkdir("d")
            os.chdir("d")
        while True:
            pass
    """
    with pytest.raises(SandboxLimit, match="nested more than 200 deep"):
        await box.bash(python(nest), timeout_s=T)


async def test_descriptors_that_are_passed_around_on_sockets(box: Toolbox) -> None:
    """Descriptors in flight on sockets belong to no process."""
    result = await box.bash(
        python("""
            import array, os, socket
            held = []
            fds = array.array("i", [os.open("/dev/null", os.O_RDONLY) for _ in range(100)])
            try:
                for _ in range(150):
                    one, other = socket.socketpair()
                    for _ in range(200):
                        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)]
                        one.sendmsg([b"x"], rights, socket.MSG_DONTWAIT)
                    held.append((one, other))
            except OSError as error:
                print("refused:", type(error).__name__, error.errno)
            else:
                print("no end")
        """),
        timeout_s=T,
    )
    assert result.text.startswith("refused:")
    assert (await box.run(["echo", "still"], timeout_s=T)).output == b"still\n"


async def test_a_bomb_that_runs_while_its_sandbox_is_closed(open_box: OpenBox, neighbour: Toolbox) -> None:
    """The fixtures check for leaks."""
    boxes = [await open_box() for _ in range(3)]
    bomb = python("""
        import os
        for _ in range(5):
            os.fork()
        os.setsid()
        signal.alarm(20)
        kept = [os.memfd_create("x") for _ in range(50)]
        while True:
            if os.fork():
                os._exit(0)
            signal.alarm(20)
            open(f"f{os.getpid() % 50}", "wb").write(bytes(10000))
    """)
    calls = [asyncio.create_task(box.bash(f"echo begun > begun; {bomb}", timeout_s=T)) for box in boxes]
    for box in boxes:
        # No process of our own: the bomb leaves none.
        while not await _content(box, "begun"):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await box.sandbox.close()
    for outcome in await asyncio.gather(*calls, return_exceptions=True):
        assert not isinstance(outcome, BaseException) or isinstance(outcome, SandboxError)


async def _content(box: Toolbox, name: str) -> bytes:
    try:
        return await box.read(f"{box.sandbox.spec.workdir}/{name}")
    except FileNotFoundError:
        return b""


async def test_an_endless_flood_behind_every_later_command(box: Toolbox) -> None:
    flood = "until [ -e /tmp/go ]; do sleep 0.01; done; yes | head -c 400M > /dev/tty"
    assert "on" in (await box.bash(f"(trap '' HUP INT TERM; {flood}) & echo on", timeout_s=T)).text
    await box.run(["touch", "/tmp/go"], timeout_s=T)
    for number in range(5):
        result = await box.bash(f"echo number-$(({number} + 1))", timeout_s=T)
        assert len(result.text) < 60_000
    await usable(box)


async def test_processes_that_outlive_their_deadline_in_every_known_way(box: Toolbox) -> None:
    daemons = """
        (trap '' HUP INT TERM QUIT; setsid sh -c 'sleep 50; echo late > /workspace/late' & )
        (trap '' HUP INT TERM QUIT TSTP; kill -STOP $BASHPID; sleep 50) &
        setsid setsid sh -c 'exec 3<>/dev/pts/0; while :; do sleep 0.2; echo noise >&3; done' &
        trap '' INT TERM HUP; kill -STOP $$; while :; do sleep 1; done
    """
    result = await box.bash(daemons, timeout_s=2)
    assert result.data["timed_out"] is True and "timed out after 2 s" in result.text
    await usable(box)
    await box.end_processes()
    listed = await box.bash("cat /proc/[0-9]*/comm | sort | uniq -c", timeout_s=T)
    assert "sleep" not in listed.text
