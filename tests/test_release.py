"""`make release`: its refusals, the package's page, and an upload to a real index."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from email import message_from_bytes
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from zipfile import ZipFile

import httpx
import pytest
import yaml

from prorl_envs import __version__
from tests.checkouts import ROOT, copy_checkout

REPOSITORY = "https://github.com/example/prorl-envs"


@pytest.fixture(scope="module")
def hook() -> ModuleType:
    spec = spec_from_file_location("package_metadata", ROOT / "scripts" / "package_metadata.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[a](docs/a.md#b)", f"[a]({REPOSITORY}/blob/v1/docs/a.md#b)"),
        ("![a](docs/a.png)", f"![a]({REPOSITORY}/raw/v1/docs/a.png)"),
        ('<img alt="x" src="docs/a.png">', f'<img alt="x" src="{REPOSITORY}/raw/v1/docs/a.png">'),
        ("[![a](a.svg)](a.md)", f"[![a]({REPOSITORY}/raw/v1/a.svg)]({REPOSITORY}/blob/v1/a.md)"),
        ("[a](https://x.org/y) [b](#c)", "[a](https://x.org/y) [b](#c)"),
    ],
)
def test_links_of_the_readme_become_absolute(hook: ModuleType, text: str, expected: str) -> None:
    assert hook.absolute(text, REPOSITORY, "v1") == expected


def test_the_package_renders_on_an_index_and_has_links(tmp_path: Path) -> None:
    environ = {**os.environ, "RELEASE_REPOSITORY": REPOSITORY}
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, env=environ, capture_output=True, check=True)
    [wheel] = tmp_path.glob("*.whl")
    checked = subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", wheel],
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert checked.returncode == 0 and "PASSED" in checked.stdout, checked.stdout + checked.stderr
    with ZipFile(wheel) as packed:
        metadata = message_from_bytes(packed.read(f"prorl_envs-{__version__}.dist-info/METADATA"))
    urls = dict(str(url).split(", ") for url in metadata.get_all("Project-URL") or ())
    assert urls["Issues"] == f"{REPOSITORY}/issues" and len(urls) == 5
    assert f"]({REPOSITORY}/blob/v{__version__}/docs/tutorial.md)" in str(metadata.get_payload())


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Repository with this checkout's files, ready to be released."""
    copy = copy_checkout(tmp_path / "checkout")
    log = copy / "CHANGELOG.md"
    log.write_text(
        log.read_text().replace(f"## {__version__} (unreleased)", f"## {__version__} (2027-01-31)")
    )
    subprocess.run(["git", "init", "--quiet", copy], check=True)
    commit(copy)
    return copy


def commit(checkout: Path) -> None:
    author = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    subprocess.run(["git", "-C", checkout, "add", "--all"], check=True)
    subprocess.run(
        ["git", "-C", checkout, *author, "commit", "--quiet", "--allow-empty", "-m", "x"], check=True
    )


def release(checkout: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "scripts/release.py", *arguments],
        cwd=checkout, capture_output=True, text=True, check=False,
        env={**os.environ, "VENV": sys.prefix, "RELEASE_REPOSITORY": REPOSITORY, **environ},
    )  # fmt: skip


def test_a_checkout_that_is_not_ready_is_refused(checkout: Path) -> None:
    log = checkout / "CHANGELOG.md"
    log.write_text(log.read_text().replace("(2027-01-31)", "(unreleased)"))
    assert "not committed" in release(checkout).stderr
    commit(checkout)
    assert f"no heading `## {__version__} (YYYY-MM-DD)`" in release(checkout).stderr
    log.write_text(log.read_text().replace("(unreleased)", "(2027-01-31)"))
    commit(checkout)
    subprocess.run(["git", "-C", checkout, "tag", f"v{__version__}", "HEAD^"], check=True)
    assert "is on another commit" in release(checkout).stderr
    subprocess.run(["git", "-C", checkout, "tag", "-d", f"v{__version__}"], check=True, capture_output=True)
    assert "name the project's page in RELEASE_REPOSITORY" in release(checkout, RELEASE_REPOSITORY="").stderr
    (checkout / "prorl_envs" / "__init__.py").write_text('__version__ = "9"\n')
    commit(checkout)
    assert "another version" in release(checkout).stderr
    assert not (checkout / "build").exists()


@contextmanager
def index(folder: Path) -> Iterator[str]:
    """URL of a package index that accepts uploads."""
    folder.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [
        sys.executable,
        "-m",
        "pypiserver",
        "run",
        "-i",
        "127.0.0.1",
        "-p",
        str(port),
        "-a",
        ".",
        "-P",
        ".",
    ]
    with subprocess.Popen([*command, folder], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            while server.poll() is None:
                with suppress(httpx.TransportError):
                    httpx.get(url)
                    break
            yield url
        finally:
            server.terminate()


@pytest.mark.thorough
def test_a_release_can_be_installed_from_the_index(checkout: Path, tmp_path: Path) -> None:
    with index(tmp_path / "index") as url:
        done = release(
            checkout, "--yes", TWINE_REPOSITORY_URL=url, TWINE_USERNAME="anyone", TWINE_PASSWORD="anything"
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"git tag v{__version__}" in done.stdout
        names = {path.name for path in (tmp_path / "index").iterdir()}
        assert names == {f"prorl_envs-{__version__}.tar.gz", f"prorl_envs-{__version__}-py3-none-any.whl"}
        site = tmp_path / "site"
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site)]
        environ = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
        subprocess.run([*pip, "--index-url", f"{url}/simple", "prorl-envs"], env=environ, check=True)
        assert (site / "prorl_envs" / "envs" / "bash" / "data" / "example.jsonl").is_file()


def test_the_workflow_calls_existing_targets() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    build, publish = workflow["jobs"]["build"], workflow["jobs"]["publish"]
    assert any(step.get("run") == "make release ARGS=--no-upload" for step in build["steps"])
    assert publish["permissions"] == {"id-token": "write"} and publish["environment"] == "pypi"
    [check] = [step["run"] for step in build["steps"] if "grep" in step.get("run", "")]
    for tag, status in ((f"v{__version__}", 0), ("v9.9", 1)):
        done = subprocess.run(
            ["sh", "-c", check], cwd=ROOT, env={**os.environ, "GITHUB_REF_NAME": tag}, check=False
        )
        assert done.returncode == status
