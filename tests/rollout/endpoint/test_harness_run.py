"""Harnesses in real sandboxes without a network, run by the service: a small agent of the standard library,
and failures of agents."""

import pickle
import shutil
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from prorl_envs.catalog import Catalog
from prorl_envs.cli.options import catalog_without_harness
from prorl_envs.config import load_settings
from prorl_envs.conformance.subject import DRIVERS
from prorl_envs.env.harness.family import with_harness
from prorl_envs.env.harness.recipe import Recipe, Spelling, filled
from prorl_envs.env.node import Node
from prorl_envs.env.replay import replay
from prorl_envs.envs.bash.env import BashEnvironment
from prorl_envs.errors import FailureKind, InputError, ModelError
from prorl_envs.gym.env import TaskEnv
from prorl_envs.model.routing.pool import ModelPool
from prorl_envs.model.servers.detect import Servers
from prorl_envs.model.types import ModelClient
from prorl_envs.rollout.api.types import AgentLimits, GroupRequest, JobState, Result, StopReason
from prorl_envs.rollout.service.service import RolloutService
from prorl_envs.sandbox.drivers.bubblewrap import BubblewrapDriver
from prorl_envs.testing.scripted import Script, ScriptBook
from prorl_envs.testing.tokenizer import builtin_renderer
from tests.conftest import existing_driver
from tests.rollout.endpoint.conftest import check_rows
from tests.support.timed_server import TimedServer
from tests.support.toy import ToyModel

pytestmark = pytest.mark.anyio

ROW = {
    "id": "greeting",
    "instruction": "Write hello to hi.txt.",
    "checks": [{"type": "file_equals", "path": "hi.txt", "text": "hello\n"}],
    "reference": [
        {"tool": "bash", "arguments": {"command": "ls"}},
        {"tool": "bash", "arguments": {"command": "echo hello > hi.txt"}},
        {"tool": "finish", "arguments": {}},
    ],
}
CALL = """\
import json, os, subprocess, sys, urllib.request

def ask(messages, key=os.environ["OPENAI_API_KEY"]):
    tools = [{"type": "function", "function": {"name": "shell", "parameters": {"type": "object"}}}]
    body = json.dumps({"model": "m", "messages": messages, "tools": tools}).encode()
    headers = {"authorization": "Bearer " + key, "content-type": "application/json"}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    answer = urllib.request.urlopen(urllib.request.Request(url, body, headers))
    return json.load(answer)["choices"][0]["message"]

messages = [{"role": "user", "content": sys.stdin.read()}]
"""
AGENT = (
    CALL
    + """\
while calls := (messages.append(ask(messages)) or messages[-1].get("tool_calls")):
    for call in calls:
        command = json.loads(call["function"]["arguments"])["command"]
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": done.stdout})
"""
)
SPELLING = Spelling(tool="shell")


def recipe(script: str, **fields: Any) -> Recipe:
    return Recipe(
        name="own",
        command=("/usr/bin/python3", "-c", script),
        stdin="{instruction}",
        spelling=SPELLING,
        **fields,
    )


@pytest.fixture
async def node(shared_driver: BubblewrapDriver, tmp_path: Path) -> Node:
    return Node(shared_driver, tmp_path)


@asynccontextmanager
async def serving(node: Node, harness: Recipe, model: ModelClient) -> AsyncIterator[RolloutService]:
    family = with_harness(BashEnvironment, harness, "test")
    service = RolloutService(node, {"bash": family}, builtin_renderer(), model)
    await service.start()
    try:
        yield service
    finally:
        await service.stop()


async def play(service: RolloutService, samples: int = 1, **limits: Any) -> Sequence[Result]:
    group = GroupRequest(
        id="g", environment="bash", task=ROW, samples=samples, limits=AgentLimits(**{"run_s": 60, **limits})
    )
    await service.groups.submit([group])
    results: list[Result] = []
    while len(results) < samples:
        page = await service.feed.page(results[-1].cursor if results else 0, limit=samples, wait_s=60)
        results += page.results
    return results


