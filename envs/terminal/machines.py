"""Sandboxes of a machine: their image, environment, network and limits."""

import posixpath
from dataclasses import replace

from prorl_envs.envs.terminal.images import TaskImage
from prorl_envs.envs.terminal.options import TerminalOptions
from prorl_envs.envs.terminal.requirements import resolved
from prorl_envs.envs.terminal.task import Machine, NetworkAccess, Phase
from prorl_envs.sandbox.base import Network, SandboxLimits, SandboxSpec


def machine_spec(
    image: TaskImage, machine: Machine, phase: Phase, options: TerminalOptions, limits: SandboxLimits
) -> SandboxSpec:
    """Return the spec of a sandbox in which the agent or the verifier runs, as root of the image.

    Args:
        image: the machine's.
        phase: of the agent or the verifier.
        limits: of this node's sandboxes; the machine's are applied as far as they are lower.

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


def _lower[NumberT: (int, float)](one: NumberT | None, other: NumberT | None) -> NumberT | None:
    if one is None or other is None:
        return one if other is None else other
    return min(one, other)


def _network(access: NetworkAccess, options: TerminalOptions) -> Network:
    match access.mode:
        case "none":
            return Network()
        case "allowlist":
            return Network(allow=access.hosts)
    if options.public_network == "open":
        return Network(open=True)
    return Network(allow=options.public_network)
