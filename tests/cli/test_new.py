"""A new environment passes its own tests and validates at once, and is there in all three faces."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from prorl_envs.cli.new import FLAVOURS, new
from prorl_envs.errors import InputError
from tests.cli.conftest import Cli

UV = shutil.which("uv") or Path(sys.executable).with_name("uv")


def install(target: Path, *packages: Path) -> dict[str, str]:
    """Install packages beside ours; the environment in which they are found."""
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--python", sys.executable]
    subprocess.run([UV, "pip", "install", *options, "--target", target, *packages], check=True)
    return {**os.environ, "PYTHONPATH": str(target)}


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_new_environments_work_as_they_are(tmp_path: Path) -> None:
    """Of all flavours in one process, which starts once; what plays many episodes (gymnasium's own check, the
    cheats) is left out."""
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


def test_nemo_gym_finds_it_beside_its_own(tmp_path: Path) -> None:
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
    assert [row["verifier_metadata"]["task"]["id"] for row in rows] == ["count-lines", "shout"]
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
        ("taken", "bash", "is already there"),
    ],
)
def test_a_name_that_cannot_be_is_refused(name: str, flavour: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(InputError, match=says):
        new(name, flavour, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_the_command_says_what_comes_next(cli: Cli, tmp_path: Path) -> None:
    done = cli("new", "lab_book", "--in", "here")
    assert done.returncode == 0, done.stderr
    assert "prorl-envs validate lab_book" in done.stdout
    assert (tmp_path / "here" / "lab_book" / "pyproject.toml").is_file()
