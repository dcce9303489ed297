"""Systems without bash: `sh` keeps the same promises as far as possible."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from prorl_envs.sandbox.base import SandboxSpec
from prorl_envs.sandbox.drivers.bubblewrap import BubblewrapDriver
from prorl_envs.tools.client.toolbox import Toolbox
from tests.sandbox.rootfs import PROGRAMS, write_busybox_rootfs, write_rootfs
from tests.tools.conftest import HASTY, LIMITS
from tests.tools.deadlines import at_deadline

pytestmark = pytest.mark.anyio
T = 60.0
_TOOLS = ("wc", "tr", "head", "od", "stty", "env")


def _busybox_image(root: Path, busybox: str) -> Path:
    write_busybox_rootfs(root, busybox)
    for tool in _TOOLS:
        (root / "bin" / tool).symlink_to("busybox")
    return root


def _dash_image(root: Path) -> Path:
    dash = shutil.which("dash")
    if dash is None:
        pytest.skip("dash is not installed")
    write_rootfs(root, (*(program for program in PROGRAMS if program != "bash"), *_TOOLS))
    shutil.copy(dash, root / "bin" / "sh")
    return root


@pytest.fixture(scope="module", params=["busybox", "dash"])
def image(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Image in which `shell` is the only shell."""
    root = tmp_path_factory.mktemp("sh") / "root"
    if request.param == "busybox":
        return _busybox_image(root, request.getfixturevalue("busybox"))
    return _dash_image(root)


@pytest.fixture
async def box(
    shared_driver: BubblewrapDriver, image: Path, request: pytest.FixtureRequest
) -> AsyncIterator[Toolbox]:
    """A toolbox whose first result was checked."""
    sandbox = await shared_driver.start(SandboxSpec(image=image))
    toolbox = await Toolbox.open(sandbox, limits=getattr(request, "param", LIMITS))
    first = await toolbox.bash("echo hello", timeout_s=T)
    assert first.text == "hello\n[this system has no bash: the shell is sh]"
    yield toolbox
    await toolbox.aclose()
    await sandbox.close()


async def test_state_persists_and_status_and_directory_are_reported(box: Toolbox) -> None:
    await box.bash("x=5; export Y=6; f() { echo f$1; }; cd /tmp", timeout_s=T)
    result = await box.bash("f $x; sh -c 'echo $Y'; (exit 7)", timeout_s=T)
    assert result.text == "f5\n6\n[exit status 7]"
    assert result.data == {"exit_code": 7, "cwd": "/tmp", "timed_out": False, "waiting": False}
    assert (await box.bash("echo $?", timeout_s=T)).text == "7\n"


@pytest.mark.parametrize(
    ("command", "output"),
    [
        ("for i in 1 2; do\n  echo $i\ndone", "1\n2\n"),
        ("cat <<END\none\n$((1+1))\nEND\n", "one\n2\n"),
        ("echo 'it'\"'\"'s'", "it's\n"),
        ("printf 'a\\tb\\n  c'", "a\tb\n  c"),
        ("echo '" + "x" * 5000 + "' | wc -c | tr -d ' '", "5001\n"),
        ("echo '\x03\x04\t' | wc -c | tr -d ' '", "4\n"),
        ("echo 'héllo ☃'", "héllo ☃\n"),
        ("printf 'a\\377b'", "a�b"),
        ("# only a comment", ""),
        ("", ""),
        ("sh -c 'ls /proc/self/fd' | wc -l | tr -d ' '", "4\n"),
    ],
)
async def test_any_text_reaches_the_shell_unharmed(box: Toolbox, command: str, output: str) -> None:
    assert (await box.bash(command, timeout_s=T)).text == output


@pytest.mark.parametrize(
    "command",
    [
        'echo "never closed',
        "foo )",
        "if true; then",
        "cat <<'END'",
        "set -u; echo $nope; echo more",
        "${x?bad}",
        "x=1; readonly x; x=2",
        ". /nonexistent",
        "shift 5",
        "exec 0<&-",
        "exec 1>&-; exec 1>/dev/tty",
        "exec 8<&- 9>&-",
        "set -x; true; set +x",
        "PS1='$ '; PS2='> '; stty raw -echo -isig",
        "command() { :; }; printf() { :; }",
        "alias command=x eval=x set=x printf=x",
        "ulimit -n 32",
        "true & sleep 0.1",
        "kill -STOP $$",
        "kill -INT $$",
    ],
)
async def test_an_error_is_an_answer_and_the_same_shell_survives(box: Toolbox, command: str) -> None:
    await box.bash("kept=yes", timeout_s=T)
    result = await box.bash(command, timeout_s=T)
    assert not result.data["timed_out"]
    assert (await box.bash("echo $kept", timeout_s=T)).text == "yes\n"


