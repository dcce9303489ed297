"""What clients of servers have in common that can neither be paused nor named a version of weights."""

from prorl_envs.policy.link import ServerLink, first_model
from prorl_envs.policy.types import InFlight, ServerNews


class Unsteered:
    """`Steerable`, as far as such a server goes.

    Args:
        link: to the server.
    """

    def __init__(self, link: ServerLink) -> None:
        self._link = link
        self.url = link.url

    @property
    def complaints(self) -> int:
        """See `Steerable.complaints`."""
        return self._link.complaints

    async def look(self) -> ServerNews:
        """See `Steerable.look`."""
        return ServerNews(first_model(await self._link.ask("GET", "/v1/models"), self.url).id)

    async def pause(self, mode: InFlight) -> bool:
        """See `Steerable.pause`: there is no such route."""
        return False

    async def resume(self, weight_version: str) -> bool:
        """See `Steerable.resume`: there is no such route."""
        return False

    async def aclose(self) -> None:
        """Close the connections; generations in flight end."""
        await self._link.aclose()
