"""Model endpoint on loopback with a toy model or the scripted server."""

import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from prorl_envs.clock import SystemClock
from prorl_envs.env.base import Message
from prorl_envs.listener.listener import HttpListener
from prorl_envs.model.routing.pool import ModelPool
from prorl_envs.model.servers.detect import Servers
from prorl_envs.model.types import ModelClient, Sampling
from prorl_envs.rollout.agent.agent_loop import Agent, Transcript
from prorl_envs.rollout.api.types import AgentLimits, Trajectory
from prorl_envs.rollout.endpoint.app import EndpointApp
from prorl_envs.rollout.endpoint.harness_run import INSIDE
from prorl_envs.rollout.endpoint.session import EndpointLimits, ModelSession
from prorl_envs.rollout.endpoint.types import conversation
from prorl_envs.rollout.http.server import answering
from prorl_envs.testing.scripted import ScriptBook
from prorl_envs.testing.tokenizer import builtin_renderer
from tests.support.timed_server import TimedServer
from tests.support.toy import Play, ToyModel

_LIMITS, _SAMPLING, _BOUNDS = AgentLimits(), Sampling(), EndpointLimits()

#: The tool that most tests offer.
LS: dict[str, Any] = {
    "type": "object",
    "properties": {"command": {"type": "string"}},
    "required": ["command"],
}


@dataclass
class Served:
    """An endpoint with its session and transcript."""

    url: str
    session: ModelSession
    transcript: Transcript

    @property
    def key(self) -> str:
        return self.session.key

    @property
    def rows(self) -> list[Trajectory]:
        last = self.session.recording.trajectory()
        return [*self.session.recording.forks, *([last] if last else [])]


@asynccontextmanager
async def endpoint(
    model: ModelClient,
    *,
    limits: AgentLimits = _LIMITS,
    sampling: Sampling = _SAMPLING,
    reasoning: Any = "keep",
    bounds: EndpointLimits = _BOUNDS,
) -> AsyncIterator[Served]:
    """Serve one session's endpoint."""
    agent = Agent(builtin_renderer(), model, SystemClock(), reasoning)
    transcript = Transcript()
    session = ModelSession(agent, transcript, limits, sampling, "g/0", bounds)
    app = EndpointApp(lambda key: session if key == session.key else None)
    async with answering(app, last_requests_s=1) as url:
        try:
            yield Served(url, session, transcript)
        finally:
            await session.aclose()


@asynccontextmanager
async def doorstep(
    served: Served, *, connections: int = 8, idle_s: float = INSIDE.keep_alive_s
) -> AsyncIterator[HttpListener]:
    """Serve the session on a socket like that of a sandbox."""
    listener = socket.create_server(("127.0.0.1", 0))
    app = EndpointApp(lambda key: served.session if key == served.key else None)
    limits = replace(INSIDE, connections=connections, head_s=idle_s, keep_alive_s=idle_s)
    step = HttpListener(app, listener, limits)
    try:
        yield step
    finally:
        await step.aclose()


@asynccontextmanager
async def toy_endpoint(play: Play, **options: Any) -> AsyncIterator[Served]:
    """Serve an endpoint whose model samples the results of `play`."""
    async with endpoint(ToyModel(builtin_renderer(), play), **options) as served:
        yield served


@asynccontextmanager
async def scripted_endpoint(
    tapes: dict[str, Sequence[Sequence[dict[str, Any]]]],
    *,
    server: dict[str, Any] | None = None,
    **options: Any,
) -> AsyncIterator[tuple[Served, TimedServer]]:
    """Serve an endpoint with a real pool and the scripted model server over HTTP."""
    async with AsyncExitStack() as stack:
        book = ScriptBook.from_tapes(tapes)
        played = await stack.enter_async_context(TimedServer(book, **(server or {})))
        pool = ModelPool(Servers.of(builtin_renderer()).connect)
        stack.push_async_callback(pool.aclose)
        pool.add(played.url)
        yield await stack.enter_async_context(endpoint(pool, **options)), played


def check_rows(rows: Sequence[Trajectory]) -> None:
    """Check that each row is complete and that no sampled token is trained on twice."""
    for row in rows:
        assert len(row.ids) == len(row.loss_mask) == len(row.logprobs)
        assert row.drift == 0
        sampled = [at for turn in row.turns for at in range(turn.start, turn.end)]
        assert [at for at, mask in enumerate(row.loss_mask) if mask] == sampled
        assert all(value == 0.0 for value, mask in zip(row.logprobs, row.loss_mask, strict=True) if not mask)
        if row.parent is not None:
            assert row.ids[: row.shared_prefix_len] == rows[row.parent].ids[: row.shared_prefix_len]
            assert not any(row.loss_mask[: row.shared_prefix_len])


def validated(messages: Sequence[Message]) -> list[Message]:
    """Return the messages of a request in the form that chat templates accept."""
    return conversation(dict(message) for message in messages)
