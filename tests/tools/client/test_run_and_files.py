"""New processes and whole files, on real sandboxes."""

import asyncio

import pytest

from prorl_envs.errors import InputError
from prorl_envs.tools.client.toolbox import Toolbox
from prorl_envs.tools.protocol.messages import CONTENT_LIMIT
from tests.tools.deadlines import run_at_deadline

pytestmark = pytest.mark.anyio
T = 60.0


async def wait_until_gone(box: Toolbox, name: str) -> None:
    """Wait for a killed process to disappear, once its parent has reaped it."""
    done = await box.run(
        ["sh", "-c", f"while grep -qsx {name} /proc/[0-9]*/comm; do sleep 0.01; done"], timeout_s=T
    )
    assert not done.timed_out


async def test_a_process_gets_arguments_input_directory_and_environment(box: Toolbox) -> None:
    argv = ["bash", "-c", 'cat; echo "$1 $X"; pwd; echo err >&2; exit 5', "-", "a  b"]
    done = await box.run(argv, cwd="/tmp", env={"X": "y"}, stdin=b"in\n", timeout_s=T)
    assert done.output == b"in\na  b y\n/tmp\nerr\n"
    assert done.exit_code == 5
    assert not done.timed_out
    assert (await box.run(["sh", "-c", "echo ${X-unset}"], timeout_s=T)).output == b"unset\n"


async def test_the_workspace_is_the_default_directory_and_input_is_empty(box: Toolbox) -> None:
    assert (await box.run(["sh", "-c", "pwd; cat"], timeout_s=T)).output == b"/workspace\n"


async def test_a_deadline_may_be_far_away(box: Toolbox) -> None:
    assert (await box.run(["true"], timeout_s=1e12)).exit_code == 0
    assert (await box.bash("true", timeout_s=1e12)).ok


async def test_a_signal_is_a_negative_status(box: Toolbox) -> None:
    assert (await box.run(["sh", "-c", "kill -9 $$"], timeout_s=T)).exit_code == -9


async def test_a_signal_to_its_own_group_ends_a_command_but_not_the_tools(box: Toolbox) -> None:
    assert (await box.run(["sh", "-c", "kill -9 0"], timeout_s=T)).exit_code == -9
    assert (await box.run(["echo", "on"], timeout_s=T)).output == b"on\n"


async def test_a_program_that_stops_itself_ends_at_its_deadline(box: Toolbox) -> None:
    done = await box.run(["sh", "-c", "kill -STOP $$; echo on"], timeout_s=0.5)
    assert done.timed_out and done.output == b""


async def test_at_the_deadline_the_whole_group_is_killed_and_the_output_kept(box: Toolbox) -> None:
    done = await run_at_deadline(box, "sleep 100 & echo begun; sleep 100")
    assert done.exit_code is None
    assert done.output == b"begun\n"
    await wait_until_gone(box, "sleep")


async def test_a_process_that_holds_the_output_does_not_block_the_call_and_is_killed(box: Toolbox) -> None:
    script = "sleep 100 & until grep -qx sleep /proc/$!/comm; do :; done; echo done"
    done = await box.run(["sh", "-c", script], timeout_s=T)
    assert done.output == b"done\n"
    assert done.duration_s < 10
    await wait_until_gone(box, "sleep")


async def test_the_two_outputs_can_be_separated(box: Toolbox) -> None:
    done = await box.run(["sh", "-c", "echo out; echo err >&2; echo more"], apart=True, timeout_s=T)
    assert (done.output, done.errors) == (b"out\nmore\n", b"err\n")
    command = "printf abcdef >&2; printf 123456; sleep 100"
    done = await run_at_deadline(box, command, apart=True, output_limit=4)
    assert done.truncated_bytes == 4
    assert done.output.startswith(b"12\n[... 2 bytes") and done.errors.endswith(b"\nef")


async def test_a_background_process_continues_if_requested(box: Toolbox) -> None:
    """The process keeps the output open, and writes to it after the call without being stopped."""
    write = "n=0; while [ $n -lt 5000 ]; do n=$((n+1)); echo a line for nobody; echo another >&2; done"
    command = f"(until [ -e go ]; do sleep 0.01; done; {write}; touch done) & echo begun"
    done = await box.run(["sh", "-c", command], background=True, apart=True, timeout_s=T)
    assert done.output == b"begun\n"
    wait = "touch go; until [ -e done ]; do sleep 0.01; done"
    assert (await box.run(["sh", "-c", wait], timeout_s=T)).exit_code == 0


async def test_after_the_deadline_no_process_of_the_group_runs(box: Toolbox) -> None:
    done = await box.run(["sh", "-c", "sleep 100 & sleep 100"], background=True, timeout_s=0.3)
    assert done.timed_out
    await wait_until_gone(box, "sleep")


async def test_any_number_of_background_processes_may_hold_their_outputs(box: Toolbox) -> None:
    runs = [
        box.run(["sh", "-c", "sleep 100 &"], background=True, apart=True, timeout_s=T) for _ in range(100)
    ]
    assert all(done.exit_code == 0 for done in await asyncio.gather(*runs))
    # sh may exit before its background process has become a sleep
    until = "until [ $(grep -lsx sleep /proc/[0-9]*/comm | wc -l) = 100 ]; do :; done"
    assert (await box.run(["sh", "-c", until], timeout_s=T)).exit_code == 0


