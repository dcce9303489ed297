"""Model servers of a service: views, and changes by callers."""

import contextlib
import logging
import math
from collections.abc import Iterable
from dataclasses import InitVar, dataclass, field

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
from prorl_envs.rollout.store.sql import SqlStore

log = logging.getLogger(__name__)

#: Store key of the servers that callers added.
_STORE_KEY = "model_servers"
#: Maximum length of a shown problem of a failing server, in characters.
MAX_PROBLEM = 500
#: Seconds that adding a server waits for its first check: the detection of one that refuses takes up to 6 s.
PROBE_S = 10.0


class _StoredServers(BaseModel):
    servers: list[str]
    weight_version: str


@dataclass(eq=False)
class ModelServers:
    """Model servers of a service, which callers can add, remove, pause and resume.

    The servers that callers added are stored with their weight version, so that a restarted service uses
    them. Servers from the configuration are not stored.

    Args:
        model: the service's model client.
        store: the service's store.
        clock: measures timeouts.
    """

    model: InitVar[ModelClient]
    store: SqlStore
    clock: Clock
    _added: dict[str, str] = field(default_factory=dict, init=False)  # by base URL, the URL from the caller

    def __post_init__(self, model: ModelClient) -> None:
        self._pool = model if isinstance(model, ModelPool) else None

    async def restore(self) -> None:
        """Add the servers that callers of the previous service had added."""
        text = await self.store.get_value(_STORE_KEY)
        if text is None or self._pool is None:
            return
        stored = _StoredServers.model_validate_json(text)
        if stored.servers:
            log.info("model servers added to the previous service: %s", ", ".join(stored.servers))
            self._pool.restore(stored.servers, stored.weight_version)
            self._added = {split_protocol(url)[1]: url for url in stored.servers}

    def can_sample(self) -> bool:
        """Return True unless the model is a pool in which no server accepts turns."""
        draining = ServerHealth.DRAINING
        return self._pool is None or any(view.state is not draining for view in server_views(self._pool))

    def router(self) -> RouterView | None:
        """Return the view of the router; None if the model is not a pool."""
        return router_view(self._pool) if self._pool is not None else None

    def all(self) -> ModelServerList:
        """Return the servers in use; an empty list if the model is not a pool."""
        if self._pool is None:
            return ModelServerList(servers=[])
        return ModelServerList(servers=server_views(self._pool), paused=self._pool.paused)

    async def add(self, request: ModelServerRequest) -> ModelServerList:
        """Add a server and send it a health check. A server that does not answer is added too, and receives
        turns once it answers. Adding a server again only checks it.

        Raises:
            InputError: the URL is invalid.
            Conflict: this service's model is not a pool.
            Unavailable: the server was added but not stored: a restart loses it, unless it is added again.
        """
        url = f"{request.protocol}+{request.url}" if request.protocol else request.url
        pool = self._checked_pool()
        base = pool.add(url)
        self._added.setdefault(base, url)
        await self._save()
        with contextlib.suppress(TimeoutError):  # the pool continues to check the server
            async with self.clock.timeout(PROBE_S):
                await pool.check(base)
        return self.all()

    async def remove(self, url: str, wait_s: float) -> ModelServerList:
        """Stop sending turns to a server, and wait up to `wait_s` seconds for its turns in flight.

        Raises:
            NotFound: no such server.
            InputError, Conflict: see `add`.
        """
        pool = self._checked_pool()
        _, base = split_protocol(url)
        if base not in {server.url for server in pool.servers}:
            raise NotFound(f"no model server {url!r}")
        if self._added.pop(base, None) is not None:
            await self._save()
        await pool.remove(url, wait_s=wait_s)
        return self.all()

    async def pause(self, request: PauseRequest) -> PauseView:
        """Hold turns during a weight update.

        Raises:
            Conflict: this service's model is not a pool.
        """
        pool = self._checked_pool()
        acknowledgements = await pool.pause(request.mode, resample=request.resample, wait_s=request.wait_s)
        return _pause_view(pool, acknowledgements)

    async def resume(self, request: ResumeRequest) -> PauseView:
        """Let held turns continue.

        Raises:
            Conflict: this service's model is not a pool.
        """
        pool = self._checked_pool()
        view = _pause_view(pool, await pool.resume(request.weight_version))
        if self._added:
            await self._save()
        return view

    async def _save(self) -> None:
        version = self._checked_pool().weight_version
        stored = _StoredServers(servers=list(self._added.values()), weight_version=version)
        await self.store.put_value(_STORE_KEY, stored.model_dump_json())

    def _checked_pool(self) -> ModelPool:
        if self._pool is None:
            raise Conflict("the model of this service is fixed", hint="start it with model servers")
        return self._pool


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
    snapshot = pool.snapshot()
    return RouterView(
        turns=snapshot.turns,
        prompt_tokens=snapshot.prompt_tokens,
        expected_hit_rate=_share(snapshot.expected_hits, snapshot.prompt_tokens),
        reported_hit_rate=_share(snapshot.reported_hits, snapshot.reported_prompt_tokens),
        rebalanced=snapshot.rebalanced,
        failed_over=snapshot.failed_over,
        load_imbalance=snapshot.load_imbalance,
        paused=pool.paused,
        paused_s=pool.paused_s(),
        waiting=pool.waiting,
    )


def _share(part: int, total: int) -> float | None:
    return part / total if total else None


def _pause_view(pool: ModelPool, acknowledgements: Iterable[ServerAck]) -> PauseView:
    return PauseView(
        paused=pool.paused,
        in_flight=pool.in_flight,
        weight_version=pool.weight_version,
        acknowledgements=[
            ServerAckView(url=ack.url, supported=ack.supported, problem=ack.problem)
            for ack in acknowledgements
        ],
    )
