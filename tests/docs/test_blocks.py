"""Code blocks of the documentation are parsed by parsers of their languages; Python blocks are run."""

import ast
import asyncio
import json
import re
import shlex
import subprocess
import tomllib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.core import TyperGroup

from prorl_envs.app.compose import request_defaults
from prorl_envs.catalog import Catalog
from prorl_envs.config import Settings
from prorl_envs.env.node import Node
from prorl_envs.loggers.base import LoggedRun, RunLogger
from prorl_envs.loggers.reporting import RunReport
from prorl_envs.model.routing.pool import ModelPool
from prorl_envs.rollout.api.summary import summarise
from prorl_envs.rollout.api.types import GroupRequest
from prorl_envs.rollout.client.client import RolloutClient
from prorl_envs.rollout.http.server import serving
from prorl_envs.rollout.service.service import RolloutService
from prorl_envs.testing.scripted import Call
from prorl_envs.testing.tokenizer import builtin_renderer
from prorl_envs.tools.types import ToolCall
from tests.docs.blocks import BLOCKS, ROOT, Block, commands, pages, parametrize
from tests.support.toy import ToyModel, ToyWorld, empty_node
from tests.test_docs import program
from tests.viewer.conftest import result, written

pytestmark = pytest.mark.anyio

#: Languages of blocks. Blocks without a name are output and drawings.
LANGUAGES = {"bash", "bibtex", "python", "yaml", "json", "toml", "http", "text", ""}
ROWS = [{"id": f"t{n}", "instruction": "Do."} for n in range(2)]


def test_blocks_have_known_languages_and_comments_stand_above_them() -> None:
    assert {block.language for block in BLOCKS} <= LANGUAGES
    assert len([block for block in BLOCKS if block.runs and block.language != "http"]) > 30
    for block in BLOCKS:
        if block.only:
            assert any(block.left_out(line) for line in commands(block.body)), (
                f"{block.id}: nothing is left out"
            )
    texts = [(ROOT / page).read_text() for page in pages()]
    said = sum(len(re.findall(r"^<!-- not run here", text, re.MULTILINE)) for text in texts)
    assert said == sum(bool(block.why) for block in BLOCKS), "a comment does not stand right above a block"


# Shell.


def parse(words: list[str]) -> None:
    """Parse a command as the program does, without executing it.

    Raises:
        Exception: with a `format_message`, as Typer's parser has it.
    """
    command: Any = program()
    context = command.make_context("prorl-envs", list(words))
    while isinstance(command, TyperGroup) and (rest := [*context._protected_args, *context.args]):
        name, found, rest = command.resolve_command(context, rest)
        assert found is not None  # otherwise it has raised
        command, context = found, found.make_context(name, rest, parent=context)


def problem_of(words: list[str]) -> str:
    """Return the program's error for a command line; "" if it accepts the line."""
    try:
        parse(words)
    except Exception as error:  # noqa: BLE001 - the classes of its errors are private to Typer
        return str(error.format_message()) if hasattr(error, "format_message") else repr(error)
    return ""


#: The program as the command: after variables, and after programs that start it elsewhere.
CALL = re.compile(r"^(?:\w+=\S* )*(?:srun .*?|exec )?(?:\S*/)?prorl-envs((?:\s.*)?)$")


def our_commands(line: str) -> list[list[str]]:
    """Return the words of each call of our program in a shell line."""
    line = line.replace("$(grep -- --llm scripted.txt)", "--llm http://h/v1 --tokenizer WORD")
    line = re.sub(r"\$\(hostname\)", "WORD", line)
    line = re.sub(r"\s[0-9&]*>+\s*&?\S+", "", line)
    parts = re.split(r"&&|\|\||[|;&]|\bsh -c '|'$", line)
    found = (CALL.search(part.strip()) for part in parts)
    return [shlex.split(one[1]) for one in found if one]


