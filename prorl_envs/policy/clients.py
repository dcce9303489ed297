"""What clients of model servers have in common, whatever they speak."""

from collections.abc import Sequence
from typing import Unpack

from prorl_envs.policy.link import LinkOptions, ServerLink, first_model
from prorl_envs.policy.protocol import Expectation
from prorl_envs.policy.types import InFlight, Sampling, ServerNews


class LinkedClient:
    """A client of one server.

    Args:
        url: base URL, with or without `/v1`.
        options: of `ServerLink`.

    Raises:
        InputError: the URL is not one.
    """

    def __init__(self, url: str, **options: Unpack[LinkOptions]) -> None:
        self._link = ServerLink(url, **options)
        self.url = self._link.url

    @property
    def complaints(self) -> int:
        """See `Steerable.complaints`."""
        return self._link.complaints

    async def aclose(self) -> None:
        """Close the connections; generations in flight end."""
        await self._link.aclose()


class TokenClient(LinkedClient):
    """A client of one server that takes token ids and gives them.

    Args:
        url, options: of `LinkedClient`.
        stop_ids: ids that end a turn (`Renderer.stop_ids`).
        vocab_size: ids must lie below; None skips that check.

    Raises:
        InputError: the URL is not one.
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

    def _expected(self, prompt_ids: Sequence[int], sampling: Sampling) -> Expectation:
        """What an answer is held against."""
        return Expectation(prompt_ids, sampling.max_tokens, self._vocab_size, self.url)


class Unsteered(LinkedClient):
    """`Steerable`, as far as a server goes that can neither be paused nor named a version of weights."""

    async def look(self) -> ServerNews:
        """See `Steerable.look`."""
        return ServerNews(first_model(await self._link.ask("GET", "/v1/models"), self.url).id)

    async def pause(self, mode: InFlight) -> bool:
        """See `Steerable.pause`: there is no such route."""
        return False

    async def resume(self, weight_version: str) -> bool:
        """See `Steerable.resume`: there is no such route."""
        return False
