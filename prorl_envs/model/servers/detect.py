"""Protocol of the model server at a URL: named in the URL, or detected by requests.

`sglang+http://host:30000` names the protocol; a bare URL has the default one. `auto` distinguishes vLLM,
SGLang and llama.cpp. It never selects a server that returns no token ids: that less capable mode must be
requested (`openai`).
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Unpack, get_args

from prorl_envs.errors import InputError, ModelError
from prorl_envs.model.answer_checks import NotAModelServer, ProtocolError, Refusal, RouteRefused
from prorl_envs.model.http.client import LinkOptions, ModelHttpClient, base_url, first_model
from prorl_envs.model.servers.base import TokenOptions
from prorl_envs.model.servers.chat import OpenAIChatClient
from prorl_envs.model.servers.llamacpp import LlamaCppClient
from prorl_envs.model.servers.sglang import SglangClient, read_info
from prorl_envs.model.servers.vllm import VllmClient
from prorl_envs.model.tokens.rendering import TemplateRenderer
from prorl_envs.model.types import InFlight, ModelClient, OnPartial, Sampled, Sampling, ServerNews

Protocol = Literal["auto", "vllm", "sglang", "llamacpp", "openai"]
PROTOCOLS: tuple[str, ...] = get_args(Protocol)
type DetectedClient = VllmClient | SglangClient | LlamaCppClient


def split_protocol(url: str) -> tuple[str, str]:
    """Return the protocol that a URL names ("" for none) and the server's base URL.

    Raises:
        InputError: the URL is invalid, or its protocol is unknown.
    """
    scheme, separator, rest = url.partition("://")
    name, plus, transport = scheme.partition("+")
    if not plus:
        return "", base_url(url)
    if name not in PROTOCOLS:
        raise InputError(
            f"{name[:40]!r} is not a protocol of model servers", hint=f"known: {', '.join(PROTOCOLS)}"
        )
    return name, base_url(f"{transport}{separator}{rest}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Servers:
    """Factory of clients for the servers of one model.

    Args:
        stop_ids, vocab_size: see `VllmClient`.
        encode: see `OpenAIChatClient`; None disables the less capable mode.
        protocol: protocol of URLs that name none.
        model: model name; None takes the first in the server's list.
        options: options of `ModelHttpClient`.
    """

    stop_ids: Sequence[int] = ()
    vocab_size: int | None = None
    encode: Callable[[Mapping[str, Any]], list[int]] | None = None
    protocol: Protocol = "auto"
    model: str | None = None
    options: LinkOptions = field(default_factory=LinkOptions)

    @classmethod
    def of(
        cls,
        renderer: TemplateRenderer,
        *,
        protocol: Protocol = "auto",
        model: str | None = None,
        **options: Unpack[LinkOptions],
    ) -> "Servers":
        """Return the factory for the model whose tokenizer and chat template the renderer has."""
        return cls(
            stop_ids=renderer.stop_ids,
            vocab_size=renderer.vocab_size,
            encode=renderer.assistant,
            protocol=protocol,
            model=model,
            options=options,
        )

    def connect(self, url: str) -> ModelClient:
        """Return the client of the server at a URL, which may name its protocol.

        Raises:
            InputError: the URL is invalid, or its protocol is unknown.
        """
        url_protocol, base = split_protocol(url)
        return self.client(url_protocol or self.protocol, base)

    def client(self, protocol: str, url: str) -> ModelClient:
        """Return the client of a server with this protocol.

        Raises:
            InputError: the protocol is `openai`, and there is no tokenizer.
        """
        match protocol:
            case "vllm" | "sglang" | "llamacpp":
                return self.token_client(protocol, url)
            case "openai" if self.encode is not None:
                return OpenAIChatClient(url, encode=self.encode, model=self.model, **self.options)
            case "openai":
                raise InputError("a server without token ids needs a tokenizer", hint="name it: --tokenizer")
            case _:
                return AutoClient(url, self.token_client, self.options)

    def token_client(self, protocol: str, url: str) -> DetectedClient:
        """Return the client of a server with this protocol, one of those that `detect` returns."""
        options = TokenOptions(stop_ids=self.stop_ids, vocab_size=self.vocab_size, **self.options)
        match protocol:
            case "sglang":
                return SglangClient(url, **options)
            case "llamacpp":
                return LlamaCppClient(url, **options)
            case _:
                return VllmClient(url, model=self.model, **options)


async def detect(link: ModelHttpClient) -> str:
    """Return the protocol of a server; "vllm" for a server that is compatible with vLLM.

    Raises:
        ServerUnavailable: no answer.
        NotAModelServer: the URL is not that of a supported model server.
    """
    try:
        return await _detected(link)
    except RouteRefused:
        raise
    except ProtocolError as error:
        raise NotAModelServer(error.message, hint=error.hint) from error


async def _detected(link: ModelHttpClient) -> str:
    try:
        model = first_model(await link.request("GET", "/v1/models"), link.url)
    except Refusal as error:
        if not error.unknown_route:
            raise
    else:
        return model.owned_by if model.owned_by in ("sglang", "llamacpp") else "vllm"
    try:
        read_info(await link.request("GET", "/get_model_info"), link.url)
    except Refusal as error:
        hint = "it has neither /v1/models nor /get_model_info; wrong base URL?"
        raise ProtocolError(f"{link.url} is not a supported model server", hint=hint) from error
    return "sglang"


class AutoClient:
    """Client that detects the protocol at its first use. Implements `ModelClient`, `Streaming` and
    `ControllableServer`.

    Args:
        url: base URL.
        client: makes the client from protocol and base URL, once the protocol is known.
        options: options of `ModelHttpClient`.
    """

    def __init__(
        self,
        url: str,
        client: Callable[[str, str], DetectedClient],
        options: LinkOptions,
    ) -> None:
        self.url = base_url(url)
        self._link = ModelHttpClient(url, **options)
        self._make = client
        self._client: DetectedClient | None = None
        self._detecting = asyncio.Lock()
        self._failures = 0
        self._failure: ModelError | None = None

    @property
    def protocol(self) -> str:
        """Protocol of the server; "" before it is known."""
        return self._client.protocol if self._client else ""

    @property
    def complaints(self) -> int:
        """See `ControllableServer.complaints`."""
        return self._client.complaints if self._client else 0

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str) -> Sampled:
        """See `ModelClient.generate`."""
        return await (await self._detected_client()).generate(prompt_ids, sampling, session=session)

    async def stream(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str, on_partial: OnPartial
    ) -> Sampled:
        """See `Streaming.stream`."""
        client = await self._detected_client()
        return await client.stream(prompt_ids, sampling, session=session, on_partial=on_partial)

    async def look(self) -> ServerNews:
        """See `ControllableServer.look`."""
        return await (await self._detected_client()).look()

    async def pause(self, mode: InFlight) -> bool:
        """See `ControllableServer.pause`."""
        return await (await self._detected_client()).pause(mode)

    async def resume(self, weight_version: str) -> bool:
        """See `ControllableServer.resume`."""
        return await (await self._detected_client()).resume(weight_version)

    async def aclose(self) -> None:
        """Close the connections; this stops generations in flight."""
        await self._link.aclose()
        if self._client is not None:
            await self._client.aclose()

    async def _detected_client(self) -> DetectedClient:
        failures = self._failures
        async with self._detecting:  # concurrent first turns share one detection and its failure
            if self._client is None:
                if self._failure is not None and self._failures > failures:
                    raise self._failure
                try:
                    self._client = self._make(await detect(self._link), self.url)
                except ModelError as error:
                    self._failures, self._failure = self._failures + 1, error
                    raise
        return self._client
