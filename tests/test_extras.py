"""Hints that install extras: in a checkout, from a wheel, and without pip."""

import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from prorl_envs.errors import InputError
from prorl_envs.extras import install_extras, install_packages

ROOT = Path(__file__).parent.parent
INTEGRATIONS = {path.stem for path in (ROOT / "prorl_envs/integrations").glob("[!_]*.py")} - {"sandbox"}
HINT = "from prorl_envs.extras import install_extras; print(install_extras('math', 'parquet'))"


def printed(*command: str | Path, **environ: str) -> str:
    return subprocess.run(
        command, env={"PATH": "/usr/bin:/bin", **environ}, cwd="/", capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.mark.thorough
def test_the_hint_of_a_checkout_installs() -> None:
    command = install_extras("math", "parquet")
    assert command == install_packages("-e", f"{ROOT}[math,parquet]")
    tried = subprocess.run(
        f"{command} --dry-run --no-deps",
        shell=True, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert tried.returncode == 0 and "Would install prorl-envs" in tried.stdout, tried.stdout + tried.stderr


def test_the_hint_of_a_wheel_names_packages_of_the_index(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, capture_output=True, check=True)
    [wheel] = tmp_path.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path / "site")]
    subprocess.run([*pip, str(wheel)], check=True)
    hint = printed(sys.executable, "-c", HINT, PYTHONPATH=str(tmp_path / "site"))
    assert hint.startswith(f"{sys.executable} -m pip install ")
    names = {re.split(r"[<>=]", word)[0] for word in shlex.split(hint)[4:]}
    assert names == {"math-verify", "pyarrow"}


def test_an_environment_without_pip_is_changed_by_uv(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    (tmp_path / "bin").mkdir()
    uv = tmp_path / "bin" / "uv"
    uv.touch(mode=0o755)
    python = tmp_path / "venv" / "bin" / "python"
    hint = printed(python, "-c", HINT, PYTHONPATH=str(ROOT), PATH=str(uv.parent))
    assert shlex.split(hint) == [
        *[str(uv), "pip", "install", "--python", str(python)],
        *["-e", f"{ROOT}[math,parquet]"],
    ]


@pytest.mark.parametrize("suffix", [".md", ".py", ".txt", ".sh"])
def test_nothing_promises_that_an_index_has_this_package(suffix: str) -> None:
    """The package is not published yet. NeMo Gym servers require it: it is installed first."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", f"*{suffix}"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    promise = re.compile(r"pip install ['\"]?prorl-envs\[")
    for name in filter(None, listed.split("\0")):
        path = ROOT / name
        if path.is_file() and path != Path(__file__):
            assert not (found := promise.search(path.read_text())), f"{name}: {found}"


@pytest.mark.parametrize("name", sorted(INTEGRATIONS))
def test_an_integration_without_its_framework_names_the_command(name: str) -> None:
    with pytest.raises(InputError, match=r"is not installed.*pip install"):
        importlib.import_module(f"prorl_envs.integrations.{name}")
