"""The shell blocks of the documentation, run as written: in a folder with the files that their pages assume,
with a real scripted model server and service in place of the addresses of the pages."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from prorl_envs.env.registry import example_path
from prorl_envs.rollout.api.types import GroupRequest
from prorl_envs.rollout.client.sync import SyncRolloutClient
from prorl_envs.rollout.client.token_files import LocalToken
from tests.cli.conftest import SCRIPT
from tests.docs.blocks import BLOCKS, ROOT, Block, commands, parametrize
from tests.viewer.conftest import result, written

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(200)]

#: Commands that run until they are interrupted; each prints an address once it is ready.
ENDLESS = re.compile(r"prorl-envs (serve|view(?!.* --html))\b")
_SLOWEST_S = 150


@dataclass(frozen=True, slots=True)
class World:
    """Folder, model server and service that the pages assume.

    Args:
        folder: working directory of the commands.
        model: the options that name the model server and its tokenizer.
        service: URL of a service.
    """

    folder: Path
    model: str
    service: str

    def typed(self, line: str) -> str:
        """Return a command with local addresses in place of those of the page."""
        line = re.sub(r"--llm http://\S+/v1", self.model, line)
        line = line.replace("http://127.0.0.1:8600", self.service).replace("--port 8600", "--port 0")
        return line.replace("http://host:8000", re.findall(r"--llm (\S+)/v1", self.model)[0])

    @property
    def environ(self) -> dict[str, str]:
        return {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "COLUMNS": "120",
            "HOME": str(self.folder),
            "PRORL_CACHE_DIR": str(self.folder / "cache"),
            # Commands that a page forgets to mark must not install anything into this environment.
            "PIP_NO_INDEX": "1",
            "UV_OFFLINE": "1",
            "PRORL_SERVER__PORT": self.service.rpartition(":")[2],
        }


@contextmanager
def running_command(folder: Path, *arguments: str, until: str) -> Iterator[str]:
    """Run a command of ours until the block ends; yield the match of the first line that fits. Its sandboxes
    have a folder of their own: a service keeps some ready from one test to the next, which is not a leak."""
    places = {"PRORL_CACHE_DIR": str(folder / "cache")}
    with (
        tempfile.TemporaryDirectory(prefix="prt-") as apart,
        subprocess.Popen(
            [SCRIPT, *arguments], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, "COLUMNS": "200", **places, "PRORL_RUN_DIR": apart},
        ) as process,
    ):  # fmt: skip
        assert process.stdout is not None
        try:
            said = ""
            for line in process.stdout:
                said += line
                if found := re.search(until, line):
                    yield found[0]
                    return
            pytest.fail(f"{arguments}: {said}")
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=60)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("docs")
    (folder / ".venv").symlink_to(sys.prefix)
    (folder / "examples").symlink_to(ROOT / "examples")
    [row] = [json.loads(b.body) for b in BLOCKS if b.page == "envs/bash/README.md" and b.language == "json"]
    (folder / "tasks.jsonl").write_text(json.dumps(row) + "\n")
    (folder / "library").mkdir()
    (folder / "library" / "falling.txt").write_text("Bodies fall with 9.81 metres per second squared.")
    (folder / "questions.jsonl").write_text(example_path("stem").read_text().splitlines()[0] + "\n")
    stored = [result("demo/bash/git-rescue/0"), result("demo/bash/git-rescue/1", reward=0.0)]
    (folder / "runs" / "latest").mkdir(parents=True)
    written(folder / "runs" / "latest" / "results.jsonl", *stored)
    with ExitStack() as stack:
        scripted = running_command(
            folder, "scripted-model", "bash", "--data", "tasks.jsonl", until=r"--llm .*"
        )
        model = stack.enter_context(scripted)
        options = [*model.split(), "--port", "0", "--store", "memory"]
        served = running_command(folder, "serve", *options, until=r"http://127[\d.:]+(?= )")
        service = stack.enter_context(served)
        with SyncRolloutClient(service) as client:
            names = {"step7/greeting": 1, "step7/log": 4}
            groups = [GroupRequest(id=n, environment="bash", task=row, samples=c) for n, c in names.items()]
            client.submit(groups)
            assert len(list(client.follow(list(names)))) == 5
        yield World(folder, model, service)


@parametrize("bash", runs=True)
def test_shell_blocks_run(block: Block, world: World) -> None:
    if block.page == "docs/tutorial.md":
        pytest.skip("tests/test_tutorial.py runs it, as a part of the whole")
    lines = [line for line in commands(block.body) if not block.left_out(line)]
    assert lines, f"{block.id}: nothing of it is run"
    script: list[str] = []
    for line in map(world.typed, lines):
        if ENDLESS.search(line):
            interrupted(world, line)
        else:
            script.append(line)
    done = subprocess.run(
        ["timeout", str(_SLOWEST_S), "bash", "-ec", "\n".join(script)],
        cwd=world.folder, env=world.environ, capture_output=True, text=True, check=False,
    )  # fmt: skip
    httpx.post(
        f"{world.service}/v1/resume", auth=LocalToken()
    ).raise_for_status()  # after pages that pause and drain it
    assert done.returncode == 0, f"{block.id}: {done.stdout[-3000:]}{done.stderr[-3000:]}"


def interrupted(world: World, line: str) -> None:
    """Run a command until it prints its address, then interrupt it like a user."""
    process = subprocess.Popen(
        ["bash", "-c", f"exec env {line}"], cwd=world.folder, env=world.environ,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    with process:
        said = next((text for text in process.stdout if "http://127." in text), "")
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=60)
    assert said and process.returncode in (0, 130), f"{line}: {said}{rest}"


@parametrize("json")
def test_rows_with_a_reference_are_valid(block: Block, world: World) -> None:
    if '"reference"' not in block.body:
        pytest.skip("it has no reference, which is what would be tried")
    family = Path(block.page).parent.name
    (world.folder / f"{family}.jsonl").write_text(json.dumps(json.loads(block.body)) + "\n")
    done = subprocess.run(
        [SCRIPT, "validate", family, f"{family}.jsonl"],
        cwd=world.folder, env=world.environ, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
