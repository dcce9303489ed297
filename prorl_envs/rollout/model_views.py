"""What callers see of the model servers, and what they may do with them."""

import logging
import math
from collections.abc import Iterable

from pydantic import BaseModel

from prorl_envs.policy.pool import ModelPool, Told
from prorl_envs.policy.servers import split_protocol
from prorl_envs.policy.types import ModelClient
from prorl_envs.rollout.errors import Conflict, NotFound
from prorl_envs.rollout.store import Store
from prorl_envs.rollout.views import (
    ModelServerList,
    ModelServerRequest,
    ModelServerView,
    PauseRequest,
    PauseView,
    ResumeRequest,
    RouterView,
    ToldView,
)

log = logging.getLogger(__name__)

#: The store's name of the servers that callers added.
_KEPT = "model_servers"


class _Kept(BaseModel):
    servers: list[str]
    weight_version: str


class ModelServers:
    """The model servers of a service, as its callers steer them. The next service on the same store has those
    that they added, with the weights they had; what it is started with is its own.

    Args:
        model: of the service.
        store: of the service.
    """

    def __init__(self, model: ModelClient, store: Store) -> None:
        self._model = model
        self._store = store
        self._added: dict[str, str] = {}  # by base URL, as it was given

    async def restore(self) -> None:
        """Take in what callers of the service before had added."""
        text = await self._store.kept(_KEPT)
        if text is None or not isinstance(self._model, ModelPool):
            return
        kept = _Kept.model_validate_json(text)
        if kept.servers:
            log.info("model servers of the service before: %s", ", ".join(kept.servers))
            self._model.restore(kept.servers, kept.weight_version)
            self._added = {split_protocol(url)[1]: url for url in kept.servers}

    def all(self) -> ModelServerList:
        """The servers in use; none where the model is no pool of them."""
        if not isinstance(self._model, ModelPool):
            return ModelServerList(servers=[])
        return ModelServerList(servers=server_views(self._model), paused=self._model.paused)

    async def add(self, asked: ModelServerRequest) -> ModelServerList:
        """Offer a further server to new rollouts. Adding one again changes nothing.

        Raises:
            InputError: not a URL.
            Conflict: this service's model is no pool.
            Unavailable: it is in use, and would not be after a restart: ask again.
        """
        url = f"{asked.protocol}+{asked.url}" if asked.protocol else asked.url
        self._added.setdefault(self._pool().add(url), url)
        await self._keep()
        return self.all()

    async def remove(self, url: str, wait_s: float) -> ModelServerList:
        """Give a server no more turns; those in flight end, and it is waited for so long.

        Raises:
            NotFound: it is not there.
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
        """Hold turns while weights change.

        Raises:
            Conflict: this service's model is no pool.
        """
        pool = self._pool()
        told = await pool.pause(asked.mode, resample=asked.resample, wait_s=asked.wait_s)
        return _pause_view(pool, told)

    async def resume(self, asked: ResumeRequest) -> PauseView:
        """Let turns go on.

        Raises:
            Conflict: this service's model is no pool.
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
    """The servers of a pool."""
    return [
        ModelServerView(
            url=server.url,
            in_flight=server.in_flight,
            sessions=server.sessions,
            healthy=server.failures == 0,
            draining=server.draining,
            protocol=pool.protocol(server.url),
            weight_version=server.weight_version,
            turns=server.turns,
            limit=None if math.isinf(server.window.limit) else int(server.window.limit),
        )
        for server in pool.servers
    ]


def router_view(pool: ModelPool) -> RouterView:
    """What a pool's router has done."""
    seen = pool.snapshot()
    return RouterView(
        turns=seen.turns,
        prompt_tokens=seen.prompt_tokens,
        expected_hit_rate=_share(seen.expected_hits, seen.prompt_tokens),
        told_hit_rate=_share(seen.told_hits, seen.told_prompt_tokens),
        moved=seen.moved,
        lost=seen.lost,
        spread=seen.spread,
        paused=pool.paused,
        paused_s=pool.paused_s(),
        waiting=pool.waiting,
    )


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _pause_view(pool: ModelPool, told: Iterable[Told]) -> PauseView:
    return PauseView(
        paused=pool.paused,
        in_flight=pool.in_flight,
        weight_version=pool.weight_version,
        told=[ToldView(url=one.url, supported=one.supported, problem=one.problem) for one in told],
    )
