"""Our sandboxes behind NeMo Gym's own sandbox API: real NeMo Gym, real sandboxes."""

import asyncio
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nemo_gym", reason="run by scripts/test-nemo.sh in an environment of its own")

# mypy: disable-error-code="import-not-found,import-untyped"
import uvloop
from nemo_gym.sandbox import AsyncSandbox, Sandbox, SandboxSpec
from nemo_gym.sandbox.providers import create_provider, list_providers
from nemo_gym.sandbox.providers.base import SandboxCreateError, SandboxStatus

from prorl_envs.errors import InputError
from tests.nemo.conftest import start
from tests.support.leaks import OpenResources, leaks_since

pytestmark = [pytest.mark.nemo, pytest.mark.anyio]

PROVIDER: dict[str, Any] = {"prorl": {}}


@pytest.fixture(scope="module", autouse=True)
def _loops_own_pipe() -> None:
    """uvloop opens one pipe per process at its first use, which is not a leak."""

    async def nothing() -> None:
        pass

    uvloop.run(nothing())


def test_the_provider_is_found_by_its_name() -> None:
    assert "prorl" in list_providers()


async def test_a_command_returns_both_outputs_and_its_status(box: Any) -> None:
    done = await box.exec("echo out; echo err >&2; exit 3")
    assert (done.stdout, done.stderr, done.return_code, done.error_type) == ("out\n", "err\n", 3, None)
    assert (await box.exec("kill -9 $$")).return_code == 137
    assert (await box.exec("no-such-program")).return_code == 127
    assert (await box.exec("printf '\\377'")).stdout == "\N{REPLACEMENT CHARACTER}"
    assert (await box.status()) == SandboxStatus.RUNNING


async def test_directory_environment_and_user_are_as_requested(provider: Any) -> None:
    spec = {"workdir": "/work/here", "env": {"A": "1", "B": "two words"}}
    async with await start(provider, **spec) as box:
        assert (
            await box.exec('pwd; echo "$A $B $C"', env={"A": "3", "C": "4"})
        ).stdout == "/work/here\n3 two words 4\n"
        assert (await box.exec("pwd", cwd="/tmp")).stdout == "/tmp\n"
        assert (await box.exec("mkdir sub")).return_code == 0
        assert (await box.exec("pwd", cwd="sub")).stdout == "/work/here/sub\n"
        assert (await box.exec("id -u", user="root")).stdout == "0\n"
        with pytest.raises(ValueError, match="nobody"):
            await box.exec("id -u", user="nobody")
    async with await start(provider, provider_options={"uid": 1234}) as box:
        assert (await box.exec("id -u", user=1234)).stdout == "1234\n"
        with pytest.raises(ValueError, match="root"):
            await box.exec("id -u", user="root")


@pytest.mark.parametrize("workdir", ["/", "/tmp", "/tmp/a/b", "/home/agent/x", "/workspace"])
async def test_any_working_directory_exists(provider: Any, workdir: str) -> None:
    async with await start(provider, workdir=workdir) as box:
        assert (await box.exec("pwd")).stdout == f"{workdir}\n"


async def test_a_command_is_stopped_at_its_timeout_and_its_output_kept(box: Any) -> None:
    done = await box.exec("echo out; echo err >&2; sleep 100 & wait", timeout_s=0.5)
    assert (done.stdout, done.error_type, done.return_code) == ("out\n", "timeout", 125)
    assert done.stderr.startswith("err\n[the command was ended after 0.5 s]")
    assert (await box.exec("until ! pgrep -x sleep; do :; done")).return_code == 0


async def test_a_background_process_does_not_block_and_survives_its_command(box: Any) -> None:
    await box.exec("mkfifo go; (read x < go; echo $x; echo alive > told) & echo begun")
    assert (
        await box.exec("echo now > go; until [ -e told ]; do sleep 0.01; done; cat told")
    ).stdout == "alive\n"


async def test_sixty_four_commands_run_at_once(box: Any) -> None:
    """No command finishes before all have started."""
    command = "touch at$N; until [ $(ls | wc -l) = 64 ]; do sleep 0.05; done; echo $N"
    done = await asyncio.gather(*(box.exec(command, env={"N": str(n)}, timeout_s=60) for n in range(64)))
    assert [each.stdout for each in done] == [f"{n}\n" for n in range(64)]


async def test_commands_beyond_the_limit_wait_their_turn(provider: Any) -> None:
    narrow = create_provider({"prorl": {"concurrency": 4}})
    async with AsyncSandbox(narrow, SandboxSpec()) as box:
        await box.start()
        done = await asyncio.gather(*(box.exec(f"echo {n}") for n in range(300)))
        assert [each.stdout for each in done] == [f"{n}\n" for n in range(300)]


