"""A model endpoint on loopback, over a model of the test's own or the scripted server."""

import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from prorl_envs.clock import SystemClock
from prorl_envs.policy.pool import ModelPool
from prorl_envs.policy.servers import Servers
from prorl_envs.policy.types import ModelClient, Sampling
from prorl_envs.rollout.agent import Agent, Transcript
from prorl_envs.rollout.endpoint.app import EndpointApp
from prorl_envs.rollout.endpoint.doorstep import IDLE_S, Doorstep
from prorl_envs.rollout.endpoint.session import EndpointLimits, ModelSession
from prorl_envs.rollout.server import answering
from prorl_envs.rollout.types import AgentLimits, Trajectory
from prorl_envs.testing.scripted import ScriptBook
from prorl_envs.testing.server import ScriptedServer
from prorl_envs.testing.tokenizer import builtin_renderer
from prorl_envs.testing.toy import Play, ToyModel

_LIMITS, _SAMPLING, _BOUNDS = AgentLimits(), Sampling(), EndpointLimits()

#: The tool that most tests offer.
LS: dict[str, Any] = {
    "type": "object",
    "properties": {"command": {"type": "string"}},
    "required": ["command"],
}


@dataclass
class Served:
    """An endpoint, and what is behind it."""

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
    served: Served, *, connections: int = 8, idle_s: float = IDLE_S
) -> AsyncIterator[Doorstep]:
    """The session on a socket as a sandbox has it."""
    listener = socket.create_server(("127.0.0.1", 0))
    app = EndpointApp(lambda key: served.session if key == served.key else None)
    step = Doorstep(app, listener, connections=connections, idle_s=idle_s)
    try:
        yield step
    finally:
        await step.aclose()


@asynccontextmanager
async def toy_endpoint(play: Play, **options: Any) -> AsyncIterator[Served]:
    """An endpoint whose model says what `play` says."""
    async with endpoint(ToyModel(builtin_renderer(), play), **options) as served:
        yield served


@asynccontextmanager
async def scripted_endpoint(
    tapes: dict[str, Sequence[Sequence[dict[str, Any]]]],
    *,
    server: dict[str, Any] | None = None,
    **options: Any,
) -> AsyncIterator[tuple[Served, ScriptedServer]]:
    """An endpoint over a real pool and the scripted model server, which speaks HTTP."""
    async with AsyncExitStack() as stack:
        book = ScriptBook.from_tapes(tapes)
        played = await stack.enter_async_context(ScriptedServer(book, **(server or {})))
        pool = ModelPool(Servers.of(builtin_renderer()).connect)
        stack.push_async_callback(pool.aclose)
        pool.add(played.url)
        yield await stack.enter_async_context(endpoint(pool, **options)), played


def check_rows(rows: Sequence[Trajectory]) -> None:
    """Each row is whole, and nothing that was sampled is trained on twice."""
    for row in rows:
        assert len(row.ids) == len(row.loss_mask) == len(row.logprobs)
        assert row.drift == 0
        sampled = [at for turn in row.turns for at in range(turn.start, turn.end)]
        assert [at for at, mask in enumerate(row.loss_mask) if mask] == sampled
        assert all(value == 0.0 for value, mask in zip(row.logprobs, row.loss_mask, strict=True) if not mask)
        if row.parent is not None:
            assert row.ids[: row.shared] == rows[row.parent].ids[: row.shared]
            assert not any(row.loss_mask[: row.shared])