@parametrize("bash")
def test_shell_blocks_are_valid_and_our_commands_have_these_options(block: Block) -> None:
    done = subprocess.run(["bash", "-n"], input=block.body, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for line in commands(block.body):
        for words in our_commands(line):
            problem = problem_of(words)
            assert not problem or "does not exist" in problem, f"{block.id}: {line}: {problem}"


def test_the_parser_detects_errors() -> None:
    assert our_commands('FOO=1 prorl-envs run "a b" | tee x && .venv/bin/prorl-envs show r') == [
        ["run", "a b"],
        ["show", "r"],
    ]
    assert our_commands("sbatch x sh -c 'prorl-envs run bash --samples 8'") == [
        ["run", "bash", "--samples", "8"]
    ]
    wrong = {
        "rnu bash": "No such command",
        "run bash --sample 8": "No such option",
        "run bash --samples x": "valid integer",
    }
    for typed, problem in wrong.items():
        assert problem in problem_of(typed.split())


# Data.


@parametrize("yaml")
def test_yaml_blocks_are_settings(block: Block) -> None:
    found = yaml.safe_load(block.body)
    if block.runs:
        if own := found.get("environments", {}).get("lab_notes"):  # created by the page
            own["family"] = "bash"
        settings = Settings.model_validate(found)
        Catalog.of(settings)
        request_defaults(settings)


@parametrize("json")
def test_json_blocks_are_rows_of_their_family(block: Block) -> None:
    fragment = block.body.lstrip().startswith('"')
    row = json.loads(f"{{{block.body}}}" if fragment else block.body)
    family = re.fullmatch(r"envs/(\w+)/README\.md", block.page)
    if block.runs and family is not None and not fragment:
        Catalog.of(Settings()).family(family[1]).load(row)


@parametrize("toml")
def test_toml_blocks_are_toml(block: Block) -> None:
    assert tomllib.loads(block.body)


# Python.


async def use_rollouts(made: dict[str, Any], url: str) -> None:
    rows = [row async for row in made["rollouts"](ROWS)]
    assert len(rows) == 16 and all(reward == 1.0 for *_, reward in rows)


async def use_steps(made: dict[str, Any], url: str) -> None:
    seen: list[list[str]] = []

    async def train(results: list[Any]) -> int:
        seen.append([one.batch_id for one in results])
        return len(seen)

    async with RolloutClient(url) as client:
        await made["steps"](client, [ROWS, ROWS], train)
    assert len(seen) == 2


async def use_pivots(made: dict[str, Any], url: str) -> None:
    async with RolloutClient(url) as client:
        await client.submit([GroupRequest(id="profiled", environment="bash", task=ROWS[0], samples=1)])
        [profiled] = [result async for result in client.follow(["profiled"])]
        assert await made["pivots"](client, profiled.job_id) == [1]


async def use_episode(made: dict[str, Any], url: str) -> None:
    rows, reward = await made["episode"](ROWS[0])
    assert rows == [] or reward is not None


async def use_update(made: dict[str, Any], url: str) -> None:
    done: list[str] = []

    async def upload() -> None:
        done.append("uploaded")

    async with RolloutClient(url) as client:
        await made["update"](client, upload, 3)
    assert done == ["uploaded"]


async def use_rewards(made: dict[str, Any], url: str) -> None:
    assert await asyncio.to_thread(made["rewards"], ROWS) == {"eval/t0": 1.0, "eval/t1": 1.0}
    failing = {**ROWS[0], "faults": {"eval": "grader"}}
    await asyncio.to_thread(made["rewards"], [{**failing, "id": "bad"}])

    def first() -> str:
        results = made["failures"]()
        try:
            return str(next(results).group_id)
        finally:
            results.close()

    assert await asyncio.to_thread(first) == "eval/bad"


async def use_notes(made: dict[str, Any], url: str) -> None:
    task = made["NotesTask"](id="n", instruction="Two lines.", expected="2")
    async with Node.local() as node, made["NotesEnvironment"](node) as episode:
        await episode.init(task)
        await episode.call(ToolCall("1", "bash", {"command": "test -e notes.txt && seq 2 > answer.txt"}))
        await episode.call(ToolCall("2", "finish", {}))
        assert (await episode.eval()).reward == 1.0


async def use_logger(made: dict[str, Any], url: str) -> None:
    await asyncio.to_thread(log_a_result, made["FileLogger"]({"file": "metrics.jsonl"}))


def log_a_result(logger: RunLogger) -> None:
    warnings: list[str] = []
    report = RunReport([("file", logger)], warnings.append)
    report.start(
        LoggedRun(
            name="r", environment="bash", model="", started="", version="", folder=Path(), samples=1,
            sampling={}, limits={},
        )
    )  # fmt: skip
    summaries = [summarise(result("g/0"))]
    report.add(summaries[0], summaries)
    report.finish(None, summaries)
    lines = [json.loads(line) for line in Path("metrics.jsonl").read_text().splitlines()]
    assert [line["mean_reward"] for line in lines] == [1.0, 1.0] and not warnings


#: How to call a function or class that a block defines.
USES: dict[str, Callable[[dict[str, Any], str], Awaitable[None]]] = {
    "rollouts": use_rollouts,
    "steps": use_steps,
    "episode": use_episode,
    "pivots": use_pivots,
    "update": use_update,
    "rewards": use_rewards,
    "NotesEnvironment": use_notes,
    "FileLogger": use_logger,
}


@pytest.fixture(scope="module")
async def service() -> AsyncIterator[str]:
    """A service whose environment `bash` runs commands without delay. Every second branch of a job fails."""

    def play(session: str, turn: int) -> list[Call]:
        fails = ":branch" in session and session.split("/")[-1] in ("1", "3")
        finish = {"tool": "finish", "arguments": {"reward": 0.0} if fails else {}}
        return [{"tool": "say", "arguments": {}}] if ":" not in session and turn == 0 else [finish]

    pool = ModelPool(lambda _: ToyModel(builtin_renderer(), play))
    pool.add("http://127.0.0.1:8000")  # no request is sent to it
    served = RolloutService(empty_node(), {"bash": ToyWorld().family()}, builtin_renderer(), pool)
    async with serving(served) as url:
        yield url


@parametrize("python", runs=True)
async def test_python_blocks_run(
    block: Block, service: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if block.page == "docs/tutorial.md":
        pytest.skip("tests/test_tutorial.py runs it, as a part of the whole")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "latest").mkdir(parents=True)
    written(tmp_path / "runs" / "latest" / "results.jsonl", result("g/0"))
    made: dict[str, Any] = {"__name__": "block"}
    body = block.body.replace("http://127.0.0.1:8600", service)
    await asyncio.to_thread(exec, compile(body, block.id, "exec"), made)
    defined = [name for name, value in made.items() if getattr(value, "__module__", "") == "block"]
    used = [name for name in defined if name in USES]
    assert bool(used) == bool(defined), f"say in USES what becomes of {defined}"
    for name in used:
        await USES[name](made, service)


@parametrize("python", runs=False)
def test_python_blocks_that_are_not_run_compile_and_import(block: Block) -> None:
    tree = ast.parse(block.body)
    compile(tree, block.id, "exec")
    if "NeMo Gym" not in block.why:
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
        exec(compile(ast.Module(body=list[ast.stmt](imports), type_ignores=[]), block.id, "exec"), {})