async def test_output_is_bounded_and_marked_as_cut(provider: Any) -> None:
    async with AsyncSandbox(create_provider({"prorl": {"output_limit": 2000}}), SandboxSpec()) as box:
        await box.start()
        done = await box.exec("seq 100000; seq 100000 >&2")
        for text in (done.stdout, done.stderr):
            assert len(text) < 3000 and "bytes of output left out" in text
            assert text.startswith("1\n") and text.endswith("100000\n")


async def test_a_command_may_be_longer_than_an_argument(box: Any) -> None:
    text = "x" * 300_000
    assert (await box.exec(f"cat <<END | wc -c\n{text}\nEND")).stdout == "300001\n"
    assert (await box.exec("ls -A /tmp")).stdout == ""


async def test_a_command_that_cannot_be_started_has_a_normal_answer(box: Any) -> None:
    done = await box.exec("true", cwd="/no/such")
    assert (done.error_type, done.return_code) == ("exec", 125)
    assert "/no/such" in done.stderr
    assert (await box.exec("echo \0")).error_type == "exec"
    assert (await box.exec("echo \udcff")).error_type == "exec"


async def test_files_are_copied_in_and_out_unchanged(box: Any, tmp_path: Path) -> None:
    source, back = tmp_path / "source", tmp_path / "deep" / "back"
    data = os.urandom(20 * 1024 * 1024 + 7)  # three chunks
    source.write_bytes(data)
    source.chmod(0o751)
    await box.upload(source, "new/folder/file")
    assert (await box.exec("stat -c '%a %s' new/folder/file")).stdout == f"751 {len(data)}\n"
    await box.download("new/folder/file", back)
    assert back.read_bytes() == data
    assert [path.name for path in back.parent.iterdir()] == ["back"]
    with pytest.raises(FileNotFoundError):
        await box.download("nothing", tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()


async def test_a_link_in_the_sandbox_cannot_reach_the_host(box: Any, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    await box.exec(f"ln -s {secret} link; ln -s {tmp_path} folder")
    with pytest.raises(FileNotFoundError):
        await box.download("link", tmp_path / "out")
    upload = tmp_path / "upload"
    upload.write_text("x")
    await box.upload(upload, "folder/planted")  # in the sandbox's own /tmp
    assert not (tmp_path / "planted").exists()


async def test_files_exist_before_the_entry_point_starts(provider: Any) -> None:
    spec = {"files": {"/tmp/a": "text\n"}, "entrypoint": ["sh", "-c", "cp /tmp/a /tmp/b; sleep 1000"]}
    async with await start(provider, **spec) as box:
        done = await box.exec("until [ -s /tmp/b ]; do sleep 0.01; done; cat /tmp/b; pgrep -cx sleep")
        assert done.stdout == "text\n1\n"


async def test_nothing_of_the_host_can_be_seen_or_reached(box: Any) -> None:
    os.environ["OF_THE_HOST"] = "1"
    try:
        home = Path.home()
        assert (await box.exec(f"ls {home}")).return_code != 0 or str(home) == "/home/agent"
        assert "OF_THE_HOST" not in (await box.exec("env")).stdout
    finally:
        del os.environ["OF_THE_HOST"]
    assert (await box.exec("ls /tmp")).stdout == ""
    assert (await box.exec(f"grep -l {os.getpid()} /proc/[0-9]*/status")).stdout == ""
    assert (await box.exec("cat /proc/net/dev | tail -n +3 | cut -d: -f1")).stdout.split() == ["lo"]
    assert (await box.exec("touch /usr/x")).return_code != 0
    assert "CapEff:\t0000000000000000" in (await box.exec("cat /proc/self/status")).stdout


async def test_a_sandbox_is_stopped_at_its_time_limit(provider: Any) -> None:
    async with await start(provider, ttl_s=0.3) as box:
        done = await box.exec("sleep 1000")
        assert done.error_type == "sandbox"
        assert await box.status() == SandboxStatus.STOPPED
        assert (await box.exec("true")).error_type == "sandbox"


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"image": "python 3"}, "not an image's address"),
        ({"image": "other://ubuntu"}, "other://"),
        ({"image": "/no/such/image.sif"}, "/no/such/image.sif"),
        ({"image": "/no/such/image.def"}, "/no/such/image.def"),
        ({"workdir": "relative"}, "absolute"),
        ({"ttl_s": -1}, "ttl_s"),
        ({"resources": {"gpu": 1}}, "GPU"),
        ({"resources": {"memory_mib": 1}}, "memory_bytes is 1048576"),
        ({"provider_options": {"bind": "/x:/y"}}, "known: .*binds"),
        ({"provider_options": {"uid": "x"}}, "uid"),
        ({"provider_options": {"binds": "/no/such/place:/x"}}, "does not exist"),
        ({"entrypoint": ["/no/such/program"]}, "entry point"),
        ({"ready_timeout_s": 1e-9}, "not ready"),
        ({"env": {"A=B": "c"}}, "environment variable"),
    ],
)
async def test_unsupported_requests_are_refused_with_the_reason(
    provider: Any, spec: dict[str, Any], says: str
) -> None:
    with pytest.raises(SandboxCreateError, match=says):
        await start(provider, **spec)


