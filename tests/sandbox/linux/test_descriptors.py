"""A process's limits of open files and processes: raised as far as allowed, and never exhausted."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from prorl_envs.errors import UnsupportedMachine
from prorl_envs.sandbox.drivers.bubblewrap import BubblewrapDriver
from prorl_envs.sandbox.linux.descriptors import allow_processes, sandboxes_allowed

SCRIPT = """
import asyncio, os, resource, sys

from prorl_envs.errors import SandboxError
from prorl_envs.sandbox.base import SandboxSpec
from prorl_envs.sandbox.drivers.bubblewrap import BubblewrapDriver
from prorl_envs.tools.client.toolbox import Toolbox

soft, hard, taken = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def main():
    driver = BubblewrapDriver()
    others = [os.open(os.devnull, os.O_RDONLY) for _ in range(taken)]
    boxes = []
    try:
        for _ in range(20):
            sandbox = await driver.start(SandboxSpec())
            boxes.append(await Toolbox.open(sandbox))
            assert (await boxes[-1].bash("echo hi", timeout_s=30)).text == "hi\\n"
    except SandboxError as error:
        print(error)
    print(len(boxes), "live")
    for box in boxes:
        await box.aclose()
    await driver.aclose()


try:
    asyncio.run(main())
except SandboxError as error:
    print(error)
"""


def output_of(run_dir: Path, soft: int, hard: int, taken: int = 0) -> str:
    """Run a process with these limits, which must exit normally; return its output."""
    command = [sys.executable, "-c", SCRIPT, str(soft), str(hard), str(taken)]
    before = set(run_dir.iterdir())
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert set(run_dir.iterdir()) == before, "it leaves nothing behind"
    return done.stdout


def test_the_usual_soft_limit_is_raised(run_dir: Path) -> None:
    assert output_of(run_dir, 128, 4096) == "20 live\n"


def test_the_last_descriptors_are_reserved_for_the_shutdown(run_dir: Path) -> None:
    text = output_of(run_dir, 1536, 1536, taken=1345)
    assert "nearly all of its 1536 descriptors open" in text and "raise the hard limit" in text
    live = int(text.splitlines()[-1].removesuffix(" live"))
    assert 0 < live < 20


@pytest.mark.parametrize("hard", [256, 1535])
def test_too_few_for_one_sandbox_is_reported_at_once(run_dir: Path, hard: int) -> None:
    text = output_of(run_dir, 256, hard)
    assert f"a process may open no more than {hard} files here; the service needs 1536" in text


@pytest.mark.parametrize(
    ("uid", "soft", "hard", "raised"),
    [
        (1000, 200, 400, True),
        (1000, 200, resource.RLIM_INFINITY, True),
        (1000, resource.RLIM_INFINITY, resource.RLIM_INFINITY, False),
        (0, 60, 60, False),
    ],
)
def test_the_limit_of_processes_is_raised(
    monkeypatch: pytest.MonkeyPatch, uid: int, soft: int, hard: int, raised: bool
) -> None:
    limits = []
    monkeypatch.setattr("os.geteuid", lambda: uid)
    monkeypatch.setattr("resource.getrlimit", lambda which: (soft, hard))
    monkeypatch.setattr("resource.setrlimit", lambda which, values: limits.append((which, values)))
    allow_processes()
    assert limits == ([(resource.RLIMIT_NPROC, (hard, hard))] if raised else [])


@pytest.mark.parametrize("hard", [60, 399])
def test_too_few_processes_are_reported_at_once(monkeypatch: pytest.MonkeyPatch, hard: int) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    limits = {resource.RLIMIT_NPROC: (hard, hard), resource.RLIMIT_NOFILE: (4096, 4096)}
    monkeypatch.setattr("resource.getrlimit", limits.__getitem__)
    with pytest.raises(UnsupportedMachine, match=f"no more than {hard} processes") as caught:
        BubblewrapDriver()
    assert "ulimit -Hu" in caught.value.hint


@pytest.mark.parametrize(
    ("uid", "processes", "allowed"), [(0, 400, 3226), (1000, 400, 1), (1000, 4096, 462), (1000, -1, 3226)]
)
def test_a_limit_of_processes_bounds_the_sandboxes_of_an_ordinary_user(
    monkeypatch: pytest.MonkeyPatch, uid: int, processes: int, allowed: int
) -> None:
    limits = {resource.RLIMIT_NPROC: (processes, processes), resource.RLIMIT_NOFILE: (20_000, 20_000)}
    monkeypatch.setattr("os.geteuid", lambda: uid)
    monkeypatch.setattr("resource.getrlimit", limits.__getitem__)
    assert sandboxes_allowed() == allowed


@pytest.mark.parametrize(("hard", "allowed"), [(64, None), (1535, None), (1536, 149), (20_000, 3226)])
def test_a_limit_of_files_too_low_for_one_sandbox_is_no_number_of_sandboxes(
    monkeypatch: pytest.MonkeyPatch, hard: int, allowed: int | None
) -> None:
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    limits = {resource.RLIMIT_NPROC: unlimited, resource.RLIMIT_NOFILE: (hard, hard)}
    monkeypatch.setattr("resource.getrlimit", limits.__getitem__)
    if allowed is None:
        with pytest.raises(UnsupportedMachine, match=f"no more than {hard} files"):
            sandboxes_allowed()
    else:
        assert sandboxes_allowed() == allowed


@pytest.mark.parametrize(("own", "inside"), [(1536, 1024), (4096, 3072), (20_000, 15_000), (131_072, 65_536)])
def test_programs_in_sandboxes_may_open_fewer_files_than_the_service(own: int, inside: int) -> None:
    code = (
        "import resource; from prorl_envs.sandbox.linux.descriptors import open_files_inside\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({own}, {own}))\n"
        "print(open_files_inside(65_536))"
    )
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < own:
        pytest.skip("the hard limit of this machine is lower")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) == inside


LIBRARIES = """
import mmap, os, sys

from prorl_envs.sandbox.linux.descriptors import close_all_but, note_library_descriptors, reopen_libraries

path, replaced = sys.argv[1], sys.argv[2] == "replaced"
fd = os.open(path, os.O_RDONLY)
mapped = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
inode = os.fstat(fd).st_ino
note_library_descriptors()
close_all_but([])
if replaced:
    os.rename(path, path + ".old")
    open(path, "w").close()
reopen_libraries()
try:
    print(os.fstat(fd).st_ino == inode, os.get_inheritable(fd))
except OSError:
    print("closed")
"""


@pytest.mark.parametrize(("case", "output"), [("same", "True False"), ("replaced", "closed")])
def test_the_files_of_libraries_are_opened_again(tmp_path: Path, case: str, output: str) -> None:
    library = tmp_path / "library"
    library.write_bytes(b"x" * 4096)
    command = [sys.executable, "-c", LIBRARIES, str(library), case]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == output
