"""Base classes of model server clients, independent of the protocol."""

from collections.abc import Sequence
from typing import Unpack

from prorl_envs.model.answer_checks import RequestContract
from prorl_envs.model.http.client import LinkOptions, ModelHttpClient, first_model
from prorl_envs.model.types import InFlight, Sampling, ServerNews


class LinkedClient:
    """Client of one server.

    Args:
        url: base URL, with or without `/v1`.
        options: options of `ModelHttpClient`.

    Raises:
        InputError: the URL is invalid.
    """

    def __init__(self, url: str, **options: Unpack[LinkOptions]) -> None:
        self._link = ModelHttpClient(url, **options)
        self.url = self._link.url

    @property
    def complaints(self) -> int:
        """See `ControllableServer.complaints`."""
        return self._link.complaints

    async def aclose(self) -> None:
        """Close the connections; this stops generations in flight."""
        await self._link.aclose()


class TokenClient(LinkedClient):
    """Client of one server that takes and returns token ids.

    Args:
        url, options: see `LinkedClient`.
        stop_ids: ids that stop a turn (`Renderer.stop_ids`).
        vocab_size: ids must be below it; None skips that check.

    Raises:
        InputError: the URL is invalid.
    """

    def __init__(
        self,
        url: str,
        *,
        stop_ids: Sequence[int],
        vocab_size: int | None = None,
        **options: Unpack[LinkOptions],
    ) -> None:
        super().__init__(url, **options)
        self._stop_ids = tuple(stop_ids)
        self._vocab_size = vocab_size

    def _expected(self, prompt_ids: Sequence[int], sampling: Sampling) -> RequestContract:
        """Return the request properties that an answer must match."""
        return RequestContract(prompt_ids, sampling.max_tokens, self._vocab_size, self.url)


class Unsteered(LinkedClient):
    """Minimal `ControllableServer`, for a server that supports neither pauses nor weight versions."""

    async def look(self) -> ServerNews:
        """See `ControllableServer.look`."""
        return ServerNews(first_model(await self._link.ask("GET", "/v1/models"), self.url).id)

    async def pause(self, mode: InFlight) -> bool:
        """See `ControllableServer.pause`: there is no such route."""
        return False

    async def resume(self, weight_version: str) -> bool:
        """See `ControllableServer.resume`: there is no such route."""
        return False
