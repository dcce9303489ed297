"""Reader of Harbor's task directories, schema 1.4 (https://www.harborframework.com/docs/tasks).

    task.toml  instruction.md  environment/  tests/test.sh  solution/solve.sh
    steps/NAME/{instruction.md, tests/, solution/, workdir/}

Unknown keys are ignored, as Harbor does.
"""

import contextlib
import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from prorl_envs.env.task_files import Text
from prorl_envs.envs.terminal.compose import BUILT_IMAGE, HOST_LOGS
from prorl_envs.envs.terminal.compose_services import with_compose
from prorl_envs.envs.terminal.files import Files, mapping_of, parsed, paths_below, text_of
from prorl_envs.envs.terminal.requirements import resolved
from prorl_envs.envs.terminal.task import (
    Artifact,
    Collect,
    HealthCheck,
    Machine,
    NetworkAccess,
    Phase,
    Step,
    TerminalTask,
    Variables,
    is_root,
)
from prorl_envs.errors import InputError

CONFIG = "task.toml"
#: Name of the agent's own service.
_MAIN = "main"
#: Directory that is always an artifact: its files are copied to a separate verifier.
ARTIFACTS = "/logs/artifacts"
#: Variables that Harbor sets for Compose files, older ones too, in addition to those of `_composed`.
_COMPOSE_VARIABLES = {
    "CONTEXT_DIR": ".",
    "TEST_DIR": "/tests",
    "HOST_VERIFIER_LOGS_PATH": HOST_LOGS,
    "HOST_AGENT_LOGS_PATH": HOST_LOGS,
    "HOST_ARTIFACTS_PATH": HOST_LOGS,
    "ENV_VERIFIER_LOGS_PATH": "/logs/verifier",
    "ENV_AGENT_LOGS_PATH": "/logs/agent",
    "ENV_ARTIFACTS_PATH": ARTIFACTS,
}
_SIZE = re.compile(r"\s*([0-9]{1,12}(?:\.[0-9]{0,12})?|\.[0-9]{1,12})\s*([KMG])\s*", re.IGNORECASE)
_UNITS = {"K": 2**-10, "M": 1, "G": 2**10}
_STEP_NAME = re.compile(r"""(?!\.{1,2}$)[^<>:"/\\|?*\x00-\x1f\x7f]{1,255}(?<![. ])""")


