"""RUN with a harness in the sandbox, which calls the rollout's model endpoint on the sandbox's loopback."""

import asyncio
import hmac
import logging
from typing import Any, Unpack

from prorl_envs.env.base import Prompt
from prorl_envs.env.harness.family import HarnessedEnvironment
from prorl_envs.env.harness.recipe import MODEL, Endpoint
from prorl_envs.errors import AgentFault, printable
from prorl_envs.listener.connection import ConnectionLimits
from prorl_envs.listener.listener import HttpListener
from prorl_envs.model.routing.pause_gate import ActiveTimeout
from prorl_envs.rollout.agent.agent_loop import Agent, EpisodeSettings, Transcript
from prorl_envs.rollout.api.types import StopReason
from prorl_envs.rollout.endpoint.app import EndpointApp
from prorl_envs.rollout.endpoint.session import ModelSession
from prorl_envs.tools.types import Completed

log = logging.getLogger(__name__)

#: Limits of the endpoint in one sandbox. Clients beyond them wait: all belong to one harness.
INSIDE = ConnectionLimits(connections=64, head_s=30.0, keep_alive_s=30.0, refuse=False)
#: Seconds that a harness has to exit once its model answers no further calls.
GRACE_S = 10.0
#: Characters of its output that a failure quotes.
_SAID = 1500


async def play(
    agent: Agent,
    environment: HarnessedEnvironment[Any],
    prompt: Prompt,
    transcript: Transcript,
    **how: Unpack[EpisodeSettings],
) -> StopReason:
    """Run the environment's harness until it exits, or reaches a limit.

    Args: as of `Agent.play`.

    Raises:
        ModelError: its model failed, and the harness did not recover.
        AgentFault: the harness failed, or never called its model.
        SandboxError, ToolError, EnvironmentFault: our infrastructure failed.
    """
    limits = how["limits"]
    model = ModelSession(agent, transcript, limits, how["sampling"], how["session"])
    app = EndpointApp(lambda key: model if _same(key, model.key) else None, MODEL)
    listener = HttpListener(app, await environment.listen_inside(), INSIDE)
    endpoint = Endpoint(port=listener.port, key=model.key)
    running = asyncio.create_task(environment.run_harness(prompt, endpoint, timeout_s=limits.run_s))
    try:
        done = await _until_end(agent, model, transcript, running, limits.run_s)
    finally:
        running.cancel()
        await asyncio.wait({running})
        await model.aclose()
        await listener.aclose()
        agent.forget(how["session"])
    return _judge(environment.harness.exits, model, done, limits.run_s)


async def _until_end(
    agent: Agent,
    model: ModelSession,
    transcript: Transcript,
    running: asyncio.Task[Completed],
    seconds: float,
) -> Completed | None:
    """Wait for the harness; return its outcome, or None if it must be killed."""
    held = transcript.held
    exhausted = asyncio.create_task(model.exhausted.wait())
    try:
        async with ActiveTimeout(agent.clock, seconds, held.seconds) as deadline:
            await asyncio.wait({running, exhausted}, return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                await asyncio.wait({running}, timeout=GRACE_S)
    except TimeoutError:
        if not deadline.expired():
            raise
        model.end(StopReason.TIME_LIMIT)
    finally:
        exhausted.cancel()
    return running.result() if running.done() else None


def _judge(exits: frozenset[int], model: ModelSession, done: Completed | None, seconds: float) -> StopReason:
    said = _said(done, seconds)
    log.debug("a harness %s", said)
    if model.failure is not None:
        raise model.failure
    if model.recording.turns == 0:
        hint = "does it use the given base URL and key?"
        raise AgentFault(f"the harness asked its model nothing, and {said}", hint=hint)
    if model.limit is not None:
        return model.limit
    if done is None or done.timed_out:
        return StopReason.TIME_LIMIT
    if done.exit_code in exits:
        return StopReason.FINISHED
    if model.full:
        return StopReason.TOKEN_LIMIT
    raise AgentFault(f"the harness {said}", hint="if that is an end in order, name it: exits")


def _said(done: Completed | None, seconds: float) -> str:
    """Return how the harness exited, and the end of its output."""
    if done is None:
        return f"did not end in {seconds:g} s"
    how = f"ended with exit status {done.exit_code}" if not done.timed_out else "did not end in time"
    words = printable(done.output[-_SAID:].decode("utf-8", "replace")).strip()
    return f"{how}: {words}" if words else f"{how}, without a word"


def _same(given: str, key: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "replace"), key.encode())