async def test_an_agent_solves_a_task_in_a_sandbox_without_a_network(node: Node) -> None:
    harness = recipe(AGENT)
    task = with_harness(BashEnvironment, harness, "test").load(ROW)
    tape = [[{"tool": call.tool, "arguments": call.arguments}] for call in task.reference]
    book = ScriptBook({task.instruction: Script([*tape, [{"content": task.reference_answer}]])})
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(TimedServer(book, noncanonical=0.3))
        pool = ModelPool(Servers.of(builtin_renderer()).connect)
        stack.push_async_callback(pool.aclose)
        pool.add(server.url)
        service = await stack.enter_async_context(serving(node, harness, pool))
        results = await play(service, samples=3)
    for result in results:
        assert result.failure is None and result.reward == 1.0 and not result.mask_sample
        assert result.stop_reason is StopReason.FINISHED
        (row,) = result.rows
        check_rows([row])
        assert len(row.turns) == 3
        assert [tool["function"]["name"] for tool in result.tools] == ["shell"]
        assert result.messages[-1] == {"role": "assistant", "content": "Done."}
    assert server.counts.violations == 0 and server.counts.sessions == 3


@pytest.mark.parametrize("kind", ["apptainer", "apptainer-instance"])
async def test_the_endpoint_is_on_the_loopback_of_sandboxes_of_other_drivers(
    kind: str, run_dir: Path, tmp_path: Path
) -> None:
    existing_driver(kind)
    root = Path(tempfile.mkdtemp(dir=run_dir))
    driver = DRIVERS[kind](root)
    says = [{"tool": "shell", "arguments": {"command": "echo hello > hi.txt"}}]
    model = toy(lambda _, turn: says if turn == 0 else "Done.")
    try:
        async with serving(Node(driver, tmp_path), recipe(AGENT), model) as service:
            (result,) = await play(service)
    finally:
        await driver.aclose()
        shutil.rmtree(root)
    assert result.failure is None and result.reward == 1.0
    check_rows(result.rows)


async def test_an_answer_that_a_harness_did_not_read_is_in_its_result(node: Node) -> None:
    """The result contains the complete answer in every encoding."""
    script = (
        CALL
        + """\
import http.client
port = int(os.environ["PRORL_MODEL_URL"].rpartition(":")[2])
connection = http.client.HTTPConnection("127.0.0.1", port)
body = json.dumps({"model": "m", "messages": messages, "stream": True})
connection.request("POST", "/v1/chat/completions", body, {"x-api-key": os.environ["OPENAI_API_KEY"]})
connection.getresponse().read(200)
connection.close()
ask([{"role": "user", "content": "another"}])
"""
    )
    words = [{"tool": "shell", "arguments": {}, "content": "a long answer " * 40}]
    book = ScriptBook({str(ROW["instruction"]): Script([words])})
    pool = ModelPool(Servers.of(builtin_renderer()).connect)
    async with TimedServer(book, tokens_per_s=200.0) as server:
        pool.add(server.url)
        async with serving(node, recipe(script), pool) as service:
            (result,) = await play(service)
        await pool.aclose()
    assert result.failure is None and len(result.rows) == 1
    (kept,) = result.unfinished_answers
    assert kept.turns[0].finish_reason == "abort" and sum(kept.loss_mask) > 0
    assert Result.model_validate_json(result.model_dump_json()) == result
    assert pickle.loads(pickle.dumps(result)) == result


def toy(play: Any) -> ToyModel:
    return ToyModel(builtin_renderer(), play)


@pytest.mark.parametrize(
    ("script", "says"),
    [
        (
            "print('no model for me')",
            "made no model call, and exited with status 0: no model for me",
        ),
        (CALL + "ask(messages); print('oh'); sys.exit(3)", "exited with status 3: oh"),
        (CALL + "ask(messages, 'sk-prorl-guessed')", "HTTP Error 401"),
        ("import os; os.kill(os.getpid(), 9)", "made no model call"),
    ],
)
async def test_a_failing_harness_has_no_reward(node: Node, script: str, says: str) -> None:
    async with serving(node, recipe(script), toy(lambda *_: "Hello.")) as service:
        (result,) = await play(service)
    assert result.state is JobState.FAILED and result.reward is None and result.failure is not None
    assert result.failure.kind is FailureKind.AGENT
    assert says in result.failure.message


async def test_a_recipe_can_allow_other_exit_statuses(node: Node) -> None:
    harness = recipe(CALL + "ask(messages); sys.exit(3)", exits=frozenset({3}))
    async with serving(node, harness, toy(lambda *_: "Hello.")) as service:
        (result,) = await play(service)
    assert result.reward == 0.0 and result.stop_reason is StopReason.FINISHED