type _Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
type _Pause = Annotated[float, Field(ge=0, allow_inf_nan=False)]
type _Size = Annotated[int, Field(gt=0, le=2**40)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class _Network(_Section):
    network_mode: Literal["no-network", "public", "allowlist"] | None = None
    allowed_hosts: tuple[str, ...] | None = None

    @model_validator(mode="after")
    def _hosts_need_a_list(self) -> Self:
        if self.allowed_hosts and self.network_mode != "allowlist":
            raise ValueError("allowed_hosts needs network_mode = 'allowlist'")
        return self

    def access(self) -> NetworkAccess | None:
        match self.network_mode:
            case None:
                return None
            case "allowlist":
                return NetworkAccess(mode="allowlist", hosts=self.allowed_hosts or ())
            case "public":
                return NetworkAccess(mode="public")
        return NetworkAccess()


class _Health(_Section):
    command: Text
    interval_sec: _Pause = 5.0
    timeout_sec: _Seconds = 30.0
    start_period_sec: _Pause = 0.0
    start_interval_sec: _Pause = 5.0
    retries: int = Field(default=3, ge=0)

    def check(self) -> HealthCheck:
        values = {name.replace("_sec", "_s"): value for name, value in self.model_dump().items()}
        return HealthCheck.model_validate(values)


class _Tool(_Section):
    name: str


class _Environment(_Network):
    build_timeout_sec: _Seconds = 600.0
    docker_image: Text | None = None
    os: str = "linux"
    cpus: _Seconds | None = None
    memory_mb: _Size | None = None
    storage_mb: _Size | None = None
    memory: str | None = None
    storage: str | None = None
    gpus: int | None = Field(default=None, ge=0)
    tpu: Mapping[str, Any] | None = None
    mcp_servers: tuple[_Tool, ...] = ()
    env: Variables = Field(default_factory=dict)
    healthcheck: _Health | None = None
    workdir: Text | None = None
    allow_internet: bool | None = None

    @field_validator("memory", "storage", mode="before")
    @classmethod
    def _texts(cls, value: Any) -> Any:
        return value if isinstance(value, str) else None  # as Harbor does

    def machine(self, folder: str) -> Machine:
        # The older field `allow_internet` counts only without the newer fields. By default, every host can be
        # reached.
        access = self.access()
        if access is None:
            closed = self.allow_internet is False and self.allowed_hosts is None
            access = NetworkAccess(mode="none" if closed else "public")
        return Machine(
            folder=folder,
            image=self.docker_image or "",
            build_s=self.build_timeout_sec,
            cpus=self.cpus,
            memory_bytes=_size("memory", self.memory_mb, self.memory),
            disk_bytes=_size("storage", self.storage_mb, self.storage),
            gpus=self.gpus or 0,
            tpu=self.tpu is not None,
            os=self.os.lower(),
            network=access,
            env=self.env,
            workdir=self.workdir or "",
            health=None if self.healthcheck is None else self.healthcheck.check(),
            tools=tuple(tool.name for tool in self.mcp_servers),
        )


class _Agent(_Network):
    timeout_sec: _Seconds | None = None
    user: str | int | None = None

    def phase(self) -> Phase:
        return Phase(timeout_s=self.timeout_sec, network=self.access())


class _Collect(_Section):
    command: Text
    service: str = _MAIN
    timeout_sec: _Seconds = 60.0
    user: str | int | None = None


class _Verifier(_Network):
    timeout_sec: _Seconds = 600.0
    user: str | int | None = None
    env: Variables = Field(default_factory=dict)
    environment_mode: Literal["shared", "separate"] | None = None
    environment: _Environment | None = None
    collect: tuple[_Collect, ...] = ()

    @model_validator(mode="after")
    def _mode_fits(self) -> Self:
        if self.environment_mode == "shared" and self.environment is not None:
            raise ValueError("environment_mode = 'shared' excludes [verifier.environment]")
        return self

    @property
    def mode(self) -> str | None:
        return self.environment_mode or ("separate" if self.environment is not None else None)

    def phase(self) -> Phase:
        return Phase(timeout_s=self.timeout_sec, env=self.env, network=self.access())


class _Artifact(_Section):
    source: Text
    exclude: tuple[str, ...] = ()
    service: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _short(cls, value: Any) -> Any:
        return {"source": value} if isinstance(value, str) else value

    @field_validator("source")
    @classmethod
    def _inside(cls, value: str) -> str:
        if ".." in PurePosixPath(value).parts:
            raise ValueError("'..' is not allowed in a path")
        return value

    @model_validator(mode="after")
    def _absolute(self) -> Self:
        if self.service not in (None, _MAIN) and not self.source.startswith("/"):
            raise ValueError("the source of a service's artifact is an absolute path")
        return self

    def artifact(self) -> Artifact:
        service = "" if self.service in (None, _MAIN) else str(self.service)
        return Artifact(source=self.source, exclude=self.exclude, service=service)


class _Solution(_Section):
    env: Variables = Field(default_factory=dict)


class _Step(_Section):
    name: str
    agent: _Agent = _Agent()
    verifier: _Verifier = _Verifier()
    min_reward: float | Mapping[str, float] | None = None
    healthcheck: _Health | None = None
    artifacts: tuple[_Artifact, ...] = ()

    @field_validator("name")
    @classmethod
    def _portable(cls, value: str) -> str:
        if not _STEP_NAME.fullmatch(value):
            raise ValueError(f"{value!r} is not the name of a folder on every system")
        return value


class _Config(_Section):
    verifier: _Verifier = _Verifier()
    agent: _Agent = _Agent()
    environment: _Environment = _Environment()
    solution: _Solution = _Solution()
    multi_step_reward_strategy: Literal["mean", "final"] | None = None
    steps: tuple[_Step, ...] | None = None
    artifacts: tuple[_Artifact, ...] = ()

    @field_validator("steps")
    @classmethod
    def _unique(cls, steps: tuple[_Step, ...] | None) -> tuple[_Step, ...] | None:
        names = [step.name.casefold() for step in steps or ()]
        if len(set(names)) < len(names):
            raise ValueError("two steps have the same name")
        return steps


def harbor_task(id_: str, files: Files, variables: Mapping[str, str]) -> TerminalTask:
    """Read a task directory. `variables` are those of the user, for its Compose files.

    Raises:
        InputError: a file is missing or invalid; the message names the file, the field and the problem.
    """
    config = parsed(_Config, CONFIG, mapping_of(files, CONFIG))
    machine = _composed(files, config.environment.machine("environment"), variables)
    steps = tuple(_step(files, config, step, machine, variables) for step in config.steps or (None,))
    verifiers = [config.verifier, *(step.verifier for step in config.steps or ())]
    hooks = [hook for verifier in verifiers for hook in verifier.collect]
    agents = [config.agent, *(step.agent for step in config.steps or ())]
    users = [part.user for part in agents] + [part.user for part in verifiers] + [hook.user for hook in hooks]
    reasons = [
        f"{CONFIG}: user: commands run as root here, not as {user!r}"
        for user in users
        if user is not None and not is_root(str(user))
    ]
    networks = [phase.network for step in steps for phase in (step.agent, step.verifier) if phase.network]
    if machine.network != config.environment.machine("environment").network and any(networks):
        reasons.append(f"{CONFIG}: network_mode differs from that of the Compose file")
    machine = machine.model_copy(update={"unsupported": (*machine.unsupported, *reasons)})
    return TerminalTask(
        id=id_,
        instruction=steps[0].instruction,
        files=files,
        machine=machine,
        steps=steps,
        scoring=config.multi_step_reward_strategy or "mean",
        collects=tuple(
            Collect(
                command=hook.command,
                service="" if hook.service == _MAIN else hook.service,
                timeout_s=hook.timeout_sec,
            )
            for hook in hooks
        ),
    )


def _step(
    files: Files, config: _Config, named: _Step | None, machine: Machine, variables: Mapping[str, str]
) -> Step:
    """Read a step; None is the only step of a task that names none."""
    step = _Step.model_construct(name="") if named is None else named
    prefix = "" if named is None else f"steps/{step.name}/"
    separate, bundled = _verifier_machine(files, config, named, machine, variables)
    tests = paths_below(files, "tests", f"{prefix}tests")
    if not bundled and "test.sh" not in tests:
        hint = "or tests/test.sh for all steps"
        if named is None:
            hint = "tests for Windows cannot run here" if "tests/test.bat" in files else ""
        raise InputError(f"{prefix}tests/test.sh: missing", hint=hint)
    score = step.min_reward
    min_reward = score if isinstance(score, Mapping) else {} if score is None else {"reward": score}
    verifier, shared = step.verifier, config.verifier
    phase = Phase(
        timeout_s=verifier.timeout_sec if "timeout_sec" in verifier.model_fields_set else shared.timeout_sec,
        env={**shared.env, **verifier.env},
        network=verifier.access() or shared.access(),
    )
    agent = Phase(
        timeout_s=step.agent.timeout_sec if step.agent.timeout_sec is not None else config.agent.timeout_sec,
        network=step.agent.access() or config.agent.access(),
    )
    return Step(
        name=step.name,
        instruction=_instruction(files, f"{prefix}instruction.md"),
        agent=agent,
        verifier=phase,
        verifier_machine=separate,
        tests={} if bundled else tests,
        solution=_solution(files, f"{prefix}solution"),
        solution_env=config.solution.env,
        workdir_files={} if named is None else paths_below(files, f"{prefix}workdir"),
        min_reward=min_reward,
        health=None if step.healthcheck is None else step.healthcheck.check(),
        artifacts=tuple(artifact.artifact() for artifact in (*config.artifacts, *step.artifacts)),
    )


def _verifier_machine(
    files: Files, config: _Config, step: _Step | None, machine: Machine, variables: Mapping[str, str]
) -> tuple[Machine | None, bool]:
    """Return the machine of a separate verifier, and whether its image contains the tests.

    The machine is None if the verifier runs on the agent's machine.
    """
    modes = [None if step is None else step.verifier.mode, config.verifier.mode]
    if next((mode for mode in modes if mode), "shared") == "shared":
        return None, False
    candidates = [(config.verifier.environment, "tests")]
    if step is not None:
        candidates.insert(0, (step.verifier.environment, f"steps/{step.name}/tests"))
    environments = [candidate for candidate, _ in candidates if candidate is not None]
    environment = next(iter(environments), config.environment)
    for candidate, folder in candidates:
        image = "" if candidate is None else candidate.docker_image or ""
        if image or f"{folder}/Dockerfile" in files or f"{folder}/docker-compose.yaml" in files:
            built = environment.machine(folder).model_copy(update={"image": image})
            return _composed(files, built, variables), True
    image = config.environment.docker_image or ""
    same = environment.machine("environment").model_copy(update={"image": image})
    return _composed(files, same, variables), False


def _instruction(files: Files, path: str) -> str:
    lines = text_of(files, path).split("\n")
    start = 0
    while start < len(lines) and _is_canary(lines[start].strip()):
        start += 1
    while start < len(lines) and not lines[start].strip():
        start += 1
    if start == len(lines):
        raise InputError(f"{path}: empty")
    return "\n".join(lines[start:])


def _is_canary(line: str) -> bool:
    """Return whether a line is a comment that marks benchmark data, which the agent is not shown."""
    comment = line.startswith("#") or (line.startswith("<!--") and line.endswith("-->"))
    return comment and "canary" in line.casefold()


def _solution(files: Files, folder: str) -> dict[str, str]:
    found = paths_below(files, folder)
    return found if "solve.sh" in found else {}


def _composed(files: Files, machine: Machine, variables: Mapping[str, str]) -> Machine:
    """Return a machine with the settings of the Compose file in its folder."""
    image = machine.image or BUILT_IMAGE
    env: dict[str, str] = {}
    for name, value in machine.env.items():
        with contextlib.suppress(InputError):  # the missing variable is a reason of its own
            env |= resolved({name: value}, variables)
    known = {
        **variables,
        **env,
        **_COMPOSE_VARIABLES,
        "MAIN_IMAGE_NAME": image,
        "PREBUILT_IMAGE_NAME": image,
        "CPUS": "" if machine.cpus is None else f"{machine.cpus:g}",
        "MEMORY": "" if machine.memory_bytes is None else f"{machine.memory_bytes >> 20}M",
    }
    path = f"{machine.folder}/docker-compose.yaml"
    return with_compose(machine, files, path, lambda services: _MAIN, known, always_built=True)


def _size(name: str, megabytes: int | None, text: str | None) -> int | None:
    if text is None:
        return None if megabytes is None else megabytes * 2**20
    match = _SIZE.fullmatch(text)
    if match is None:
        raise InputError(f"{CONFIG}: environment.{name}: not a size: {text!r}", hint="for example 2G or 512M")
    size = int(float(match[1]) * _UNITS[match[2].upper()])
    if megabytes is not None and megabytes != size:
        raise InputError(f"{CONFIG}: environment: {name} and {name}_mb differ")
    if not size:
        raise InputError(f"{CONFIG}: environment.{name}: {text!r} is less than a megabyte")
    return size * 2**20
