"""The Apptainer driver: its selection, its single process for all sandboxes, its errors."""

import os
import select
import shutil
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from prorl_envs.errors import SandboxError
from prorl_envs.sandbox.base import SandboxSpec
from prorl_envs.sandbox.drivers.apptainer import ApptainerDriver
from prorl_envs.sandbox.drivers.apptainer_probe import (
    apptainer_checks,
    find_apptainer,
    image_checks,
    read_installation,
)
from prorl_envs.sandbox.drivers.apptainer_wrapper import explain_wrapper, wrapper_environment, write_container
from prorl_envs.sandbox.drivers.local import NoIsolationWarning
from prorl_envs.sandbox.drivers.probe import find_bwrap
from prorl_envs.sandbox.drivers.select import choose_driver, make_driver
from tests.sandbox.rootfs import build_sif, missing_for_sif, write_rootfs
from tests.support.leaks import OpenResources
from tests.support.sandbox_entry import SCRIPT_TEMPLATES, run_script

pytestmark = pytest.mark.anyio


def needs_apptainer[**P, R](test: Callable[P, R]) -> Callable[P, R]:
    """Mark a test that needs Apptainer."""
    missing = not (shutil.which("apptainer") or shutil.which("singularity"))
    skip = pytest.mark.skipif(missing, reason="neither Apptainer nor Singularity is installed")
    return pytest.mark.thorough(skip(test))


def program(path: Path, script: str) -> Path:
    """Write a program that replaces another."""
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
async def driver(run_dir: Path) -> AsyncIterator[ApptainerDriver]:
    driver = ApptainerDriver(templates=SCRIPT_TEMPLATES)
    yield driver
    await driver.aclose()


def apptainers(run_dir: Path) -> set[int]:
    """Return the pids of the running Apptainers."""
    found = OpenResources.now(run_dir).processes
    return {pid for (pid, _), text in found.items() if "(apptainer)" in text or "(starter)" in text}


@needs_apptainer
async def test_one_apptainer_serves_all_sandboxes(driver: ApptainerDriver, run_dir: Path) -> None:
    before = apptainers(run_dir)
    sandboxes = [await driver.start(SandboxSpec()) for _ in range(4)]
    assert len(apptainers(run_dir) - before) == 1
    assert [await run_script(sandbox, "echo $((6 * 7))") for sandbox in sandboxes] == ["42\n"] * 4


@needs_apptainer
async def test_sandboxes_survive_apptainers_end_and_new_ones_restart_it(
    driver: ApptainerDriver, run_dir: Path
) -> None:
    before = apptainers(run_dir)
    first = await driver.start(SandboxSpec())
    [killed] = apptainers(run_dir) - before
    holder = os.pidfd_open(killed)
    signal.pidfd_send_signal(holder, signal.SIGKILL)
    select.select([holder], [], [])
    os.close(holder)
    second = await driver.start(SandboxSpec())
    assert len(apptainers(run_dir) - before - {killed}) == 1
    assert await run_script(first, "echo lives") == "lives\n"
    assert await run_script(second, "echo starts") == "starts\n"


@needs_apptainer
async def test_an_image_that_is_mounted_later_is_visible(
    driver: ApptainerDriver, tmp_path: Path, run_dir: Path
) -> None:
    """The image is visible even if the host does not propagate mounts; Apptainer is then restarted."""
    if reason := missing_for_sif():
        pytest.skip(reason)
    image = build_sif(write_rootfs(tmp_path / "root"), tmp_path / "image.sif")
    plain = await driver.start(SandboxSpec())
    sandbox = await driver.start(SandboxSpec(image=image))
    running = apptainers(run_dir)
    again = await driver.start(SandboxSpec(image=image))
    assert apptainers(run_dir) == running
    for each in (sandbox, again):
        assert await run_script(each, "cat /etc/image") == "from the image\n"
    assert await run_script(plain, "echo lives") == "lives\n"