async def test_output_is_complete_and_bounded(box: Toolbox) -> None:
    assert len((await box.run(["head", "-c", "900000", "/dev/zero"], timeout_s=T)).output) == 900_000
    done = await box.run(["head", "-c", "900000", "/dev/zero"], timeout_s=T, output_limit=1000)
    assert done.truncated_bytes == 899_000
    assert b"[... 899000 bytes of output left out ...]" in done.output


async def test_unread_input_does_no_harm(box: Toolbox) -> None:
    assert (await box.run(["true"], stdin=b"x" * 5_000_000, timeout_s=T)).exit_code == 0
    done = await box.run(["wc", "-c"], stdin=bytes(5_000_000), timeout_s=T)
    assert done.output == b"5000000\n"


@pytest.mark.parametrize(
    ("argv", "cwd", "error"),
    [
        (["/no/such"], "", FileNotFoundError),
        (["/etc/passwd"], "", PermissionError),
        (["true"], "/no/such", FileNotFoundError),
        ([], "", OSError),
        (["echo", "\0"], "", OSError),
    ],
)
async def test_a_failed_start_raises_the_same_error_as_locally(
    box: Toolbox, argv: list[str], cwd: str, error: type[OSError]
) -> None:
    with pytest.raises(error):
        await box.run(argv, cwd=cwd, timeout_s=T)


async def test_many_processes_run_concurrently(box: Toolbox) -> None:
    runs = [box.run(["sh", "-c", f"sleep 0.1; echo {n}"], timeout_s=T) for n in range(20)]
    assert [done.output for done in await asyncio.gather(*runs)] == [b"%d\n" % n for n in range(20)]


async def test_a_cancelled_run_is_killed(box: Toolbox) -> None:
    call = asyncio.create_task(box.run(["sh", "-c", "touch begun; sleep 100"], timeout_s=T))
    await box.run(["sh", "-c", "until [ -e begun ]; do sleep 0.01; done"], timeout_s=T)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await wait_until_gone(box, "sleep")


async def test_calls_cancelled_at_any_moment_leave_the_tools_usable(box: Toolbox) -> None:
    calls = [
        asyncio.create_task(box.run(["sh", "-c", f"sleep 0.0{n % 10}; echo {n}"], timeout_s=T))
        for n in range(40)
    ]
    await asyncio.wait(calls, timeout=0.03, return_when=asyncio.FIRST_COMPLETED)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    assert (await box.run(["echo", "on"], timeout_s=T)).output == b"on\n"


async def test_a_process_that_closes_its_output_is_waited_for(box: Toolbox) -> None:
    argv = ["sh", "-c", "exec >&- 2>&-; sleep 0.2; exit 5"]
    assert (await box.run(argv, timeout_s=T)).exit_code == 5


async def test_files_are_written_and_read_unchanged(box: Toolbox) -> None:
    data = bytes(range(256)) * 10_000
    await box.write("/workspace/new/dir/file", data, mode=0o751)
    assert await box.read("/workspace/new/dir/file") == data
    assert await box.read("/workspace/new/dir/file", limit=3) == b"\0\1\2"
    assert (await box.run(["stat", "-c", "%a", "new/dir/file"], timeout_s=T)).output == b"751\n"
    assert (await box.run(["ls", "-A", "new/dir"], timeout_s=T)).output == b"file\n"


async def test_a_reader_sees_the_old_or_the_new_content_and_a_link_is_kept(box: Toolbox) -> None:
    versions = [bytes([65 + number]) * 300_000 for number in range(4)]
    await box.write("/workspace/file", versions[0])
    await box.run(["ln", "-s", "file", "link"], timeout_s=T)

    async def write() -> None:
        for number in range(24):
            await box.write("/workspace/link", versions[number % 4])

    reader = await Toolbox.open(box.sandbox)
    writing = asyncio.create_task(write())
    while not writing.done():
        assert await reader.read("/workspace/file") in versions
    await writing
    await reader.aclose()
    assert (await box.run(["readlink", "link"], timeout_s=T)).output == b"file\n"


async def test_files_of_unknown_size_can_be_read(box: Toolbox) -> None:
    assert b"MemTotal" in await box.read("/proc/meminfo")


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("/workspace/none", FileNotFoundError),
        ("/workspace", IsADirectoryError),
        ("/dev/zero", OSError),
        ("/workspace/fifo", OSError),
        ("/a\0b", OSError),
    ],
)
async def test_a_failed_read_raises_the_same_error_as_locally(
    box: Toolbox, path: str, error: type[OSError]
) -> None:
    await box.run(["mkfifo", "fifo"], timeout_s=T)
    with pytest.raises(error):
        await box.read(path)


@pytest.mark.parametrize("path", ["/usr/x", "/usr/bin/env", "/workspace", "/proc/x", "/a\0b", "relative"])
async def test_a_failed_write_raises_and_leaves_no_file(box: Toolbox, path: str) -> None:
    with pytest.raises(OSError):
        await box.write(path, b"x")
    assert (await box.run(["ls", "-A"], timeout_s=T)).output == b""


async def test_more_than_a_frame_is_refused_before_it_is_sent(box: Toolbox) -> None:
    with pytest.raises(InputError, match="too many for one write"):
        await box.write("/workspace/f", b"x" * (CONTENT_LIMIT + 1))
    await box.write("/workspace/f", b"x" * CONTENT_LIMIT)
    assert len(await box.read("/workspace/f")) == CONTENT_LIMIT
