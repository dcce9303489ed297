"""Requirements of a task that this machine or this version cannot meet, found without starting a process."""

import os
import re
from collections.abc import Iterator, Mapping

from prorl_envs.envs.terminal.files import text_of
from prorl_envs.envs.terminal.task import Machine, TerminalTask, dockerfile_of
from prorl_envs.errors import InputError
from prorl_envs.images.dockerfile.parser import parse_dockerfile
from prorl_envs.images.dockerfile.stages import plan_build
from prorl_envs.images.registry.documents import host_platform
from prorl_envs.sandbox.limits.policy import size_words

#: Value of a variable that refers to a variable of the user: `${NAME}` or `${NAME:-DEFAULT}`.
_TEMPLATE = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}")


def missing(task: TerminalTask, variables: Mapping[str, str]) -> tuple[str, ...]:
    """Return all reasons why a task cannot run on this machine; empty if it can.

    Args:
        task: the task.
        variables: values of variables that the task expects from the user.
    """
    reasons = [*_machine(task, task.machine)]
    for step in task.steps:
        if step.verifier_machine is not None:
            reasons += _machine(task, step.verifier_machine)
            if step.verifier_machine.services:
                reasons.append("its verifier needs Compose services")
            reasons += _variables(step.verifier_machine.env, variables)
        for env in (step.verifier.env, step.agent.env):
            reasons += _variables(env, variables)
    reasons += _variables(task.machine.env, variables)
    services = {"", *(service.name for service in task.machine.services)}
    artifacts = (artifact.service for step in task.steps for artifact in step.artifacts)
    for name in {*artifacts, *(hook.service for hook in task.collects)} - services:
        reasons.append(f"it takes files from a service that it does not have: {name}")
    return tuple(dict.fromkeys(reasons))


def resolved(env: Mapping[str, str], variables: Mapping[str, str]) -> dict[str, str]:
    """Return variables with templates replaced. A template is a value `${NAME}` or `${NAME:-DEFAULT}`.

    The environment of this process is never used, because tasks are untrusted.

    Args:
        env: variables of the task.
        variables: values of variables that the task expects from the user.

    Raises:
        InputError: a variable has no value.
    """
    if reasons := [*_variables(env, variables)]:
        raise InputError(reasons[0], hint="set it in options.variables")
    found = {}
    for name, value in env.items():
        match = _TEMPLATE.fullmatch(value)
        found[name] = value if match is None else variables.get(match[1], match[2] or "")
    return found


def _variables(env: Mapping[str, str], variables: Mapping[str, str]) -> Iterator[str]:
    for value in env.values():
        match = _TEMPLATE.fullmatch(value)
        if match is not None and match[2] is None and match[1] not in variables:
            yield f"the variable {match[1]} has no value"


def _machine(task: TerminalTask, machine: Machine, who: str = "it") -> Iterator[str]:
    if machine.os != "linux":
        yield f"its image is for {machine.os}"
    if machine.gpus:
        yield f"{who} needs a GPU"
    if machine.tpu:
        yield "it needs a TPU"
    for service in machine.services:
        yield from _machine(task, service, f"the service {service.name}")
    for part in machine.host:
        need = "a privileged container" if part == "privileged" else f"the device {part}"
        yield f"{who} needs {need}"
    if machine.tools:
        yield f"it needs MCP servers: {', '.join(machine.tools)}"
    yield from machine.unsupported
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if machine.memory_bytes is not None and machine.memory_bytes > total:
        yield f"{who} needs {size_words(machine.memory_bytes)} of memory"
    if not machine.image:
        yield from _dockerfile(task, machine)


def _dockerfile(task: TerminalTask, machine: Machine) -> Iterator[str]:
    path = dockerfile_of(machine)
    try:
        dockerfile = parse_dockerfile(text_of(task.files, path), path)
        target = machine.build_target or None
        plan_build(dockerfile, machine.build_args, platform=host_platform(), target=target)
    except InputError as error:
        yield str(error.message)
