"""RUN stage with a harness in the sandbox, which calls the model endpoint on the sandbox's loopback."""

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

#: Limits of the endpoint in one sandbox. Further connections wait, since all belong to one harness.
INSIDE = ConnectionLimits(connections=64, head_s=30.0, keep_alive_s=30.0, refuse=False)
#: Seconds for a harness to exit after a limit was reached and no further calls are answered.
GRACE_S = 10.0
#: Number of characters of the harness's output that a failure quotes.
_QUOTED = 1500


async def play(
    agent: Agent,
    environment: HarnessedEnvironment[Any],
    prompt: Prompt,
    transcript: Transcript,
    **settings: Unpack[EpisodeSettings],
) -> StopReason:
    """Run the environment's harness until it exits or reaches a limit.

    Args: see `Agent.begin`.

    Raises:
        ModelError: the last model call failed.
        AgentFault: the harness failed, or never called its model.
        SandboxError, ToolError, EnvironmentFault: the infrastructure failed.
    """
    limits = settings["limits"]
    model = ModelSession(agent, transcript, limits, settings["sampling"], settings["session"])
    app = EndpointApp(lambda key: model if _keys_equal(key, model.key) else None, MODEL)
    listener = HttpListener(app, await environment.listen_inside(), INSIDE)
    endpoint = Endpoint(port=listener.port, key=model.key)
    running = asyncio.create_task(environment.run_harness(prompt, endpoint, timeout_s=limits.run_s))
    try:
        completed = await _wait_for_exit(agent, model, transcript, running, limits.run_s)
    finally:
        running.cancel()
        await asyncio.wait({running})
        await model.aclose()
        await listener.aclose()
        agent.forget(settings["session"])
    return _outcome(environment.harness.exits, model, completed, limits.run_s)


async def _wait_for_exit(
    agent: Agent,
    model: ModelSession,
    transcript: Transcript,
    running: asyncio.Task[Completed],
    seconds: float,
) -> Completed | None:
    """Wait for the harness to exit. Return its outcome, or None if it must be killed."""
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


def _outcome(
    exits: frozenset[int], model: ModelSession, completed: Completed | None, seconds: float
) -> StopReason:
    exit_text = _exit_text(completed, seconds)
    log.debug("a harness %s", exit_text)
    if model.failure is not None:
        raise model.failure
    if model.recording.turns == 0:
        hint = "does it use the given base URL and key?"
        raise AgentFault(f"the harness made no model call, and {exit_text}", hint=hint)
    if model.limit is not None:
        return model.limit
    if completed is None or completed.timed_out:
        return StopReason.TIME_LIMIT
    if completed.exit_code in exits:
        return StopReason.FINISHED
    if model.context_full:
        return StopReason.TOKEN_LIMIT
    raise AgentFault(
        f"the harness {exit_text}", hint="if this exit status is normal, add it to the setting exits"
    )


def _exit_text(completed: Completed | None, seconds: float) -> str:
    """Return a description of the harness's exit, with the end of its output."""
    if completed is None:
        return f"did not exit in {seconds:g} s"
    status = "did not exit in time" if completed.timed_out else f"exited with status {completed.exit_code}"
    output = printable(completed.output[-_QUOTED:].decode("utf-8", "replace")).strip()
    return f"{status}: {output}" if output else f"{status}, without output"


def _keys_equal(received: str, key: str) -> bool:
    return hmac.compare_digest(received.encode("utf-8", "replace"), key.encode())
