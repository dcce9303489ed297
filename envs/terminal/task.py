"""Model of a task: the files of a task directory of Harbor or Terminal-Bench, and the settings in them.

A row is `{"id": ..., "directory": {PATH: TEXT or {"base64": ..., "executable": ...}}}`: see
`prorl_envs.env.directories`. The modules `harbor` and `terminal_bench` read the settings.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from prorl_envs.env.base import Task
from prorl_envs.env.task_files import TaskFile, Text


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def _settable(env: dict[str, str]) -> dict[str, str]:
    """Return `env`; raise ValueError if a name cannot be the name of an environment variable."""
    for name in env:
        if not name or "=" in name or "\0" in name:
            raise ValueError(f"{name!r} cannot be the name of a variable")
    return env


type Condition = Literal["service_started", "service_healthy", "service_completed_successfully"]
type Variables = Annotated[dict[str, Text], AfterValidator(_settable)]


class NetworkAccess(_Model):
    """Network access of a phase: none, the hosts of an allowlist, or every host."""

    mode: Literal["none", "allowlist", "public"] = "none"
    hosts: tuple[str, ...] = ()


class HealthCheck(_Model):
    """Command that exits with 0 once the environment is ready; `argv` is a program instead of a command."""

    command: str = ""
    argv: tuple[str, ...] = ()
    interval_s: float = 5.0
    timeout_s: float = 30.0
    start_period_s: float = 0.0
    start_interval_s: float = 5.0
    retries: int = 3


class Machine(_Model):
    """The image and the resources of a sandbox.

    Args:
        folder: folder of the task directory with the Dockerfile and the files that it copies, such as
            `environment`.
        image: reference of an existing image, used instead of the Dockerfile; "" without one.
        dockerfile: path of the Dockerfile in the task directory; "" means `Dockerfile` in the folder.
        build_args: values of the Dockerfile's ARG instructions.
        build_target: stage of the Dockerfile; "" means the last one.
        build_s: timeout of the image's build, in seconds.
        cpus, memory_bytes, disk_bytes: limits; None means the node's limits.
        gpus: number of GPUs that the task needs.
        tpu: whether the task needs a TPU.
        os: operating system of the image.
        network: network access while the task runs.
        env: environment variables; a value may refer to a variable of the user as `${NAME}` or
            `${NAME:-DEFAULT}`.
        workdir: working directory; "" means the image's.
        hostname: host name; "" means the sandbox's default.
        health: check that must succeed before the agent starts, or None.
        folders: directories that are created before the start.
        networks: names by which others reach this machine, by the Compose networks that it belongs to.
        depends_on: conditions before its processes start, by name of a Compose service.
        services: Compose services other than the agent's own.
        host: parts of the host that the agent's own service requests, such as `/dev/kvm` or `privileged`.
        tools: names of MCP servers that the task offers.
        unsupported: reasons why the task cannot run, from settings that cannot be applied.
    """

    folder: str = "environment"
    image: str = ""
    dockerfile: str = ""
    build_args: Variables = Field(default_factory=dict)
    build_target: str = ""
    build_s: float = 600.0
    cpus: float | None = None
    memory_bytes: int | None = None
    disk_bytes: int | None = None
    gpus: int = 0
    tpu: bool = False
    os: str = "linux"
    network: NetworkAccess = NetworkAccess()
    env: Variables = Field(default_factory=dict)
    workdir: str = ""
    hostname: str = ""
    health: HealthCheck | None = None
    folders: tuple[str, ...] = ()
    networks: Mapping[str, tuple[str, ...]] = Field(default_factory=dict)
    depends_on: Mapping[str, Condition] = Field(default_factory=dict)
    services: tuple["Service", ...] = ()
    host: tuple[str, ...] = ()
    tools: tuple[str, ...] = ()
    unsupported: tuple[str, ...] = ()


class Service(Machine):
    """Compose service beside the agent's own.

    Args:
        name: name of the service.
        entrypoint, command: instead of those of the image; None means the image's.
        healthcheck: settings instead of those of the image: `test`, as a list, and fields of `HealthCheck`.
        restarts: number of restarts after a failure; None is unlimited.
        always: whether it restarts after a success, too.
        files: files of the task directory, by their path in the service.
    """

    name: str
    entrypoint: tuple[str, ...] | None = None
    command: tuple[str, ...] | None = None
    healthcheck: Mapping[str, Any] = Field(default_factory=dict)
    restarts: int | None = 0
    always: bool = False
    files: Mapping[str, str] = Field(default_factory=dict)


Machine.model_rebuild()


def is_root(user: str) -> bool:
    """Return whether a user of the form `USER` or `USER:GROUP` is root."""
    return set(user.split(":")) <= {"root", "0"}


def dockerfile_of(machine: Machine) -> str:
    """Return the path of a machine's Dockerfile in the task directory."""
    return machine.dockerfile or ("Dockerfile" if machine.folder == "." else f"{machine.folder}/Dockerfile")


