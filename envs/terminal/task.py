"""Row format: a task directory of Harbor or Terminal-Bench, and the settings read from its files.

A row is `{"id": ..., "directory": {PATH: TEXT or {"base64": ..., "executable": ...}}}`: see
`prorl_envs.env.directories`. The modules `harbor` and `terminal_bench` read the settings.
"""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from prorl_envs.env.base import Task
from prorl_envs.env.task_files import TaskFile, Text


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def _settable(env: dict[str, str]) -> dict[str, str]:
    """Validate names of variables that a process can have."""
    for name in env:
        if not name or "=" in name or "\0" in name:
            raise ValueError(f"{name!r} cannot be the name of a variable")
    return env


type Variables = Annotated[dict[str, Text], AfterValidator(_settable)]


class NetworkAccess(_Model):
    """Network access of a phase: none, the hosts of an allowlist, or every host."""

    mode: Literal["none", "allowlist", "public"] = "none"
    hosts: tuple[str, ...] = ()


class HealthCheck(_Model):
    """Command that exits with 0 once the environment is ready."""

    command: str
    interval_s: float = 5.0
    timeout_s: float = 30.0
    start_period_s: float = 0.0
    start_interval_s: float = 5.0
    retries: int = 3


class Machine(_Model):
    """The image and the resources of a sandbox.

    Args:
        folder: of the task directory with the Dockerfile and the files that it copies, such as `environment`.
        image: reference of a ready image, used instead of the Dockerfile.
        build_s: seconds that the build of the image may take.
        cpus, memory_bytes, disk_bytes: limits; None takes the driver's.
        gpus: number of GPUs that the task needs; `tpu`: whether it needs a TPU.
        os: operating system of the image.
        network: network access while the task runs.
        env: environment variables; values may name variables of the host as `${NAME}` or `${NAME:-DEFAULT}`.
        workdir: working directory; "" takes the image's.
        health: checked before the agent starts.
        services: names of the Compose services beside the agent's own.
        host: parts of the host that the agent's own service asks for, such as `/dev/kvm` or `privileged`.
        tools: names of MCP servers that the task offers.
    """

    folder: str = "environment"
    image: str = ""
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
    health: HealthCheck | None = None
    services: tuple[str, ...] = ()
    host: tuple[str, ...] = ()
    tools: tuple[str, ...] = ()


class Phase(_Model):
    """How the agent, or the verifier, runs.

    Args:
        timeout_s: seconds that the phase may take; None sets no limit.
        user: name or number of its user; None takes the image's.
        env: variables beside those of the machine.
        network: replaces the machine's; None keeps it.
    """

    timeout_s: float | None = None
    user: str | int | None = None
    env: Variables = Field(default_factory=dict)
    network: NetworkAccess | None = None


class Artifact(_Model):
    """File or directory that is kept, and that a separate verifier sees at the same path."""

    source: str
    destination: str = ""
    exclude: tuple[str, ...] = ()
    service: str = ""


class Collect(_Model):
    """Command run after the agent has finished, before artifacts are taken; "" is the agent's own service."""

    command: str
    service: str = ""
    timeout_s: float = 60.0
    user: str | int | None = None


class Step(_Model):
    """One instruction and its tests. A task has one step unless its format says otherwise.

    Args:
        name: "" if the task has only one.
        instruction: what the agent is asked.
        agent, verifier: how they run.
        verifier_machine: of a verifier that does not see the agent's files, except the artifacts; None is one
            that runs on them.
        tests: files that appear in `/tests`, by path below it: their paths in the task directory. Empty if
            the verifier's image has them.
        test_script: run by the verifier, in its working directory: a path below `/tests`.
        result: where the reward is: in a file that the script writes, or in the summary that pytest prints.
        solution: files that appear in `/solution`, as `tests`; empty if there is no solution.
        solution_script: path below `/solution`; `solution_env`: its variables.
        workdir_files: files that are copied into the working directory before the step, as `tests`;
            `setup.sh` among them is then run.
        min_reward: later steps are skipped if a reward is below its threshold, by name of the reward.
        health: checked before the agent starts, in addition to the machine's.
        artifacts: files that are kept.
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
        format: of its directory.
        files: the task directory, by relative path.
        machine: of the agent.
        steps: at least one.
        scoring: reward of a task of several steps: the mean of theirs, or that of the last.
        collects: commands run after the agent has finished, before artifacts are taken.
    """

    format: Literal["harbor", "terminal-bench"]
    files: Mapping[str, Text | TaskFile]
    machine: Machine
    steps: tuple[Step, ...] = Field(min_length=1)
    scoring: Literal["mean", "final"] = "mean"
    collects: tuple[Collect, ...] = ()
