"""Model servers that come and go while the service runs."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from prorl_envs.policy.types import ModelClient
from prorl_envs.rollout.views import ModelServerView


@runtime_checkable
class ModelServers(ModelClient, Protocol):
    """A `ModelClient` over a set of servers that can change."""

    def servers(self) -> Sequence[ModelServerView]: ...

    async def add_server(self, url: str) -> None:
        """Offer a further server to new sessions. Adding one again changes nothing.

        Raises:
            InputError: the URL is not one.
        """
        ...

    async def remove_server(self, url: str) -> bool:
        """Take a server away; False where it was not there. Sessions on it go on elsewhere."""
        ...
