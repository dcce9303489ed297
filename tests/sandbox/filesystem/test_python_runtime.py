"""This interpreter inside a sandbox, without the files that must stay hidden."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import prorl_envs
from prorl_envs.sandbox.base import SandboxSpec
from prorl_envs.sandbox.drivers.bubblewrap import BubblewrapDriver
from prorl_envs.sandbox.filesystem.python_runtime import (
    HIDDEN_PACKAGES,
    hidden_in,
    python_runtime,
    system_masks,
)
from tests.support.sandbox_entry import run_script

pytestmark = pytest.mark.anyio


async def test_the_interpreter_and_its_packages_work_inside(shell_driver: BubblewrapDriver) -> None:
    mounts, masks, env = python_runtime()
    sandbox = await shell_driver.start(SandboxSpec(mounts=mounts, masks=masks, env=env))
    script = "import colorsys, msgspec, sys; print(sys.prefix, msgspec.json.encode([1]).decode())"
    output = await run_script(sandbox, f'{sys.executable} -c "{script}"')
    assert output == f"{sys.prefix} [1]\n"
    await sandbox.close()


async def test_packages_with_solutions_and_the_checkout_are_hidden(shell_driver: BubblewrapDriver) -> None:
    mounts, masks, env = python_runtime()
    sandbox = await shell_driver.start(SandboxSpec(mounts=mounts, masks=masks, env=env))
    source = Path(next(iter(prorl_envs.__path__)))
    output = await run_script(
        sandbox, f'{sys.executable} -c "import prorl_envs.errors"; ls -A {source} {source.parent}/envs'
    )
    assert "ModuleNotFoundError" in output
    assert "bash" not in output.replace("prorl_envs", "")
    await sandbox.close()


def test_only_installed_packages_are_hidden(tmp_path: Path) -> None:
    (tmp_path / "prorl_envs").mkdir()
    (tmp_path / "numpy").mkdir()
    assert list(hidden_in(tmp_path)) == [str(tmp_path / "prorl_envs")]


def test_packages_below_the_system_are_hidden_wherever_they_are(tmp_path: Path) -> None:
    hidden = [
        tmp_path / folder / "prorl_envs"
        for folder in (
            "lib/python3/dist-packages",
            "lib64/python3.12/site-packages",
            "local/lib/python3.12/site-packages",
        )
    ]
    for package in hidden:
        package.mkdir(parents=True)
    (tmp_path / "lib-link").symlink_to("lib")
    assert sorted(system_masks(tmp_path)) == sorted(map(str, hidden))


def test_this_package_is_hidden_if_it_is_below_the_system() -> None:
    package = Path(next(iter(prorl_envs.__path__))).resolve()
    masks = [Path(mask) for mask in system_masks(package.parent)]
    for secret in (package / "errors.py", (package / "envs/bash/data").resolve()):
        assert any(secret.is_relative_to(mask) for mask in masks)


def test_no_mount_shows_a_checkout() -> None:
    mounts, _, _ = python_runtime()
    for mount in mounts:
        assert str(mount.source) == mount.target
        assert not mount.writable
        for name in HIDDEN_PACKAGES:
            assert not (mount.source / name).exists() or os.fspath(mount.source).endswith("-packages")


def test_other_packages_with_environments_are_hidden_too(tmp_path: Path) -> None:
    """These packages contain references like ours. They are found by their metadata, without an import."""
    registered = tmp_path / "lab-1.0.dist-info"
    registered.mkdir()
    (registered / "METADATA").write_text("Metadata-Version: 2.1\nName: lab\nVersion: 1.0\n")
    (registered / "entry_points.txt").write_text(
        "[prorl_envs.environments]\nlab = lab_book.env:LabEnvironment\n"
    )
    module = "prorl_envs.sandbox.filesystem.python_runtime"
    program = f"from {module} import hidden_packages; print(*hidden_packages())"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.split() == [*HIDDEN_PACKAGES, "lab_book"]
