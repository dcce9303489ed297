"""The model servers of a service: views, and operations of callers."""

import contextlib
import logging
import math
from collections.abc import Iterable

from pydantic import BaseModel

from prorl_envs.clock import Clock
from prorl_envs.model.routing.pool import ModelPool, ServerAck
from prorl_envs.model.servers.detect import split_protocol
from prorl_envs.model.types import ModelClient, ServerHealth
from prorl_envs.rollout.api.errors import Conflict, NotFound
from prorl_envs.rollout.api.views import (
    ModelServerList,
    ModelServerRequest,
    ModelServerView,
    PauseRequest,
    PauseView,
    ResumeRequest,
    RouterView,
    ServerAckView,
)
from prorl_envs.rollout.store.base import Store

log = logging.getLogger(__name__)

#: Store key of the servers that callers added.
_KEPT = "model_servers"
#: Longest problem of a failing server that is shown, in characters.
MAX_PROBLEM = 500
#: Seconds that adding a server waits for its first health check.
PROBE_S = 5.0


class _Kept(BaseModel):
    servers: list[str]
    weight_version: str


class ModelServers:
    """The model servers of a service, as callers change them. The next service on the same store has the
    servers that callers added, with their weight version; the servers that a service starts with are not
    stored.

    Args:
        model: of the service.
        store: of the service.
        clock: measures timeouts.
    """

    def __init__(self, model: ModelClient, store: Store, clock: Clock) -> None:
        self._model = model
        self._store = store
        self._clock = clock
        self._added: dict[str, str] = {}  # by base URL, the URL as the caller gave it

    async def restore(self) -> None:
        """Add the servers that callers of the previous service had added."""
        text = await self._store.kept(_KEPT)
        if text is None or not isinstance(self._model, ModelPool):
            return
        kept = _Kept.model_validate_json(text)
        if kept.servers:
            log.info("model servers of the service before: %s", ", ".join(kept.servers))
            self._model.restore(kept.servers, kept.weight_version)
            self._added = {split_protocol(url)[1]: url for url in kept.servers}

    def can_sample(self) -> bool:
        """Return whether turns can be sampled: the model is fixed, or a server of the pool takes turns."""
        return not isinstance(self._model, ModelPool) or any(
            server.state is not ServerHealth.DRAINING for server in server_views(self._model)
        )

    def router(self) -> RouterView | None:
        """Return the view of the router; None if the model is not a pool."""
        return router_view(self._model) if isinstance(self._model, ModelPool) else None

    def all(self) -> ModelServerList:
        """Return the servers in use; none if the model is not a pool."""
        if not isinstance(self._model, ModelPool):
            return ModelServerList(servers=[])
        return ModelServerList(servers=server_views(self._model), paused=self._model.paused)

    async def add(self, asked: ModelServerRequest) -> ModelServerList:
        """Add a server and send it a health check. A server that does not answer is added too, and gets turns
        once it answers. Adding a server again only checks it.

        Raises:
            InputError: not a URL.
            Conflict: this service's model is not a pool.
            Unavailable: it is in use but not stored, so a restart would lose it: repeat the request.
        """
        url = f"{asked.protocol}+{asked.url}" if asked.protocol else asked.url
        pool = self._pool()
        base = pool.add(url)
        self._added.setdefault(base, url)
        await self._keep()
        with contextlib.suppress(TimeoutError):  # the pool keeps checking
            async with self._clock.timeout(PROBE_S):
                await pool.check(base)
        return self.all()

    async def remove(self, url: str, wait_s: float) -> ModelServerList:
        """Send a server no more turns, and wait up to `wait_s` seconds for those in flight.

        Raises:
            NotFound: no such server.
            InputError, Conflict: as for adding.
        """
        pool = self._pool()
        _, base = split_protocol(url)
        if base not in {server.url for server in pool.servers}:
            raise NotFound(f"no model server {url!r}")
        if self._added.pop(base, None) is not None:
            await self._keep()
        await pool.remove(url, wait_s=wait_s)
        return self.all()

    async def pause(self, asked: PauseRequest) -> PauseView:
        """Hold turns during a weight update.

        Raises:
            Conflict: this service's model is not a pool.
        """
        pool = self._pool()
        told = await pool.pause(asked.mode, resample=asked.resample, wait_s=asked.wait_s)
        return _pause_view(pool, told)

    async def resume(self, asked: ResumeRequest) -> PauseView:
        """Let held turns continue.

        Raises:
            Conflict: this service's model is not a pool.
        """
        pool = self._pool()
        view = _pause_view(pool, await pool.resume(asked.weight_version))
        if self._added:
            await self._keep()
        return view

    async def _keep(self) -> None:
        kept = _Kept(servers=list(self._added.values()), weight_version=self._pool().weight_version)
        await self._store.keep(_KEPT, kept.model_dump_json())

    def _pool(self) -> ModelPool:
        if not isinstance(self._model, ModelPool):
            raise Conflict("the model of this service is fixed", hint="start it with model servers")
        return self._model


def server_views(pool: ModelPool) -> list[ModelServerView]:
    """Return the views of the servers of a pool."""
    return [
        ModelServerView(
            url=server.url,
            in_flight=server.in_flight,
            sessions=server.sessions,
            state=server.health,
            problem=server.problem[:MAX_PROBLEM],
            protocol=pool.protocol(server.url),
            weight_version=server.weight_version,
            turns=server.turns,
            limit=None if math.isinf(server.window.limit) else int(server.window.limit),
        )
        for server in pool.servers
    ]


def router_view(pool: ModelPool) -> RouterView:
    """Return the counts and state of a pool's router."""
    seen = pool.snapshot()
    return RouterView(
        turns=seen.turns,
        prompt_tokens=seen.prompt_tokens,
        expected_hit_rate=_share(seen.expected_hits, seen.prompt_tokens),
        reported_hit_rate=_share(seen.reported_hits, seen.reported_prompt_tokens),
        rebalanced=seen.rebalanced,
        failed_over=seen.failed_over,
        load_imbalance=seen.load_imbalance,
        paused=pool.paused,
        paused_s=pool.paused_s(),
        waiting=pool.waiting,
    )


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _pause_view(pool: ModelPool, told: Iterable[ServerAck]) -> PauseView:
    return PauseView(
        paused=pool.paused,
        in_flight=pool.in_flight,
        weight_version=pool.weight_version,
        acknowledgements=[
            ServerAckView(url=one.url, supported=one.supported, problem=one.problem) for one in told
        ],
    )