async def test_errexit_affects_only_its_command(box: Toolbox) -> None:
    assert (await box.bash("set -e; true", timeout_s=T)).ok
    assert (await box.bash("false; echo on", timeout_s=T)).text == "on\n"
    assert "the shell exited with status 1" in (await box.bash("set -e; false; echo no", timeout_s=T)).text


async def test_the_shell_can_exit_and_a_new_one_starts_where_it_was(box: Toolbox) -> None:
    result = await box.bash("cd /tmp; trap 'echo bye' EXIT; exit 3", timeout_s=T)
    assert result.data["exit_code"] == 3
    assert result.text.startswith("bye\n[exit status 3]\n[the shell exited with status 3")
    assert (await box.bash("pwd", timeout_s=T)).text == "/workspace\n"  # the directory of the last report


@pytest.mark.parametrize("command", ["sleep 1000", "while :; do :; done"])
async def test_at_the_deadline_the_command_is_interrupted_and_the_shell_kept(
    box: Toolbox, command: str
) -> None:
    await box.bash("kept=yes", timeout_s=T)
    result = await at_deadline(
        lambda limit_s: box.bash(f"echo before; {command}; echo no", timeout_s=limit_s)
    )
    assert "s: it was interrupted]" in result.text
    assert "no\n" not in result.text
    assert (await box.bash("echo $kept", timeout_s=T)).text == "yes\n"


@pytest.mark.parametrize("box", [HASTY], indirect=True)
async def test_a_command_that_ignores_the_interrupt_is_killed(box: Toolbox) -> None:
    command = "sh -c 'trap \"\" INT; echo before; while :; do :; done'"
    result = await at_deadline(lambda limit_s: box.bash(command, timeout_s=limit_s))
    assert "it ignored the interrupt and was killed" in result.text
    assert (await box.bash("echo back", timeout_s=T)).text == "back\n"


async def test_a_background_job_survives(box: Toolbox) -> None:
    assert (await box.bash("sleep 1000 & echo started", timeout_s=T)).text == "started\n"
    assert "Running" in (await box.bash("jobs", timeout_s=T)).text
    assert (await box.bash("kill %1; echo gone", timeout_s=T)).text == "gone\n"


@pytest.mark.parametrize("command", ["read x; echo got $x", "sh -c 'read x; echo got $x'"])
async def test_a_question_is_asked_and_answered(box: Toolbox, command: str) -> None:
    assert (await box.bash(command, timeout_s=T)).data["waiting"] is True
    assert (await box.bash("it", timeout_s=T, is_input=True)).text == "got it\n"
    assert (await box.bash(command, timeout_s=T)).data["waiting"] is True
    assert (await box.bash("C-c", timeout_s=T, is_input=True)).data["exit_code"] == 130
    assert (await box.bash("echo fine", timeout_s=T)).text == "fine\n"


async def test_sessions_are_independent_and_each_names_its_shell(box: Toolbox) -> None:
    await box.bash("x=1", timeout_s=T)
    other = await box.bash("echo ${x-unset}", timeout_s=T, session="b")
    assert other.text == "unset\n[this system has no bash: the shell is sh]"
    assert (await box.bash("echo ${x-unset}", timeout_s=T)).text == "1\n"


async def test_a_cancelled_call_keeps_the_shell(box: Toolbox) -> None:
    await box.bash("kept=yes", timeout_s=T)
    call = asyncio.create_task(box.bash("echo > begun; sleep 1000; echo > ended", timeout_s=T))
    await box.run(["sh", "-c", "until [ -e begun ]; do sleep 0.01; done"], timeout_s=T)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert (await box.bash("echo $kept; ls", timeout_s=T)).text == "yes\nbegun\n"


async def test_a_flood_is_bounded(box: Toolbox) -> None:
    result = await box.bash("head -c 3000000 /dev/zero | tr '\\0' x; echo; echo last", timeout_s=T)
    assert result.text.endswith("x\nlast\n")
    assert result.truncated_bytes == 3_000_006 - box.limits.output_bytes
