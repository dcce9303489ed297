"""Reader of the task directories of Terminal-Bench 1 (https://www.tbench.ai/docs/task-overview).

task.yaml  Dockerfile  docker-compose.yaml  run-tests.sh  tests/  solution.sh
"""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from prorl_envs.env.task_files import Text
from prorl_envs.envs.terminal.compose import BUILT_IMAGE, HOST_LOGS
from prorl_envs.envs.terminal.compose_services import with_compose
from prorl_envs.envs.terminal.files import Files, mapping_of, parsed, paths_below, text_of
from prorl_envs.envs.terminal.task import Machine, NetworkAccess, Phase, Step, TerminalTask
from prorl_envs.errors import InputError

CONFIG = "task.yaml"
_COMPOSE = "docker-compose.yaml"
_SCRIPT = "run-tests.sh"
_SOLUTION = "solution.sh"
#: Names of the agent's own service, in order; without one, it is the only service that is built.
_MAIN = ("client", "main")
#: Variables that Terminal-Bench sets for Compose files.
_BENCHMARK_VARIABLES = {
    "T_BENCH_TEST_DIR": "/tests",
    "T_BENCH_TASK_DOCKER_CLIENT_IMAGE_NAME": BUILT_IMAGE,
    "T_BENCH_TASK_DOCKER_CLIENT_CONTAINER_NAME": "task",
    "T_BENCH_TASK_DOCKER_NAME_PREFIX": "task",
    "T_BENCH_CONTAINER_LOGS_PATH": "/logs",
    "T_BENCH_CONTAINER_AGENT_LOGS_PATH": "/agent-logs",
    "T_BENCH_TASK_LOGS_PATH": HOST_LOGS,
    "T_BENCH_TASK_AGENT_LOGS_PATH": HOST_LOGS,
}


class _Config(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    instruction: Text
    parser_name: str = "pytest"
    max_agent_timeout_sec: float = Field(default=360.0, gt=0, allow_inf_nan=False)
    max_test_timeout_sec: float = Field(default=60.0, gt=0, allow_inf_nan=False)
    run_tests_in_same_shell: bool = False


def terminal_bench_task(id_: str, files: Files, variables: Mapping[str, str]) -> TerminalTask:
    """Read a task directory. `variables` are those of the user, for its Compose file.

    Raises:
        InputError: a file is missing or invalid; the message names the file, the field and the problem.
    """
    config = parsed(_Config, CONFIG, mapping_of(files, CONFIG))
    if not config.instruction.strip():
        raise InputError(f"{CONFIG}: instruction: empty")
    text_of(files, _SCRIPT)
    if config.parser_name != "pytest":
        raise InputError(
            f"{CONFIG}: parser_name: {config.parser_name!r} is not supported",
            hint="use pytest; or convert the task to Harbor's format, in which tests write a reward file",
        )
    machine = with_compose(
        Machine(folder=".", network=NetworkAccess(mode="public")),
        files,
        _COMPOSE,
        _own_service,
        {**variables, **_BENCHMARK_VARIABLES},
        always_built=False,
    )
    if config.run_tests_in_same_shell:
        reason = f"{CONFIG}: run_tests_in_same_shell: tests run in a shell of their own here"
        machine = machine.model_copy(update={"unsupported": (*machine.unsupported, reason)})
    env = dict(machine.env)
    test_dir = env.pop("TEST_DIR", _BENCHMARK_VARIABLES["T_BENCH_TEST_DIR"])
    step = Step(
        instruction=config.instruction,
        agent=Phase(timeout_s=config.max_agent_timeout_sec),
        verifier=Phase(timeout_s=config.max_test_timeout_sec, env={"TEST_DIR": test_dir}),
        tests={**paths_below(files, "tests"), _SCRIPT: _SCRIPT},
        test_script=_SCRIPT,
        result="pytest",
        solution={_SOLUTION: _SOLUTION} if _SOLUTION in files else {},
        solution_script=_SOLUTION,
    )
    return TerminalTask(
        id=id_,
        instruction=config.instruction,
        files=files,
        machine=machine.model_copy(update={"env": env}),
        steps=(step,),
    )


def _own_service(services: Mapping[str, Mapping[str, Any]]) -> str:
    built = [name for name, service in services.items() if service.get("build")]
    return next((name for name in _MAIN if name in services), built[0] if len(built) == 1 else _MAIN[0])
