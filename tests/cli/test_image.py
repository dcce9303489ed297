"""The image commands, as a user types them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import FastCli
from tests.conftest import existing_driver
from tests.sandbox.rootfs import write_busybox_rootfs

PROGRAM = Path(sys.executable).parent / "prorl-envs"


def run(tmp_path: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [PROGRAM, "image", *arguments],
        capture_output=True,
        text=True,
        env=environment(tmp_path),
        check=False,
    )


def environment(tmp_path: Path) -> dict[str, str]:
    own = {"PRORL_IMAGE_CACHE": str(tmp_path / "cache"), "PRORL_IMAGES__LAYERS_DIR": str(tmp_path / "layers")}
    return {**os.environ, **own, "COLUMNS": "200"}


def write_context(tmp_path: Path, busybox: str, text: str) -> list[str | Path]:
    """Write a context with a Dockerfile, and a base with busybox; return the arguments of its build."""
    if not (tmp_path / "root").exists():
        write_busybox_rootfs(tmp_path / "root", busybox)
    (tmp_path / "context").mkdir(exist_ok=True)
    (tmp_path / "context" / "Dockerfile").write_text(text)
    return ["build", tmp_path / "context", "--base", f"base={tmp_path / 'root'}"]


def test_a_dockerfile_is_built_with_readable_progress(tmp_path: Path, busybox: str) -> None:
    (tmp_path / "token").write_text("t")
    build = write_context(
        tmp_path,
        busybox,
        "ARG v=1\nFROM base AS one\nARG v\n"
        'RUN --mount=type=secret,id=s echo got $v "$(cat /run/secrets/s)" | cat > /said; cat /said\n'
        "FROM one\nRUN exit 1",
    )
    options = ["--target", "one", "--build-arg", "v=2", "--secret", f"s={tmp_path / 'token'}", "--tag", "a:1"]
    first, second = run(tmp_path, *build, *options), run(tmp_path, *build, *options)
    assert first.returncode == 0, first.stderr
    assert first.stdout == second.stdout == f"{tmp_path / 'layers' / 'images' / 'a-1.layers.json'}\n"
    assert "[3/3] RUN echo got $v" in first.stderr
    assert "  | got 2 t\n  made in " in first.stderr
    assert second.stderr.endswith("  in the store already\n")


def test_a_failed_build_names_the_failing_line(tmp_path: Path, busybox: str) -> None:
    done = run(tmp_path, *write_context(tmp_path, busybox, "FROM base\n\nRUN echo why; exit 7\n"))
    assert done.returncode == 2
    assert "Dockerfile:3: RUN failed with exit status 7" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_killed_build_leaves_nothing_incomplete(tmp_path: Path, busybox: str) -> None:
    build = write_context(tmp_path, busybox, "FROM base\nRUN echo half > /half; test -e /go || sleep 1000\n")
    with subprocess.Popen(
        [PROGRAM, "image", *build],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        env=environment(tmp_path),
    ) as process:
        assert process.stderr is not None
        while b"[2/2]" not in process.stderr.readline():
            pass
        process.kill()
    layers = tmp_path / "layers" / "layers"
    assert not layers.exists() or not list(layers.iterdir())
    changed_ns = (tmp_path / "root").stat().st_mtime_ns
    (tmp_path / "root" / "go").touch()
    os.utime(tmp_path / "root", ns=(changed_ns, changed_ns))  # the layer keeps its key
    done = run(tmp_path, *build)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in layers.iterdir() if (path / "half").is_file()]


@pytest.mark.thorough
def test_build_list_inspect_prune(tmp_path: Path, busybox: str) -> None:
    existing_driver("apptainer")
    write_busybox_rootfs(tmp_path / "root", busybox)
    definition = tmp_path / "task.def"
    definition.write_text("Bootstrap: localimage\nFrom: root\n\n%post\n    echo {{ word }} > /etc/said\n")
    build: list[str | Path] = ["build", definition, "--set", "word=hello", "--version", "3"]
    first, second = run(tmp_path, *build), run(tmp_path, *build)
    assert first.returncode == 0, first.stderr
    assert first.stdout == second.stdout
    image = Path(first.stdout.strip())
    assert image.is_file()
    assert image.parent.name in run(tmp_path, "list").stdout
    found = json.loads(run(tmp_path, "inspect", image.parent.name).stdout)
    assert found["labels"]["prorl.version"] == found["entry"]["version"] == "3"
    assert json.loads(run(tmp_path, "inspect", image).stdout)["labels"] == found["labels"]
    assert run(tmp_path, "prune", "--keep-gib", "0", "--unused-days", "0").stdout == f"{image.parent.name}\n"
    assert not image.exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["build", "absent.tar"], "no such image"),
        (["build", "ftp://x/y"], "unknown source"),
        (["build", "absent.def"], "cannot read the definition"),
        (["build", "host", "--name", "x"], "are for definitions"),
        (["build", "x.def", "--set", "novalue"], "NAME=VALUE"),
        (["build", "absent", "--target", "x"], "has no Dockerfile"),
        (["build", "absent", "--file", "/etc/passwd"], "unknown instruction"),
        (["build", ".", "--file", "absent"], "cannot be read"),
        (["pull", "busybox"], "not an address"),
        (["inspect", "absent"], "no such image"),
        (["inspect", "/etc/passwd"], "not an image"),
    ],
)
def test_wrong_input_is_one_line_and_a_hint(fast_cli: FastCli, arguments: list[str], says: str) -> None:
    done = fast_cli("image", *arguments)
    assert done.code == 2
    assert says in done.err
    assert done.err.startswith("error: ")
    assert "Traceback" not in done.err


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.gpu", "dockerfile"])
def test_a_dockerfile_is_built_as_one_whatever_its_name(fast_cli: FastCli, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("FROM a\nNOPE\n")
    done = fast_cli("image", "build", str(tmp_path / name))
    assert done.code == 2
    assert "unknown instruction" in done.err
