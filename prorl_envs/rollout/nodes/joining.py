"""A node's whole life with a head: it hears what to prepare, prepares it, joins, works, closes everything."""

import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from prorl_envs import __version__
from prorl_envs.clock import Clock, SystemClock
from prorl_envs.env.node import Node
from prorl_envs.policy.types import ModelClient, Renderer
from prorl_envs.rollout.agent import Agent
from prorl_envs.rollout.nodes.channel import Channel, ChannelClosed
from prorl_envs.rollout.nodes.member import Member
from prorl_envs.rollout.nodes.messages import Ready, ToHead, ToNode, Welcome
from prorl_envs.rollout.nodes.turns import RoutedModel
from prorl_envs.rollout.placement import Limits
from prorl_envs.rollout.stages import Family
from prorl_envs.rollout.worker import Worker
from prorl_envs.tools.types import ToolSpec


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a node works with.

    Args:
        node: this machine's sandboxes.
        families: environment classes by name.
        renderer: the model's tokenizer and chat template.
        connect: makes the client of a model server from its URL.
    """

    node: Node
    families: Mapping[str, Family]
    renderer: Renderer
    connect: Callable[[str], ModelClient]


async def take_part(
    channel: Channel[ToHead, ToNode],
    prepare: Callable[[Welcome], AbstractAsyncContextManager[Prepared]],
    *,
    name: str,
    limits: Limits,
    clock: Clock | None = None,
    joined: Callable[[Member], None] = lambda member: None,
) -> None:
    """Work for the head at the other end, until it says that it is the end.

    Args:
        channel: to the head. Closed on leaving.
        prepare: makes ready what the head welcomes us with; closed on leaving.
        name: of this node.
        limits: how much may happen here at once.
        joined: called when the node is ready.

    Raises:
        ChannelClosed: the head is gone.
        InputError: it refuses this node.
        SandboxError: this machine cannot run sandboxes.
    """
    clock = clock or SystemClock()
    try:
        welcome = await channel.receive()
        if not isinstance(welcome, Welcome):
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
            member = Member(
                channel,
                worker,
                prepared.families,
                model,
                clock,
                lambda: prepared.node.use,
                beat_s=welcome.beat_s,
                silent_s=welcome.silent_s,
            )
            channel.send(
                Ready(
                    name=name,
                    version=__version__,
                    init=limits.init,
                    run=limits.run,
                    eval=limits.eval,
                    live=limits.live,
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
    """What a tokenizer and its chat template make of a conversation with a tool: two that differ here would
    make other trajectories of the same episode."""
    messages = [
        {"role": "system", "content": "Be exact: 0123456789 äöü 漢字 \n\t{}[]<>"},
        {"role": "user", "content": "def f(x):\n    return x ** 2  # naïve"},
    ]
    tool = ToolSpec("bash", "Run it.", {"type": "object", "properties": {"command": {"type": "string"}}})
    ids = renderer.prompt(messages, [tool])
    return hashlib.blake2b(json.dumps(ids).encode(), digest_size=16).hexdigest()