@needs_apptainer
async def test_apptainers_environment_is_hidden(driver: ApptainerDriver) -> None:
    sandbox = await driver.start(SandboxSpec())
    assert "APPTAINER" not in await run_script(sandbox, "env; cat /proc/mounts; ls -a /")
    assert ".host" not in await run_script(sandbox, "ls -a /; cat /proc/self/mountinfo")


def test_apptainer_stores_its_files_outside_the_users_home(tmp_path: Path) -> None:
    environment = wrapper_environment(tmp_path, {"LANG": "C.UTF-8"})
    assert {environment[name] for name in ("HOME", "APPTAINER_CONFIGDIR", "SINGULARITY_CONFIGDIR")} == {
        str(tmp_path)
    }
    assert environment["APPTAINERENV_LANG"] == environment["SINGULARITYENV_LANG"] == "C.UTF-8"
    assert "LANG" not in environment


@pytest.mark.parametrize(
    ("said", "hint"),
    [
        ("FATAL:   configuration disallows users from running sandbox containers",
         "allow container dir = yes"),
        ("FATAL:   stat /x/bwrap: no such file or directory", "user bind control = yes"),
        ("FATAL:   Unprivileged installation found, user namepace needed but not allowed by configuration.",
         "allow user ns = yes"),
        ("ERROR  : Failed to create user namespace: maximum number exceeded", "max_user_namespaces"),
        ("bwrap: Creating new namespace failed: nesting depth exceeded (ENOSPC)", "max_user_namespaces"),
        ('Error for command "exec": unknown flag: --no-eval', "1.2 or later"),
        ("", "doctor"),
    ],
)  # fmt: skip
def test_each_refusal_has_its_remedy(said: str, hint: str) -> None:
    error = explain_wrapper(said)
    assert hint in error.hint
    assert " ".join(said.removeprefix("bwrap: ").split()) in error.message


async def test_a_start_that_apptainer_refuses_gives_the_reason(tmp_path: Path, run_dir: Path) -> None:
    refusal = "FATAL:   configuration disallows users from running sandbox containers"
    driver = ApptainerDriver(apptainer=program(tmp_path / "refuses", f"echo '{refusal}' >&2; exit 255"))
    for _ in range(2):
        with pytest.raises(SandboxError, match="disallows") as caught:
            await driver.start(SandboxSpec())
        assert "allow container dir = yes" in caught.value.hint
    await driver.aclose()


def test_every_path_in_the_wrapper_root_leads_to_the_host(tmp_path: Path) -> None:
    host = tmp_path / "host"
    (host / "home" / "user").mkdir(parents=True)
    write_container(tmp_path / "door", host)
    assert sorted(path.name for path in (tmp_path / "door").iterdir()) == [".host", "home"]
    (tmp_path / "door" / ".host").rmdir()
    (tmp_path / "door" / ".host").symlink_to(host)  # as Apptainer will bind it
    assert (tmp_path / "door" / "home" / "user").is_dir()


@pytest.mark.parametrize(
    ("version", "supported", "product"),
    [
        ("apptainer version 1.4.5", True, "apptainer"),
        ("apptainer version 1.2.0-rc.1", True, "apptainer"),
        ("apptainer version 1.0.3", False, "apptainer"),
        ("singularity-ce version 4.1.2-jammy", True, "singularity-ce"),
        ("singularity-ce version 3.8.0", False, "singularity-ce"),
        ("singularity version 3.8.7", False, "singularity"),
        ("something else", False, ""),
    ],
)
def test_products_and_versions_are_distinguished(
    tmp_path: Path, version: str, supported: bool, product: str
) -> None:
    installation = read_installation(program(tmp_path / "x", f'[ "$1" = --version ] && echo "{version}"'))
    assert (installation.product, installation.supported) == (product, supported)
    assert not installation.setuid


