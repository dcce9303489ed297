"""NeMo Gym's own checks of a contribution pass for our servers and for a scaffolded one."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("nemo_gym", reason="run by scripts/test-nemo.sh in an environment of its own")

from prorl_envs.cli.commands.new import new
from prorl_envs.nemo.root import GymRoot
from prorl_envs.nemo.rows import BUILT_IN, server_name
from tests.nemo.gym import HAS_MANIFESTS, gym, prepared_root, server_folder
from tests.packages import UV

pytestmark = [pytest.mark.nemo, pytest.mark.timeout(900), pytest.mark.usefixtures("base_image")]

NAMES = (*BUILT_IN, "lab_book")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GymRoot]:
    """A root with a scaffolded package beside NeMo Gym: uv must find all requirements of its server there."""
    package = new("lab_book", "bash", tmp_path_factory.mktemp("packages"))
    pip = [UV, "pip", "--quiet"]
    options = ["--no-deps", "--no-build-isolation", "--python", sys.executable]
    subprocess.run([*pip, "install", *options, package], check=True)
    try:
        yield prepared_root(tmp_path_factory.mktemp("gym"))
    finally:
        subprocess.run([*pip, "uninstall", "--python", sys.executable, "prorl-env-lab-book"], check=True)


@pytest.fixture
def prepared_venv() -> Iterator[None]:
    """Undo the change of `uv venv --allow-existing`, which replaces the path of the virtual environment."""
    files = [Path(sys.prefix, "pyvenv.cfg"), *Path(sys.prefix, "bin").glob("activate*")]
    before = {path: path.read_bytes() for path in files}
    yield
    for path, content in before.items():
        path.write_bytes(content)


@pytest.mark.parametrize("name", NAMES)
def test_the_tests_of_a_server_pass_and_its_data_is_complete(root: GymRoot, name: str) -> None:
    flags = ["--resources-server", server_name(name), "+should_validate_data=true", *root.flags]
    done = gym(root, "env", "test", *flags)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "1 passed" in said and "has been successfully validated" in said


def test_a_missing_example_is_detected(root: GymRoot, tmp_path: Path) -> None:
    """NeMo Gym's check of the data includes our data."""
    copied = tmp_path / "resources_servers" / "prorl_lab_book"
    shutil.copytree(server_folder(root, "lab_book"), copied)
    example = copied / "data" / "example.jsonl"
    example.write_text("".join(example.read_text().splitlines(keepends=True)[:4]))
    (copied / "tests" / "test_app.py").write_text("def test_nothing() -> None: ...\n")
    broken = GymRoot(tmp_path, root.flags)
    flags = ["--resources-server", "prorl_lab_book", "+should_validate_data=true", *root.flags]
    done = gym(broken, "env", "test", *flags)
    assert done.returncode == 1 and "Data validation failed" in done.stdout + done.stderr


@pytest.mark.skipif(not HAS_MANIFESTS, reason="this NeMo Gym has no manifests")
@pytest.mark.usefixtures("prepared_venv")
@pytest.mark.parametrize("name", NAMES)
def test_a_server_can_be_published(root: GymRoot, name: str) -> None:
    """Validate the manifest, run the verifier's fixture and find the environment in the catalogue."""
    # These commands have no flags: the prepared virtual environments are below the current folder.
    done = gym(root, "env", "publish", server_name(name), within="venvs")
    said = " ".join((done.stdout + done.stderr).split())
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"Publication checks passed for environment {server_name(name)} 0.1.0" in said
    assert "(4 verifier cases)" in said


@pytest.mark.skipif(not HAS_MANIFESTS, reason="this NeMo Gym has no manifests")
@pytest.mark.usefixtures("prepared_venv")
@pytest.mark.parametrize("name", ["bash", "lab_book"])
def test_the_manifest_of_a_server_is_valid_and_its_verifier_tested(root: GymRoot, name: str) -> None:
    valid = gym(root, "env", "validate", server_name(name), within="venvs")
    assert valid.returncode == 0 and "profile=custom-gym-verifier" in valid.stdout, (
        valid.stdout + valid.stderr
    )
    tested = gym(root, "env", "test", server_name(name), within="venvs")
    assert tested.returncode == 0 and "4 cases passed" in tested.stdout, tested.stdout + tested.stderr