def test_a_wrong_setting_of_the_provider_is_named() -> None:
    with pytest.raises(InputError, match="unknown key timeout"):
        create_provider({"prorl": {"timeout": 3}})


async def test_binds_are_mounted_as_requested(provider: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("host")
    binds = [f"{tmp_path}:/ro", f"{tmp_path}:/rw:rw", f"{tmp_path}:/private:overlay"]
    async with await start(provider, provider_options={"binds": binds}) as box:
        assert (await box.exec("cat /ro/file")).stdout == "host"
        assert (await box.exec("echo x > /ro/file")).return_code != 0
        assert (await box.exec("echo x > /private/file; cat /private/file")).stdout == "x\n"
        assert (tmp_path / "file").read_text() == "host"
        assert (await box.exec("echo y > /rw/file")).return_code == 0
        assert (tmp_path / "file").read_text() == "y\n"


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """Make a root file system with only busybox."""
    busybox = shutil.which("busybox")
    if busybox is None:
        pytest.skip("there is no busybox to make an image of")
    for folder in ("bin", "tmp", "repo"):
        (tmp_path / folder).mkdir()
    shutil.copy(busybox, tmp_path / "bin/busybox")
    for name in ("sh", "ls", "mkdir", "cat", "tail", "head", "sleep"):
        (tmp_path / "bin" / name).symlink_to("busybox")
    (tmp_path / "repo/code").write_text("x")
    return tmp_path


async def test_an_image_keeps_its_files_in_the_working_directory(provider: Any, image: Path) -> None:
    async with await start(provider, image=str(image), workdir="/repo") as box:
        assert (await box.exec("ls; echo y > code; echo $0")).stdout == "code\nsh\n"  # it has no bash
        assert (image / "repo/code").read_text() == "x"
    async with await start(provider, image=str(image), workdir="/made/here") as box:
        assert (await box.exec("pwd")).stdout == "/made/here\n"


async def test_a_driver_is_shared_and_closed_with_its_last_provider(run_dir: Path) -> None:
    before = OpenResources.now(run_dir)
    one, two = AsyncSandbox(PROVIDER, SandboxSpec()), AsyncSandbox(PROVIDER, SandboxSpec())
    await asyncio.gather(one.start(), two.start())
    await one.stop()
    assert (await two.exec("echo still")).stdout == "still\n"
    await two.stop()
    assert not leaks_since(before, run_dir)


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])  # NeMo Gym's servers run on uvloop
def test_unclosed_sandboxes_are_closed_with_the_loop(run: Any, run_dir: Path) -> None:
    async def forget() -> None:
        box = await AsyncSandbox({"prorl": {"run_dir": str(run_dir)}}, SandboxSpec()).start()
        done = await asyncio.gather(*(box.exec("echo hi; sleep 1000 &") for _ in range(5)))
        assert [each.stdout for each in done] == ["hi\n"] * 5

    before = OpenResources.now(run_dir)
    run(forget())
    assert not leaks_since(before, run_dir)


def test_the_blocking_api_works() -> None:
    with Sandbox(PROVIDER, SandboxSpec()) as box:
        box.start()
        assert box.exec("echo hi").stdout == "hi\n"


def test_a_harness_of_nemo_gym_runs_on_the_provider(image: Path) -> None:
    from responses_api_agents.mini_swe_agent_2.sandbox_environment import MiniSWESandboxEnvironment

    environment = MiniSWESandboxEnvironment(image=str(image), cwd="/repo", provider=PROVIDER)  # user="root"
    try:
        assert environment.execute("ls; echo x > new; exit 3") | {"exception_info": ""} == {
            "output": "code\n",
            "returncode": 3,
            "exception_info": "",
        }
        assert environment.execute({"command": "cat new"})["output"] == "x\n"
        assert environment.execute("echo part; sleep 1000", timeout=1)["output"].startswith("part\n")
    finally:
        environment.cleanup()


KILLED = """
import asyncio, os, signal
from nemo_gym.sandbox import AsyncSandbox, SandboxSpec

async def main():
    box = await AsyncSandbox({"prorl": {}}, SandboxSpec(entrypoint=["sleep", "1000"])).start()
    await box.exec("sleep 1000 & sleep 1000 >/dev/null 2>&1 &")
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


def test_a_killed_process_leaves_no_running_processes(run_dir: Path) -> None:
    before = OpenResources.now(run_dir)
    done = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, check=False)
    assert done.returncode == -9, done.stderr
    left = [leak for leak in leaks_since(before, run_dir, patience_s=2) if not leak.startswith("directory")]
    assert not left
    asyncio.run(sweep())  # the next start removes its directory
    assert not leaks_since(before, run_dir)


async def sweep() -> None:
    async with AsyncSandbox(PROVIDER, SandboxSpec()) as box:
        await box.start()
