"""Episodes through gymnasium, with real sandboxes."""

import json
import signal
import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from fastapi import FastAPI
from gymnasium.error import ResetNeeded
from gymnasium.utils.env_checker import check_env

from prorl_envs.env.node import Node
from prorl_envs.env.registry import example_path, load_tasks
from prorl_envs.env.runner import Runner
from prorl_envs.errors import InputError, SandboxError, UnsupportedMachine
from prorl_envs.gym.env import TaskEnv
from prorl_envs.gym.registration import IDS
from prorl_envs.sandbox.base import Sandbox, SandboxSpec
from prorl_envs.sandbox.drivers.bubblewrap import BubblewrapDriver
from tests.support.kernel import ROW, write_kernel_files
from tests.support.resources import ResourcesDesk, desk_row
from tests.support.serving import served

GREETING = {"task": "greeting"}
SOLVE = json.dumps({"name": "bash", "arguments": {"command": "echo 'hello, world' > greeting.txt"}})
FINISH = json.dumps({"name": "finish", "arguments": {}})


class FaultyDriver:
    """A real driver whose starts can be made to fail, and which records its sandboxes."""

    name = "faulty"

    def __init__(self) -> None:
        self.driver = BubblewrapDriver()
        self.failing = False
        self.started: list[Sandbox] = []

    @property
    def sandboxes(self) -> Collection[Sandbox]:
        return self.driver.sandboxes

    async def start(self, spec: SandboxSpec) -> Sandbox:
        if self.failing:
            raise SandboxError("no sandbox today", hint="try tomorrow") from OSError(28, "no space")
        self.started.append(await self.driver.start(spec))
        return self.started[-1]

    async def aclose(self) -> None:
        await self.driver.aclose()


@pytest.fixture
def env() -> Iterator[TaskEnv]:
    env = TaskEnv("bash", render_mode="ansi", max_turns=4)
    yield env
    env.close()


#: An instance takes half a minute to build, and a step that ends an episode runs its tests.
SLOW = {"swebench": pytest.mark.thorough}


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("env_id", "family"), [pytest.param(*item, marks=SLOW.get(item[1], ())) for item in IDS.items()]
)
def test_gymnasiums_own_check_passes(env_id: str, family: str, runner: Runner) -> None:
    tasks = [json.loads(example_path(family).read_text().splitlines()[1])] if family in SLOW else None
    env = gymnasium.make(f"prorl_envs.gym:{env_id}", tasks=tasks, runner=runner)
    check_env(env.unwrapped)
    env.close()


@pytest.mark.parametrize("family", ["bash", "code", "ipython", "math", "stem"])
def test_the_first_examples_reference_scores_one(family: str, runner: Runner) -> None:
    task = load_tasks(family, example_path(family))[0]
    env = TaskEnv(family, runner=runner)
    observation, info = env.reset(options={"task": task.id})
    assert task.instruction in observation
    assert info["messages"][-1]["content"] == task.instruction
    rewards = []
    for step in task.reference:
        action = json.dumps({"name": step.tool, "arguments": step.arguments})
        observation, reward, terminated, truncated, info = env.step(action)
        rewards.append(reward)
    assert rewards == [*[0.0] * (len(rewards) - 1), 1.0]
    assert (terminated, truncated) == (True, False)
    assert set(info["grade"]["components"].values()) == {1.0}
    env.close()


def test_a_jupyter_kernel_of_the_settings(runner: Runner, tmp_path: Path) -> None:
    settings, data = write_kernel_files(tmp_path)
    env = TaskEnv("kernel", tasks=data, config=settings, runner=runner)
    env.reset()
    rewards = [
        env.step(json.dumps({"name": step["tool"], "arguments": step["arguments"]}))[1]
        for step in ROW["reference"]
    ]
    assert rewards == [0.0, 1.0]
    env.close()


def test_finishing_without_solving_scores_zero(env: TaskEnv) -> None:
    env.reset(options=GREETING)
    assert env.step(FINISH)[1:4] == (0.0, True, False)
    with pytest.raises(ResetNeeded):
        env.step(FINISH)


def test_the_turn_limit_truncates_and_grades(env: TaskEnv) -> None:
    env.reset(options=GREETING)
    outcomes = [env.step(SOLVE)[1:4] for _ in range(4)]
    assert outcomes == [*[(0.0, False, False)] * 3, (1.0, False, True)]


