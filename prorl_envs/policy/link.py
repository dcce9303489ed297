"""The HTTP conversation with one model server, whatever it speaks.

Connection failures, 429 and 5xx are tried again with growing pauses; a refused request or a wrong answer is
not, as it would come back the same. Cancelling a request closes its connection, and servers end the
generation then.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import TypedDict
from urllib.parse import quote

import httpx
import msgspec

from prorl_envs.clock import Clock, SystemClock
from prorl_envs.errors import InputError
from prorl_envs.policy.protocol import Overloaded, ProtocolError, Refusal, ServerUnavailable


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLimits:
    """Bounds of the conversation with a server.

    Args:
        connect_s: seconds to open a connection.
        answer_s: seconds from request to the end of the answer, per attempt.
        control_s: the same for what is asked beside the sampling: how it is, pause, resume.
        attempts: most tries of one request.
        backoff_s: seconds before the second try; doubles each time, with jitter.
        max_backoff_s: longest pause, also where the server asks for more by Retry-After.
        max_body_bytes: most bytes of an answer.
        max_connections: most connections to the server at once.
    """

    connect_s: float = 10.0
    answer_s: float = 1800.0
    control_s: float = 30.0
    attempts: int = 4
    backoff_s: float = 0.5
    max_backoff_s: float = 15.0
    max_body_bytes: int = 64 * 2**20
    max_connections: int = 2048


@dataclass(frozen=True, slots=True)
class _Failed:
    """An attempt worth repeating: the error if it was the last, and the pause the server asked for."""

    error: ServerUnavailable
    pause_s: float | None = None


class LinkOptions(TypedDict, total=False):
    """The options of `ServerLink`, for clients that pass them on."""

    api_key: str | None
    limits: ClientLimits
    clock: Clock | None
    jitter: Callable[[], float]


class ServerLink:
    """Sends requests to one server and reads whole answers.

    Args:
        url: base URL, with or without `/v1`.
        api_key: sent as a bearer token.
        limits: times and sizes.
        clock: of timeouts and pauses; by default the machine's.
        jitter: source of a number in [0, 1), spreads retries out.

    Raises:
        InputError: the URL is not one.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        limits: ClientLimits = ClientLimits(),
        clock: Clock | None = None,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self.url = base_url(url)
        #: How often the server said that it has too much to do.
        self.complaints = 0
        self._limits = limits
        self._clock = clock or SystemClock()
        self._jitter = jitter
        self._headers = {"accept-encoding": "identity", "content-type": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._tls = httpx.create_ssl_context(trust_env=False)
        self._free = asyncio.Semaphore(limits.max_connections)
        self._connections: list[httpx.AsyncClient] = []
        self._idle: list[httpx.AsyncClient] = []
        self._closed = False

    async def aclose(self) -> None:
        """Close the connections; requests in flight end."""
        self._closed = True
        while self._connections:
            await self._connections.pop().aclose()

    async def request(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> bytes:
        """The body of a successful answer.

        Args:
            method, path: of the request; the path begins with `/`.
            body: JSON.
            headers: further ones.

        Raises:
            ServerUnavailable: no answer within the attempts.
            ProtocolError: the server refuses the request (`Refusal`), or sends too much.
        """
        attempt = 1
        while isinstance(outcome := await self._attempt(method, path, body, headers), _Failed):
            if attempt >= self._limits.attempts:
                raise outcome.error
            grown = self._limits.backoff_s * 2 ** (attempt - 1) * (0.5 + self._jitter())
            asked = grown if outcome.pause_s is None else outcome.pause_s
            await self._clock.sleep(min(asked, self._limits.max_backoff_s))
            attempt += 1
        return outcome

    async def ask(self, method: str, path: str, body: bytes | None = None) -> bytes:
        """As `request`, once and soon, and also when every connection is sampling."""
        outcome = await self._attempt(method, path, body, None, control=True)
        if isinstance(outcome, _Failed):
            raise outcome.error
        return outcome

    async def tell(self, path: str, body: object = None) -> bool:
        """Post `body` as JSON, as `ask` does; False where the server knows no such route."""
        try:
            await self.ask("POST", path, None if body is None else msgspec.json.encode(body))
        except Refusal as error:
            if error.unknown_route:
                return False
            raise
        return True

    async def _attempt(
        self,
        method: str,
        path: str,
        body: bytes | None,
        headers: dict[str, str] | None,
        *,
        control: bool = False,
    ) -> bytes | _Failed:
        seconds = self._limits.control_s if control else self._limits.answer_s
        try:
            # httpx bounds each read; a server that drips one byte a minute is bounded here.
            async with self._clock.timeout(seconds):
                return await self._exchange(method, path, body, headers, control=control)
        except (TimeoutError, httpx.TimeoutException) as error:
            if isinstance(error, httpx.ConnectTimeout):
                return _Failed(self._unavailable("does not accept connections"))
            raise self._unavailable(f"did not answer within {seconds:g} s") from error
        except httpx.ConnectError as error:
            return _Failed(self._unavailable(f"cannot be reached: {error}"))
        except httpx.TransportError as error:
            return _Failed(self._unavailable(f"broke the connection: {type(error).__name__}"))

    async def _exchange(
        self, method: str, path: str, body: bytes | None, headers: dict[str, str] | None, *, control: bool
    ) -> bytes | _Failed:
        async with (
            self._connection(nullcontext() if control else self._free) as http,
            http.stream(method, self.url + path, content=body, headers=headers) as response,
        ):
            content = await self._read(response)
            status = response.status_code
            if status == httpx.codes.OK:
                return content
            message = f"{self.url} answered {status}: {_server_message(content)}"
            if status in (httpx.codes.TOO_MANY_REQUESTS, httpx.codes.SERVICE_UNAVAILABLE):
                self.complaints += 1
                return _Failed(Overloaded(message), _retry_after(response))
            if status >= 500:
                return _Failed(ServerUnavailable(message), _retry_after(response))
            raise Refusal(message, hint=_hint(status), status=status)

    @asynccontextmanager
    async def _connection(
        self, permit: AbstractAsyncContextManager[None]
    ) -> AsyncIterator[httpx.AsyncClient]:
        """A connection that nobody else uses, the one used last if there is one.

        Each has a client of its own: the pool within httpx looks at every pair of its connections at every
        request (256 idle ones cost 5 ms a request), and keeps none once it has more than it may keep idle.
        """
        async with permit:
            if self._closed:
                raise self._unavailable("is no longer in use")
            http = self._idle.pop() if self._idle else self._connect()
            try:
                yield http
            finally:
                self._idle.append(http)

    def _connect(self) -> httpx.AsyncClient:
        http = httpx.AsyncClient(
            headers=self._headers,
            timeout=httpx.Timeout(self._limits.answer_s, connect=self._limits.connect_s),
            limits=httpx.Limits(max_connections=1),
            verify=self._tls,
            trust_env=False,  # ids go where the caller says, never through a proxy from the environment
        )
        self._connections.append(http)
        return http

    async def _read(self, response: httpx.Response) -> bytes:
        content = bytearray()
        async for chunk in response.aiter_bytes():
            content += chunk
            if len(content) > self._limits.max_body_bytes:
                raise ProtocolError(f"{self.url} sent more than {self._limits.max_body_bytes} bytes")
        return bytes(content)

    def _unavailable(self, what: str) -> ServerUnavailable:
        return ServerUnavailable(f"the model server {self.url} {what}", hint="is it up, and the URL right?")


class NamedModel(msgspec.Struct):
    """A model as `/v1/models` lists it."""

    id: str
    owned_by: str = ""


class _Models(msgspec.Struct):
    data: list[NamedModel]


def first_model(body: bytes, server: str) -> NamedModel:
    """The first model a server names in `/v1/models`.

    Raises:
        ProtocolError: it names none.
    """
    try:
        models = msgspec.json.decode(body, type=_Models).data
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ProtocolError(f"{server}/v1/models is not a list of models: {error}") from error
    if not models:
        raise ProtocolError(f"{server} serves no model", hint="is a model still being loaded?")
    return models[0]


def session_headers(session: str) -> dict[str, str]:
    """What tells routers in front of servers which requests belong together."""
    return {"x-session-id": quote(session, safe="/:")}


def base_url(url: str) -> str:
    """The server's base URL without a trailing `/` or `/v1`.

    Raises:
        InputError: not an http or https URL.
    """
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise InputError(f"{url!r} is not a URL: {error}") from error
    port_exists = parsed.port is None or 0 < parsed.port < 2**16
    if parsed.scheme not in ("http", "https") or not parsed.host or not port_exists:
        raise InputError(f"{url!r} is not the URL of a model server", hint="such as http://127.0.0.1:8000/v1")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


class _ErrorDetail(msgspec.Struct):
    message: str


class _ErrorBody(msgspec.Struct):
    error: _ErrorDetail


def _server_message(content: bytes) -> str:
    """What the server says is wrong, shortened, in any form."""
    try:
        text = msgspec.json.decode(content, type=_ErrorBody).error.message
    except (msgspec.MsgspecError, UnicodeDecodeError):
        text = content[:2000].decode("utf-8", "replace")
    return text[:500].strip() or "(no message)"


def _retry_after(response: httpx.Response) -> float | None:
    value = response.headers.get("retry-after", "")
    return float(value) if value.isascii() and value.isdigit() and len(value) < 8 else None


def _hint(status: int) -> str:
    match status:
        case 400 | 413 | 422:
            return "often the context: lower limits.max_tokens or raise the server's --max-model-len"
        case 401 | 403:
            return "the server wants an API key"
        case 404:
            return "wrong base URL, or a model name the server does not serve"
        case _:
            return ""
