"""Several model servers as one: added and removed while rollouts run."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from prorl_envs.clock import Clock, SystemClock
from prorl_envs.errors import ModelError
from prorl_envs.policy.link import base_url
from prorl_envs.policy.protocol import ServerUnavailable
from prorl_envs.policy.routing import Router, ServerState
from prorl_envs.policy.types import ModelClient, Sampled, Sampling


class ModelPool:
    """Spreads sessions over servers. Implements `policy.types.ModelClient`; `routing.decide` has the rules.

    Args:
        connect: makes the client of a server from its URL.
        router: the state of servers and sessions.
        clock: by default the machine's.
    """

    def __init__(
        self,
        connect: Callable[[str], ModelClient],
        *,
        router: Router | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._connect = connect
        self._router = router or Router()
        self._clock = clock or SystemClock()
        self._clients: dict[str, ModelClient] = {}

    @property
    def servers(self) -> tuple[ServerState, ...]:
        """The servers as they are now (copies), in the order they were added."""
        return tuple(replace(server) for server in self._router.servers)

    def add(self, url: str) -> str:
        """Take a server in, at once. Adding one twice changes nothing.

        Returns:
            the server's base URL, as `servers` and trajectories name it.

        Raises:
            InputError: not a URL.
        """
        url = base_url(url)
        if url not in self._clients:
            self._clients[url] = self._connect(url)
        self._router.add(url)
        return url

    async def remove(self, url: str) -> None:
        """Give a server no more turns. Those in flight end in their own time; sessions move elsewhere."""
        url = base_url(url)
        self._router.drain(url)
        await self._close_drained(url)

    async def clear(self) -> None:
        """Remove every server."""
        for server in self.servers:
            await self.remove(server.url)

    def forget(self, session: str) -> None:
        """A session has ended; its pin is given up."""
        self._router.forget(session)

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str) -> Sampled:
        """See `ModelClient.generate`. Where a server is unavailable the turn is sampled on another one.

        Raises:
            ModelError: there is no server, each one is unavailable, or an answer breaks the protocol.
        """
        tried: dict[str, ServerUnavailable] = {}
        while (url := self._router.start(session, self._clock.monotonic(), tried)) is not None:
            try:
                sampled = await self._clients[url].generate(prompt_ids, sampling, session=session)
                self._router.succeeded(url)
                return sampled
            except ServerUnavailable as error:
                self._router.failed(url, self._clock.monotonic())
                tried[url] = error
            finally:
                self._router.end(url)
                await self._close_drained(url)
        if not tried:
            raise ModelError("there is no model server", hint="add one: --llm URL, or POST /v1/model_servers")
        raise list(tried.values())[-1]

    async def aclose(self) -> None:
        """Close every client, those of draining servers included; generations in flight end."""
        for server in self.servers:
            self._router.drain(server.url)
        while self._clients:
            _, client = self._clients.popitem()
            await client.aclose()

    async def _close_drained(self, url: str) -> None:
        if url in self._clients and all(server.url != url for server in self._router.servers):
            await self._clients.pop(url).aclose()