def test_an_answer_without_a_tool_call_ends_the_episode_and_is_graded(env: TaskEnv) -> None:
    env.reset(options=GREETING)
    env.step(SOLVE)
    _, reward, terminated, truncated, info = env.step("I think I am done.")
    assert (reward, terminated, truncated, info["tool_ok"], info["turn"]) == (1.0, True, False, False, 2)
    assert "grade" in info


def test_an_answer_without_a_tool_call_may_contain_the_solution(runner: Runner) -> None:
    env = TaskEnv("math", tasks=[{"id": "t", "instruction": "What is 6 * 7?", "answer": "42"}], runner=runner)
    for said, reward in ((r"It is \boxed{42}.", 1.0), (r"It is \boxed{43}.", 0.0), ("It is 42.", 0.0)):
        env.reset()
        assert env.step(said)[1:4] == (reward, True, False)
    env.close()


def test_an_unreadable_call_uses_a_turn_and_is_explained(env: TaskEnv) -> None:
    env.reset(options=GREETING)
    observation, _, terminated, truncated, info = env.step('{"name": "bash"')
    assert "tool call" in observation
    assert (terminated, truncated, info["tool_ok"], info["turn"]) == (False, False, False, 1)


def test_seeds_choose_the_task() -> None:
    env = TaskEnv("bash")
    first = [env.reset(seed=seed)[1]["task_id"] for seed in range(8)]
    assert [env.reset(seed=seed)[1]["task_id"] for seed in range(8)] == first
    assert len(set(first)) > 2
    env.close()


def test_options_choose_the_task(env: TaskEnv) -> None:
    row = {"id": "mine", "instruction": "Größe 🙂", "checks": [{"type": "file_absent", "path": "x"}]}
    observation, info = env.reset(options={"task": row})
    assert observation.endswith("Größe 🙂")
    assert info["task_id"] == "mine"
    for options in ({"task": "none such"}, {"tusk": "greeting"}, {"task": {"id": "x"}}, {"task": 3}):
        with pytest.raises(InputError):
            env.reset(options=options)


def test_own_data_can_be_used(tmp_path: Path) -> None:
    row = {"id": "a", "instruction": "x", "checks": [{"type": "file_absent", "path": "x"}]}
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps(row))
    for tasks in (path, str(path), [row]):
        env = TaskEnv("bash", tasks=tasks)
        assert env.reset(seed=0)[1]["task_id"] == "a"
        env.close()
    with pytest.raises(InputError, match="no tasks"):
        TaskEnv("bash", tasks=[])


@pytest.mark.parametrize("wrong", [{"environment": "chess"}, {"max_turns": 0}, {"render_mode": "human"}])
def test_wrong_arguments(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        TaskEnv(**{"environment": "bash", **wrong})


def test_rendering_shows_the_episode(env: TaskEnv) -> None:
    env.reset(options=GREETING)
    env.step(json.dumps({"name": "bash", "arguments": {"command": "echo $((6 * 7))"}}))
    shown = env.render()
    assert shown is not None
    assert "exactly one line" in shown
    assert shown.rstrip().endswith("42")


def test_a_dying_sandbox_truncates_without_a_reward() -> None:
    driver = FaultyDriver()
    runner = Runner(lambda: Node(driver, Path()))
    env = TaskEnv("bash", runner=runner)
    env.reset(options=GREETING)
    runner.run(lambda node: driver.started[-1].close())
    _, reward, terminated, truncated, info = env.step(SOLVE)
    assert (reward, terminated, truncated, info["mask_sample"]) == (0.0, False, True, True)
    assert info["error"]["kind"] == "sandbox" and isinstance(env.failure, SandboxError)
    env.reset(options=GREETING)
    env.step(SOLVE)
    assert env.step(FINISH)[1] == 1.0
    env.close()
    runner.close()


def test_a_failing_grader_truncates_without_a_reward(env: TaskEnv) -> None:
    check = {"type": "file_matches", "path": "f", "pattern": "("}
    row = {"id": "x", "instruction": "x", "files": {"f": "x"}, "checks": [check]}
    env.reset(options={"task": row})
    _, reward, terminated, truncated, info = env.step(FINISH)
    assert (reward, terminated, truncated, info["mask_sample"]) == (0.0, False, True, True)
    assert info["error"]["kind"] == "grader"


def test_a_failed_reset_raises_and_the_next_step_truncates(caplog: pytest.LogCaptureFixture) -> None:
    driver = FaultyDriver()
    runner = Runner(lambda: Node(driver, Path()))
    env = TaskEnv("bash", runner=runner)
    driver.failing = True
    observation, info = env.reset(options=GREETING)
    assert observation in env.observation_space
    assert info["error"] == {
        "kind": "sandbox",
        "message": "no sandbox today",
        "hint": "try tomorrow",
        "retryable": True,
        "causes": ["OSError: [Errno 28] no space"],
    }
    assert isinstance(env.failure, SandboxError) and isinstance(env.failure.__cause__, OSError)
    [logged] = caplog.records
    assert "no sandbox today" in logged.message and logged.exc_info is not None
    assert env.step(SOLVE)[1:4] == (0.0, False, True)
    driver.failing = False
    assert "error" not in env.reset(options=GREETING)[1] and env.failure is None
    env.close()
    runner.close()


def test_a_machine_without_sandboxes_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_driver() -> str:
        raise UnsupportedMachine("user namespaces are disabled", hint="as root: ...")

    monkeypatch.setattr("prorl_envs.env.node.choose_driver", no_driver)
    env = TaskEnv("bash")
    with pytest.raises(UnsupportedMachine, match="user namespaces are disabled"):
        env.reset(options=GREETING)
    with pytest.raises(ResetNeeded):
        env.step(FINISH)
    env.close()


@pytest.mark.parametrize(
    ("name", "value"), [("PRORL_RUN_DIR", "/proc/none"), ("PRORL_BWRAP", "refuses"), ("PRORL_DRIVER", "none")]
)
def test_a_machine_whose_driver_cannot_start_a_sandbox_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, value: str
) -> None:
    refuses = tmp_path / "refuses"
    refuses.write_text("#!/bin/sh\necho 'bwrap: setting up uid map: Permission denied' >&2; exit 1\n")
    refuses.chmod(0o755)
    monkeypatch.setenv("PRORL_DRIVER", "bubblewrap")  # by name, so it is not tried first
    monkeypatch.setenv(name, str(refuses) if value == "refuses" else value)
    env = TaskEnv("bash")
    with pytest.raises(UnsupportedMachine):
        env.reset(options=GREETING)
    env.close()


