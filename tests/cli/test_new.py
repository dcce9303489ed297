"""A new environment passes its own tests, validates, and is found by all three interfaces."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from prorl_envs.cli.commands.new import FLAVOURS, new
from prorl_envs.errors import InputError
from prorl_envs.extras import install_packages
from tests.cli.conftest import Cli
from tests.packages import install


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_new_environments_work_unmodified(tmp_path: Path) -> None:
    """One process tests all flavours. Slow tests (gymnasium's own check, the cheats) are omitted."""
    packages = [new(f"lab_{flavour}", flavour, tmp_path) for flavour in FLAVOURS]
    environ = install(tmp_path / "site", *packages)
    chosen = "discriminates or registered or refused"
    options = ["-q", "-p", "no:cacheprovider", "-W", "error", "--import-mode=importlib", "-k", chosen]
    tested = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *(package / "tests" for package in packages)],
        env=environ, cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert tested.returncode == 0, tested.stdout
    assert "9 passed" in tested.stdout


def test_nemo_gym_finds_a_new_environment_beside_its_own(tmp_path: Path) -> None:
    package = new("lab_book", "bash", tmp_path)
    site = tmp_path / "site"
    install(site, package)
    server = site / "resources_servers" / "prorl_lab_book"
    config = yaml.safe_load((server / "configs" / "prorl_lab_book.yaml").read_text())
    block = config["prorl_lab_book_resources_server"]["resources_servers"]["prorl_lab_book"]
    assert block["environment"] == "lab_book" and (server / block["entrypoint"]).is_file()
    agent = config["prorl_lab_book_simple_agent"]["responses_api_agents"]["simple_agent"]
    paths = {dataset["type"]: dataset["jsonl_fpath"] for dataset in agent["datasets"]}
    assert paths["train"] == "data/prorl_lab_book/train.jsonl"
    rows = [json.loads(line) for line in (site / paths["example"]).read_text().splitlines()]
    assert len(rows) == 5
    assert [row["verifier_metadata"]["task"]["id"] for row in rows][:2] == ["count-lines", "shout"]
    assert {row["agent_ref"]["name"] for row in rows} == {"prorl_lab_book_simple_agent"}
    assert (site / "environments" / "prorl_lab_book" / "config.yaml").is_file()
    assert not (site / "resources_servers" / "__init__.py").exists()


@pytest.mark.parametrize(
    ("name", "flavour", "says"),
    [
        ("Bash2", "bash", "cannot name an environment"),
        ("../x", "bash", "cannot name an environment"),
        ("class", "bash", "cannot name an environment"),
        ("bash", "bash", "registered already"),
        ("json", "bash", "module 'json' is installed"),
        ("fine", "fish", "no flavour 'fish'"),
        ("taken", "bash", "already exists"),
    ],
)
def test_an_invalid_name_is_refused(name: str, flavour: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(InputError, match=says):
        new(name, flavour, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_the_command_names_the_next_steps(cli: Cli, tmp_path: Path) -> None:
    done = cli("new", "lab_book", "--in", "here")
    assert done.returncode == 0, done.stderr
    installs, validates, tests = done.stdout.splitlines()
    assert installs == install_packages("-e", "here/lab_book[dev]")
    assert validates == "prorl-envs validate lab_book"
    assert tests == f"{sys.executable} -m pytest here/lab_book"
    project = tomllib.loads((tmp_path / "here" / "lab_book" / "pyproject.toml").read_text())["project"]
    assert any(requirement.startswith("pytest") for requirement in project["optional-dependencies"]["dev"])
