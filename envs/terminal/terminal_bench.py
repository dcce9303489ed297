"""Reader of the task directories of Terminal-Bench 1 (https://www.tbench.ai/docs/task-overview).

task.yaml  Dockerfile  docker-compose.yaml  run-tests.sh  tests/  solution.sh
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from prorl_envs.env.task_files import Text
from prorl_envs.envs.terminal.files import Files, host_parts, mapping_of, parsed, paths_below, text_of
from prorl_envs.envs.terminal.task import Machine, NetworkAccess, Phase, Step, TerminalTask
from prorl_envs.errors import InputError

CONFIG = "task.yaml"
_COMPOSE = "docker-compose.yaml"
_SCRIPT = "run-tests.sh"
_SOLUTION = "solution.sh"
#: Names of the agent's own service, in order; without one, it is the only service that is built.
_MAIN = ("client", "main")
#: Variables that Terminal-Bench sets for its own containers and logs.
_BENCHMARK_VARIABLE = re.compile(r"\$\{?T_BENCH_")


class _Config(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    instruction: Text
    parser_name: str = "pytest"
    max_agent_timeout_sec: float = Field(default=360.0, gt=0, allow_inf_nan=False)
    max_test_timeout_sec: float = Field(default=60.0, gt=0, allow_inf_nan=False)


def terminal_bench_task(id_: str, files: Files) -> TerminalTask:
    """Read a task directory.

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
    services = _services(files)
    name = _own_service(services)
    main = services.get(name, {})
    image = main.get("image") or ""
    if not isinstance(image, str):
        raise InputError(f"{_COMPOSE}: services.{name}.image: not a text")
    step = Step(
        instruction=config.instruction,
        agent=Phase(timeout_s=config.max_agent_timeout_sec),
        verifier=Phase(timeout_s=config.max_test_timeout_sec, env={"TEST_DIR": "/tests"}),
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
        machine=Machine(
            folder=".",
            image="" if "Dockerfile" in files else image,
            network=NetworkAccess(mode="public"),
            env=dict(_environment(name, main)),
            services=tuple(sorted(service for service in services if service != name)),
            host=host_parts(main),
        ),
        steps=(step,),
    )


def _services(files: Files) -> Mapping[str, Mapping[str, Any]]:
    if _COMPOSE not in files:
        return {}
    services = mapping_of(files, _COMPOSE).get("services")
    if not isinstance(services, Mapping) or not all(isinstance(item, Mapping) for item in services.values()):
        raise InputError(f"{_COMPOSE}: services: not a mapping of mappings")
    return {str(name): service for name, service in services.items()}


def _own_service(services: Mapping[str, Mapping[str, Any]]) -> str:
    built = [name for name, service in services.items() if "build" in service]
    return next((name for name in _MAIN if name in services), built[0] if len(built) == 1 else _MAIN[0])


def _environment(service: str, settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    values = settings.get("environment") or {}
    where = f"{_COMPOSE}: services.{service}.environment"
    # Nested values are refused: with YAML's aliases, their text can be enormous.
    if isinstance(values, Mapping) and not any(isinstance(item, Mapping | list) for item in values.values()):
        pairs = [(str(name), _scalar(value)) for name, value in values.items()]
    elif isinstance(values, list) and all(isinstance(item, str) for item in values):
        pairs = [(name, value) for name, _, value in (item.partition("=") for item in values)]
    else:
        raise InputError(f"{where}: neither a mapping of scalars nor a list of texts")
    for name, value in pairs:
        if not name or "=" in name or "\0" in name + value:
            raise InputError(f"{where}: {name[:100]!r} cannot be set")
        if not _BENCHMARK_VARIABLE.search(value):
            yield name, value


def _scalar(value: Any) -> str:
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