async def test_an_endless_harness_meets_a_limit(node: Node) -> None:
    """The harness ignores refusals; it is stopped and graded."""
    script = CALL + "while True:\n  try: ask(messages)\n  except OSError: pass"
    async with serving(node, recipe(script), toy(lambda *_: "Hello.")) as service:
        (result,) = await play(service, max_turns=3, run_s=3)
    assert result.stop_reason is StopReason.TURN_LIMIT and result.reward == 0.0
    assert sum(len(row.turns) for row in result.rows) == 3
    check_rows(result.rows)


async def test_a_harness_is_stopped_at_its_time_limit(node: Node) -> None:
    script = CALL + "ask(messages)\nimport time; time.sleep(99)"
    async with serving(node, recipe(script), toy(lambda *_: "Hello.")) as service:
        (result,) = await play(service, run_s=1)
    assert result.stop_reason is StopReason.TIME_LIMIT and result.reward == 0.0


async def test_a_failing_model_is_a_model_failure(node: Node) -> None:
    async with serving(node, recipe(CALL + "ask(messages)"), toy(lambda *_: ModelError("no GPU"))) as service:
        (result,) = await play(service)
    assert result.failure is not None and result.failure.kind is FailureKind.MODEL


async def test_a_full_context_is_refused_and_stops_with_the_token_limit(node: Node) -> None:
    script = CALL + "messages[0]['content'] *= 500\nask([{'role': 'user', 'content': 'x'}]); ask(messages)"
    async with serving(node, recipe(script), toy(lambda *_: "Hello.")) as service:
        (result,) = await play(service, max_tokens=2000)
    assert result.stop_reason is StopReason.TOKEN_LIMIT and result.reward == 0.0


async def test_parallel_sub_agents_and_floods_from_inside(node: Node) -> None:
    """Each answer is recorded once despite forty idle connections, garbage, wrong keys and parallel
    conversations."""
    script = (
        CALL
        + """\
import concurrent.futures, socket, urllib.error
port = int(os.environ["PRORL_MODEL_URL"].rpartition(":")[2])
idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(40)]
for sock in idle[:10]:
    sock.sendall(b"\\0garbage\\r\\n" * 10)
idle[11].sendall(b"POST /v1/messages HTTP/1.1\\r\\n")
idle[11].shutdown(socket.SHUT_WR)
def sub(n):
    try: ask(messages, "sk-prorl-" + "x" * 43)
    except urllib.error.HTTPError as error: assert error.code == 401
    return ask([{"role": "user", "content": "part %d" % n}])
with concurrent.futures.ThreadPoolExecutor(8) as pool:
    said = list(pool.map(sub, range(8)))
assert len(said) == 8
"""
    )
    async with serving(node, recipe(script), toy(lambda *_: "Hello.")) as service:
        (result,) = await play(service)
    assert result.failure is None and result.stop_reason is StopReason.FINISHED
    check_rows(result.rows)
    assert len(result.rows) == 8 and all(len(row.turns) == 1 for row in result.rows)


def test_substituted_values_are_not_substituted_again() -> None:
    values = {"task": "{key} {task}", "key": "secret"}
    assert filled("a {task} {{x}} {key}", values) == "a {key} {task} {{x}} secret"


SETTINGS = """\
environments: {bash: {agents: [mine]}}
agents: {mine: {harness: {command: ["true"]}}}
"""


def test_commands_that_replay_actions_leave_the_harness_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`validate` and `play` warn and run without the harness; the gymnasium environment raises an error."""
    (tmp_path / "settings.yaml").write_text(SETTINGS)
    config = tmp_path / "settings.yaml"
    settings = load_settings(config)
    assert Catalog.of(settings).family("bash@mine").harness.name == "command"  # type: ignore[attr-defined]
    alone = catalog_without_harness(settings, "bash@mine")
    assert "without the harness command" in capsys.readouterr().err
    assert alone.family("bash@mine").load(ROW).reference[-1].tool == "finish"
    with pytest.raises(InputError, match="takes no actions"):
        TaskEnv("bash@mine", config=config)


async def test_tool_calls_of_a_harness_are_not_replayed(node: Node) -> None:
    family = with_harness(BashEnvironment, recipe(AGENT), "test")
    with pytest.raises(InputError, match="its own tools"):
        await replay(family(node), family.load(ROW), [])
