"""Base classes of model server clients, independent of the protocol."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Required, Unpack

from prorl_envs.model.answer_checks import RequestContract
from prorl_envs.model.http.client import LinkOptions, ModelHttpClient, first_model
from prorl_envs.model.http.event_stream import Events
from prorl_envs.model.types import InFlight, OnPartial, Sampled, Sampling, ServerNews


class LinkedClient:
    """Base of all model server clients: the address and the connections of one server.

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


class TokenOptions(LinkOptions, total=False):
    """Options of `TokenClient`, which describes them, and those of `ModelHttpClient`."""

    stop_ids: Required[Sequence[int]]
    vocab_size: int | None


class TokenClient(LinkedClient, ABC):
    """Client of one server that takes and returns token ids. Implements `ModelClient` and `Streaming`.

    Args:
        url: see `LinkedClient`.
        stop_ids: ids that stop a turn (`TemplateRenderer.stop_ids`).
        vocab_size: ids must be below it; None (the default) skips that check.
        options: options of `ModelHttpClient`.

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

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str) -> Sampled:
        """See `ModelClient.generate`. A cancellation closes the connection, so the server stops sampling.

        Raises:
            ServerUnavailable: no answer within the attempts.
            ProtocolError: the server refuses the request, or its answer breaks the token protocol.
        """
        answer = await self._send(prompt_ids, sampling, session)
        return self._read(answer, self._expected(prompt_ids, sampling))

    async def stream(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str, on_partial: OnPartial
    ) -> Sampled:
        """See `Streaming.stream`.

        Raises:
            ServerUnavailable, ProtocolError: as `generate`.
        """
        events = self._events(on_partial, self._expected(prompt_ids, sampling))
        await self._send(prompt_ids, sampling, session, events)
        return events.whole()

    def _expected(self, prompt_ids: Sequence[int], sampling: Sampling) -> RequestContract:
        """Return the request properties that an answer must match."""
        return RequestContract(prompt_ids, sampling.max_tokens, self._vocab_size, self.url)

    @abstractmethod
    async def _send(
        self, prompt_ids: Sequence[int], sampling: Sampling, session: str, events: Events | None = None
    ) -> bytes:
        """Request a turn. Return the body of the answer; with `events`, which then receive it, return b""."""

    @abstractmethod
    def _read(self, answer: bytes, expected: RequestContract) -> Sampled:
        """Read and check a whole answer."""

    @abstractmethod
    def _events(self, on_partial: OnPartial, expected: RequestContract) -> Events:
        """Return the reader of an answer that arrives as events."""


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