class Phase(_Model):
    """Settings of the agent or of the verifier.

    Args:
        timeout_s: timeout in seconds, or None.
        env: environment variables, in addition to those of the machine.
        network: network access instead of the machine's; None means the machine's.
    """

    timeout_s: float | None = None
    env: Variables = Field(default_factory=dict)
    network: NetworkAccess | None = None


class Artifact(_Model):
    """File or directory of the agent that is copied to a separate verifier, to the same path."""

    source: str
    exclude: tuple[str, ...] = ()
    service: str = ""


class Collect(_Model):
    """Command that runs after the agent has finished, before artifacts are copied.

    The service "" is the agent's own.
    """

    command: str
    service: str = ""
    timeout_s: float = 60.0


class Step(_Model):
    """One instruction and its tests. Most tasks have one step.

    Args:
        name: name of the step; "" if it is the only one.
        instruction: instruction for the agent.
        agent, verifier: settings of the agent and of the verifier.
        verifier_machine: machine of a separate verifier, which has only the artifacts of the agent's files;
            None if the verifier runs on the agent's files.
        tests: files in `/tests`: path in the task directory, by path below `/tests`. Empty if the verifier's
            image contains them.
        test_script: path below `/tests` of the script that the verifier runs in its working directory.
        result: source of the reward: a `file` that the script writes, or the summary that `pytest` prints.
        solution: files in `/solution`, in the form of `tests`; empty if there is no solution.
        solution_script: path of the solution's script below `/solution`.
        solution_env: environment variables of the solution's script.
        workdir_files: files that are copied to the working directory before the step, in the form of
            `tests`; if `setup.sh` is among them, it is then executed.
        min_reward: thresholds by name of the reward; if a reward is lower, the task ends after this step.
        health: check that must succeed before the agent starts, in addition to the machine's.
        artifacts: files that are copied to a separate verifier.
    """

    name: str = ""
    instruction: str
    agent: Phase = Phase()
    verifier: Phase = Phase()
    verifier_machine: Machine | None = None
    tests: Mapping[str, str] = Field(default_factory=dict)
    test_script: str = "test.sh"
    result: Literal["file", "pytest"] = "file"
    solution: Mapping[str, str] = Field(default_factory=dict)
    solution_script: str = "solve.sh"
    solution_env: Variables = Field(default_factory=dict)
    workdir_files: Mapping[str, str] = Field(default_factory=dict)
    min_reward: Mapping[str, float] = Field(default_factory=dict)
    health: HealthCheck | None = None
    artifacts: tuple[Artifact, ...] = ()


class TerminalTask(Task):
    """One task.

    Args:
        files: contents of the task directory, by relative path.
        machine: machine of the agent.
        steps: the steps, at least one.
        scoring: reward of the task: the `mean` of the steps' rewards, or that of the `final` step.
        collects: commands that run after the agent has finished, before artifacts are copied.
    """

    files: Mapping[str, Text | TaskFile]
    machine: Machine
    steps: tuple[Step, ...] = Field(min_length=1)
    scoring: Literal["mean", "final"] = "mean"
    collects: tuple[Collect, ...] = ()