def test_apptainer_settings_that_forbid_namespaces_are_found(tmp_path: Path) -> None:
    conf = tmp_path / "apptainer.conf"
    conf.write_text("# user bind control = no\nallow container dir = no\nallow user ns = yes\n")
    built = f'echo "SINGULARITY_CONF_FILE={conf}"; echo "LIBEXECDIR={tmp_path}"'
    chosen = program(tmp_path / "x", f"{built}; echo singularity-ce version 4.1.0")
    assert read_installation(chosen).forbidden == ("allow container dir = yes",)
    settings = next(check for check in apptainer_checks(None, chosen) if check.name == "apptainer settings")
    assert not settings.ok
    assert "allow container dir" in settings.found


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a setuid program of root's")
@pytest.mark.parametrize(("setting", "used"), [("yes", True), ("no", False)])
def test_a_setuid_program_is_accepted_if_the_site_allows_it(tmp_path: Path, setting: str, used: bool) -> None:
    """Apptainer makes a user namespace if the site does not allow it."""
    (tmp_path / "apptainer" / "bin").mkdir(parents=True)
    program(tmp_path / "apptainer" / "bin" / "starter-suid", "exit 1").chmod(0o4755)
    conf = tmp_path / "apptainer.conf"
    conf.write_text(f"allow setuid = {setting}\n")
    chosen = program(tmp_path / "x", f'echo "APPTAINER_CONF_FILE={conf}"; echo "LIBEXECDIR={tmp_path}"')
    assert read_installation(chosen).setuid is used


def test_a_chosen_program_that_is_not_apptainer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match="absent"):
        find_apptainer(tmp_path / "absent")


@needs_apptainer
def test_this_machines_apptainer_works() -> None:
    problems = [
        f"{check.name}: {check.found}; remedy: {check.remedy}" for check in apptainer_checks() if not check.ok
    ]
    assert not problems


def test_the_programs_that_images_need_are_named() -> None:
    names = [check.name for check in image_checks()]
    assert names == ["SIF images", "image builds"]
    assert all(check.found and check.remedy for check in image_checks())


def test_bubblewrap_is_preferred(run_dir: Path) -> None:
    assert choose_driver("auto") == "bubblewrap"
    assert choose_driver("auto", bwrap=find_bwrap()) == "bubblewrap"


def test_if_no_driver_works_the_first_reason_is_given(
    tmp_path: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LMOD_CMD", "MODULESHOME"):
        monkeypatch.delenv(name, raising=False)
    broken = program(tmp_path / "bwrap", "echo 'bwrap: setting up uid map: Permission denied' >&2; exit 1")
    refuses = program(tmp_path / "apptainer", "echo 'FATAL: not allowed by configuration' >&2; exit 255")
    with pytest.raises(SandboxError, match=r"cannot start sandboxes: .*uid map") as caught:
        choose_driver("auto", bwrap=broken, apptainer=refuses)
    assert "namespaces" in caught.value.hint or "seccomp" in caught.value.hint
    assert "apptainer" not in caught.value.hint and "local" not in caught.value.hint
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.setenv("LMOD_CMD", "/opt/lmod/libexec/lmod")
    with pytest.raises(SandboxError, match="uid map") as caught:
        choose_driver("auto", bwrap=broken, apptainer=refuses)
    assert caught.value.hint == "`module load apptainer`"


def test_a_driver_that_does_not_exist_is_refused() -> None:
    with pytest.raises(SandboxError, match="docker"):
        choose_driver("docker")


@needs_apptainer
async def test_if_only_apptainer_may_make_namespaces_it_is_chosen(tmp_path: Path, run_dir: Path) -> None:
    """A bubblewrap that works only inside Apptainer."""
    refusal = "echo 'bwrap: No permissions to create new namespace' >&2; exit 1"
    picky = program(tmp_path / "bwrap", f'[ -d /.host ] && exec {find_bwrap()} "$@"; {refusal}')
    name = choose_driver("auto", bwrap=picky)
    assert name == "apptainer"
    driver = make_driver(name, bwrap=picky, templates=SCRIPT_TEMPLATES)
    try:
        assert await run_script(await driver.start(SandboxSpec()), "echo inside") == "inside\n"
    finally:
        await driver.aclose()


async def test_the_local_driver_is_chosen_only_by_its_name_with_a_warning(run_dir: Path) -> None:
    with pytest.warns(NoIsolationWarning):
        driver = make_driver(choose_driver("local"))
    await driver.aclose()
