"""Specs of a machine's sandboxes: image, environment, network and limits."""

import posixpath
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from prorl_envs.envs.terminal.images import TaskImage
from prorl_envs.envs.terminal.options import TerminalOptions
from prorl_envs.envs.terminal.requirements import resolved
from prorl_envs.envs.terminal.task import Machine, NetworkAccess, Phase
from prorl_envs.sandbox.base import DEFAULT_HOSTNAME, Network, SandboxLimits, SandboxSpec


def machine_spec(
    image: TaskImage,
    machine: Machine,
    phase: Phase,
    options: TerminalOptions,
    limits: SandboxLimits,
    hosts: Mapping[str, str] = MappingProxyType({}),
) -> SandboxSpec:
    """Return the spec of a sandbox in which the agent or the verifier runs, as root of the image.

    Args:
        image: image of the machine, perhaps with the agent's changes.
        machine: the machine.
        phase: settings of the agent or of the verifier.
        options: options of the family.
        limits: limits of this node's sandboxes; a limit of the machine applies if it is lower.
        hosts: addresses of other machines, by name.

    Raises:
        InputError: a variable has no value.
    """
    config = image.image.config
    env = {**config.env, **resolved({**machine.env, **phase.env}, options.variables)}
    return SandboxSpec(
        image=image.path,
        emulate_root=True,
        workdir=_workdir(image, machine),
        env=env,
        hostname=machine.hostname or DEFAULT_HOSTNAME,
        hosts=hosts,
        limits=replace(
            limits,
            memory_bytes=_lower(limits.memory_bytes, machine.memory_bytes),
            disk_bytes=_lower(limits.disk_bytes, machine.disk_bytes),
            cpus=_lower(limits.cpus, machine.cpus),
        ),
        network=_network(phase.network or machine.network, options),
    )


def _workdir(image: TaskImage, machine: Machine) -> str:
    """Return the working directory: the machine's, else the image's, else `/`."""
    return posixpath.join("/", machine.workdir or image.image.config.workdir)


def _lower[NumberT: (int, float)](left: NumberT | None, right: NumberT | None) -> NumberT | None:
    if left is None or right is None:
        return left if right is None else right
    return min(left, right)


def _network(access: NetworkAccess, options: TerminalOptions) -> Network:
    match access.mode:
        case "none":
            return Network()
        case "allowlist":
            return Network(allow=access.hosts)
    if options.public_network == "open":
        return Network(open=True, reason="public_network is open")
    return Network(allow=options.public_network)


#: The benchmarks use bash, which also runs scripts without a `#!` line. Some images have only sh.
_SHELL = 'command -v bash >/dev/null 2>&1 && exec bash "$@"; exec /bin/sh "$@"'


def shell_command(*arguments: str) -> list[str]:
    """Return a command that runs bash with arguments, or sh in an image without bash."""
    return ["/bin/sh", "-c", _SHELL, "sh", *arguments]