@pytest.mark.filterwarnings("ignore::prorl_envs.sandbox.drivers.local.NoIsolationWarning")
def test_tasks_that_need_isolation_are_an_error_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRORL_DRIVER", "local")
    env = TaskEnv("bash")
    with pytest.raises(UnsupportedMachine, match="need isolated sandboxes"):
        env.reset(options=GREETING)
    env.close()


def test_environments_may_share_a_runner() -> None:
    runner = Runner()
    envs = [TaskEnv("bash", runner=runner) for _ in range(3)]
    for env in envs:
        env.reset(options=GREETING)
    assert [env.step(SOLVE)[3] for env in envs] == [False] * 3
    assert [env.step(FINISH)[1] for env in envs] == [1.0] * 3
    for env in envs:
        env.close()
    runner.close()


def test_an_environment_can_be_closed_after_an_interrupted_step() -> None:
    program = """if True:
        import json, prorl_envs.gym.env
        env = prorl_envs.gym.env.TaskEnv("bash")
        env.reset(options={"task": "greeting"})
        try:
            print("stepping", flush=True)
            env.step(json.dumps({"name": "bash", "arguments": {"command": "while :; do :; done"}}))
        except KeyboardInterrupt:
            env.close()
            print("closed", flush=True)
    """
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "stepping\n"
        child.send_signal(signal.SIGINT)
        assert child.stdout.readline() == "closed\n"
    assert child.returncode == 0


def test_closing_twice_and_resetting_after(env: TaskEnv) -> None:
    env.close()
    env.reset(options=GREETING)
    env.close()
    env.close()
    env.reset(options=GREETING)
    assert env.step(SOLVE)[0] == ""


def test_a_resources_server_is_an_environment_too(tmp_path: Path) -> None:
    """The server's verifier judges the answer, so the loop sends the answer to it."""
    desk = ResourcesDesk()
    with served(FastAPI(routes=desk.app().routes)) as url:
        config = tmp_path / "settings.yaml"
        config.write_text(f"environments: {{desk: {{nemo: {{url: '{url}'}}}}}}")
        env = TaskEnv("desk", tasks=[desk_row(say="three", id="t")], config=config)
        try:
            _, info = env.reset(seed=1)
            assert (info["task_id"], info["messages"][0]["content"]) == ("t", "Count to three.")
            env.step('{"name": "add", "arguments": {"count": 3}}')
            _, reward, terminated, _, info = env.step("It is three.")
            assert (reward, terminated, info["grade"]["evidence"]) == (1.0, True, {"count": 3, "right": True})
        finally:
            env.close()
