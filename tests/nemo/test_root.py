"""The folder in which NeMo Gym finds the environments of a checkout."""

import sys
from pathlib import Path

import pytest

from prorl_envs.errors import InputError
from prorl_envs.nemo.root import gym_root
from prorl_envs.nemo.rows import BUILT_IN

FAMILIES = BUILT_IN


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """Make a virtual environment without our packages."""
    path = tmp_path / "venv"
    (path / "bin").mkdir(parents=True)
    (path / "bin" / "python").symlink_to(sys.executable)
    (path / "bin" / "activate").touch()
    return path


def test_every_family_is_found_under_its_server_name(tmp_path: Path, venv: Path) -> None:
    root = gym_root(tmp_path / "root", venv=venv)
    for name in FAMILIES:
        server = root.path / "resources_servers" / f"prorl_{name}"
        for part in (
            "app.py",
            "requirements.txt",
            "README.md",
            f"configs/prorl_{name}.yaml",
            "data/example.jsonl",
        ):
            assert (server / part).is_file(), f"{server / part}"
        for part in ("config.yaml", "manifest.yaml"):
            assert (root.path / "environments" / f"prorl_{name}" / part).is_file()


def test_no_project_file_lies_at_or_above_a_servers_folder(tmp_path: Path, venv: Path) -> None:
    """NeMo Gym resolves links, and assumes that a folder with such a file two levels up is its own
    checkout."""
    root = gym_root(tmp_path / "root", venv=venv)
    for server in (root.path / "resources_servers").iterdir():
        assert not (server.resolve() / "../../pyproject.toml").exists()


def test_every_server_finds_the_prepared_virtual_environment(tmp_path: Path, venv: Path) -> None:
    root = gym_root(tmp_path / "root", venv=venv)
    (flag,) = (flag for flag in root.flags if flag.startswith("+uv_venv_dir="))
    tree = Path(flag.partition("=")[2])
    servers = ["responses_api_agents/simple_agent", "responses_api_models/openai_model"]
    servers += ["responses_api_agents/prorl_agent", "environment_servers/prorl_rollouts"]
    for server in [*servers, *(f"resources_servers/prorl_{name}" for name in FAMILIES)]:
        assert (tree / server / ".venv" / "bin" / "activate").exists()


def test_servers_of_other_packages_find_the_virtual_environment_too(tmp_path: Path, venv: Path) -> None:
    installed = venv / "lib" / "python3.12" / "site-packages" / "resources_servers" / "prorl_lab_book"
    installed.mkdir(parents=True)
    (installed / "app.py").touch()
    root = gym_root(tmp_path / "root", venv=venv)
    assert (root.path / "venvs/resources_servers/prorl_lab_book/.venv").readlink() == venv
    assert not (root.path / "resources_servers/prorl_lab_book").exists()  # NeMo Gym finds it in its package


def test_servers_installed_into_the_root_find_the_virtual_environment_too(tmp_path: Path, venv: Path) -> None:
    installed = tmp_path / "root" / "resources_servers" / "prorl_lab_book"
    installed.mkdir(parents=True)
    (installed / "app.py").touch()
    root = gym_root(tmp_path / "root", venv=venv)
    assert (root.path / "venvs/resources_servers/prorl_lab_book/.venv").readlink() == venv


def test_a_second_call_changes_nothing_and_removes_stale_links(tmp_path: Path, venv: Path) -> None:
    first = gym_root(tmp_path / "root", venv=venv)
    stale = first.path / "resources_servers" / "prorl_bash" / "gone.py"
    stale.symlink_to(tmp_path / "gone.py")
    assert gym_root(tmp_path / "root", venv=venv) == first
    assert not stale.is_symlink()


def test_servers_of_the_installed_package_are_not_found_twice(tmp_path: Path, venv: Path) -> None:
    gym_root(tmp_path / "root", venv=venv)
    installed = venv / "lib" / "python3.12" / "site-packages" / "resources_servers" / "prorl_bash"
    installed.mkdir(parents=True)
    (installed / "app.py").touch()
    root = gym_root(tmp_path / "root", venv=venv)
    assert not (root.path / "resources_servers" / "prorl_bash").exists()
    assert (root.path / "venvs" / "resources_servers" / "prorl_bash" / ".venv").exists()


def test_a_root_with_a_project_file_is_refused(tmp_path: Path, venv: Path) -> None:
    (tmp_path / "pyproject.toml").touch()
    with pytest.raises(InputError, match=r"pyproject\.toml"):
        gym_root(tmp_path, venv=venv)


def test_a_python_without_a_virtual_environment_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not a virtual environment"):
        gym_root(tmp_path / "root", venv=tmp_path)


def test_an_existing_file_is_refused_and_named(tmp_path: Path, venv: Path) -> None:
    taken = tmp_path / "root" / "resources_servers" / "prorl_bash" / "app.py"
    taken.parent.mkdir(parents=True)
    taken.write_text("mine")
    with pytest.raises(InputError, match="in the way"):
        gym_root(tmp_path / "root", venv=venv)
    assert taken.read_text() == "mine"
