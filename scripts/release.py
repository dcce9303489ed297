"""Publish a release on the package index: `make release` (ARGS=--no-upload: without the upload).

The script checks that the checkout has no changes, that all files name the same version, and that
CHANGELOG.md describes it. It builds the archives, checks the index page, installs the wheel into a new
environment, runs it, and uploads the archives. If a step fails, nothing is uploaded. CONTRIBUTING.md
describes the procedure.

Environment variables: RELEASE_REPOSITORY, the project's page on GitHub (by default the remote `origin`); and
twine's variables for the index and its credentials: TWINE_REPOSITORY_URL, TWINE_USERNAME, TWINE_PASSWORD.
"""

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "build" / "release"
_REMOTE = re.compile(r"(?:https://|git@|ssh://git@)github\.com[:/]([\w.-]+/[\w.-]+?)(?:\.git)?/?")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--no-upload", action="store_true", help="stop before the upload")
    parser.add_argument("--yes", action="store_true", help="do not ask before the upload")
    options = parser.parse_args()

    version = checked_version()
    os.environ["RELEASE_REPOSITORY"] = repository()
    say(f"building prorl-envs {version} for {os.environ['RELEASE_REPOSITORY']}")
    files = build()
    run("twine", "check", "--strict", *files)
    say("testing the wheel in a new environment")
    try_wheel(next(file for file in files if file.endswith(".whl")), version)
    if options.no_upload:
        say(f"not uploaded: {' '.join(files)}")
        return
    if not options.yes and input(f"Upload prorl-envs {version}? It cannot be undone. [y/N] ").lower() != "y":
        sys.exit("nothing was uploaded")
    run("twine", "upload", "--non-interactive", *files) if options.yes else run("twine", "upload", *files)
    say(f"published. Tag it: git tag v{version} && git push origin v{version}")


def checked_version() -> str:
    """Return the version. Exit with an error if the checkout is not ready for its release."""
    if changed := git("status", "--porcelain"):
        sys.exit(f"error: there are changes that are not committed:\n{changed}")
    version = str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])
    if f'__version__ = "{version}"' not in (ROOT / "prorl_envs" / "__init__.py").read_text():
        sys.exit(f"error: prorl_envs/__init__.py has another version than pyproject.toml ({version})")
    if not re.search(
        rf"^## {re.escape(version)} \(\d{{4}}-\d\d-\d\d\)$", (ROOT / "CHANGELOG.md").read_text(), re.M
    ):
        sys.exit(f"error: CHANGELOG.md has no heading `## {version} (YYYY-MM-DD)`")
    tagged = git("tag", "--points-at", "HEAD").split()
    if (tag := f"v{version}") not in tagged and git("tag", "--list", tag):
        sys.exit(f"error: the tag {tag} is on another commit; raise the version")
    return version


def repository() -> str:
    """Return the project's page on GitHub."""
    if page := os.environ.get("RELEASE_REPOSITORY"):
        return page
    found = _REMOTE.fullmatch(git("remote", "get-url", "origin", check=False))
    if found is None:
        sys.exit(
            "error: the remote `origin` is not on GitHub\nhint: name the project's page in RELEASE_REPOSITORY"
        )
    return f"https://github.com/{found[1]}"


def build() -> list[str]:
    """Build the source archive, and a wheel from the archive. Return the paths of both."""
    shutil.rmtree(DIST, ignore_errors=True)
    subprocess.run([ROOT / "scripts" / "uv.sh", "build", "--out-dir", DIST, "."], cwd=ROOT, check=True)
    return [str(path) for path in sorted(DIST.iterdir()) if path.suffix in (".whl", ".gz")]


def try_wheel(wheel: str, version: str) -> None:
    """Install the wheel with its dependencies into a new environment, and run its program."""
    with tempfile.TemporaryDirectory(prefix="prorl-release-") as folder:
        venv = Path(folder) / "venv"
        uv = ROOT / "scripts" / "uv.sh"
        subprocess.run([uv, "venv", "--python", sys.executable, venv], check=True)
        subprocess.run(
            [uv, "pip", "install", "--python", venv / "bin" / "python", f"{wheel}[data]"], check=True
        )
        program = [str(venv / "bin" / "prorl-envs"), "--driver", "local", "doctor"]
        done = subprocess.run(program, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode != 0 or version not in done.stdout:
            sys.exit(f"error: the wheel does not run:\n{done.stdout}{done.stderr}")


def git(*arguments: str, check: bool = True) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=check
    ).stdout.strip()


def run(module: str, *arguments: str) -> None:
    if importlib.util.find_spec(module) is None:
        sys.exit(f"error: {module} is not installed\nhint: scripts/setup.sh test")
    if subprocess.run([sys.executable, "-m", module, *arguments], cwd=ROOT, check=False).returncode != 0:
        sys.exit(f"error: {module} {arguments[0]} failed")


def say(text: str) -> None:
    print(f"== {text}", flush=True)


if __name__ == "__main__":
    main()
