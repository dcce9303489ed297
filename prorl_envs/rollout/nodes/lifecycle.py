"""Lifecycle of a node: receive the settings, prepare, join, work, close everything."""

import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from prorl_envs import __version__
from prorl_envs.clock import Clock, SystemClock
from prorl_envs.env.node import Node
from prorl_envs.model.types import ModelClient, Renderer
from prorl_envs.rollout.agent.agent_loop import Agent
from prorl_envs.rollout.episode.stages import Family
from prorl_envs.rollout.episode.worker import Worker
from prorl_envs.rollout.nodes.channel import ChannelClosed, NodeChannel
from prorl_envs.rollout.nodes.messages import Hello, Ready, ToHead, ToNode
from prorl_envs.rollout.nodes.remote_sampling import RoutedModel
from prorl_envs.rollout.nodes.worker import NodeWorker
from prorl_envs.rollout.scheduling.placement import StageLimits
from prorl_envs.tools.types import ToolSpec


@dataclass(frozen=True, slots=True)
class NodeResources:
    """Resources of a node.

    Args:
        node: this machine's sandboxes.
        families: environment classes by name.
        renderer: the model's tokenizer and chat template.
        connect: creates the client of a model server from its URL.
    """

    node: Node
    families: Mapping[str, Family]
    renderer: Renderer
    connect: Callable[[str], ModelClient]


async def take_part(
    channel: NodeChannel[ToHead, ToNode],
    prepare: Callable[[Hello], AbstractAsyncContextManager[NodeResources]],
    *,
    name: str,
    limits: StageLimits,
    clock: Clock | None = None,
    joined: Callable[[NodeWorker], None] = lambda member: None,
) -> None:
    """Join the head's service, and work until the head sends `Shutdown`.

    Args:
        channel: to the head. Closed on leaving.
        prepare: creates the resources for the head's `Hello`; closed on leaving.
        name: of this node.
        limits: concurrency limits of this node.
        joined: called when the node is ready.

    Raises:
        ChannelClosed: the connection to the head is lost.
        InputError: the head refuses this node.
        SandboxError: this machine cannot run sandboxes.
    """
    clock = clock or SystemClock()
    try:
        welcome = await channel.receive()
        if not isinstance(welcome, Hello):
            raise ChannelClosed(f"it begins with {type(welcome).__name__}, and is no service of this version")
        async with prepare(welcome) as prepared:
            model = RoutedModel(prepared.connect, channel.send, clock)
            worker = Worker(
                prepared.node,
                prepared.families,
                Agent(prepared.renderer, model, clock, welcome.reasoning),
                clock,
                grace_s=welcome.grace_s,
                close_s=welcome.close_s,
            )
            member = NodeWorker(
                channel,
                worker,
                prepared.families,
                model,
                clock,
                lambda: prepared.node.use,
                heartbeat_s=welcome.heartbeat_s,
                heartbeat_timeout_s=welcome.heartbeat_timeout_s,
            )
            channel.send(
                Ready(
                    name=name,
                    version=__version__,
                    init=limits.init,
                    run=limits.run,
                    eval=limits.eval,
                    max_jobs_with_sandbox=limits.max_jobs_with_sandbox,
                    environments=sorted(prepared.families),
                    fingerprint=fingerprint(prepared.renderer),
                )
            )
            joined(member)
            try:
                await member.run()
            finally:
                await model.aclose()
    finally:
        channel.close()


def fingerprint(renderer: Renderer) -> str:
    """Return a hash of the tokens of a conversation with a tool. Tokenizers or chat templates with different
    hashes would make different trajectories of the same episode."""
    messages = [
        {"role": "system", "content": "Be exact: 0123456789 äöü 漢字 \n\t{}[]<>"},
        {"role": "user", "content": "def f(x):\n    return x ** 2  # naïve"},
    ]
    tool = ToolSpec("bash", "Run it.", {"type": "object", "properties": {"command": {"type": "string"}}})
    ids = renderer.prompt(messages, [tool])
    return hashlib.blake2b(json.dumps(ids).encode(), digest_size=16).hexdigest()
