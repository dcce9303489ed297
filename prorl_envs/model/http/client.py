"""HTTP client of one model server, independent of its protocol.

Connection failures, 429 and 5xx are retried with growing pauses. A refused request or an invalid answer is
not retried, because the result would be the same. Cancelling a request closes its connection, and servers
then stop the generation.
"""

import asyncio
import random
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Protocol, TypedDict
from urllib.parse import quote

import httpx
import msgspec

from prorl_envs.clock import Clock, SystemClock
from prorl_envs.errors import InputError
from prorl_envs.model.answer_checks import (
    Overloaded,
    ProtocolError,
    Refusal,
    RouteRefused,
    ServerUnavailable,
)
from prorl_envs.model.http.http1 import (
    ConnectionBroken,
    HttpAnswer,
    ModelConnection,
    Origin,
    TooLong,
    Unreachable,
    connect,
)

#: Statuses that refuse one request for its content. Every other 4xx refuses the route or the client.
_REQUEST_STATUSES = frozenset({400, 409, 413, 414, 415, 422, 431})


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLimits:
    """Bounds of the connections and requests to a server.

    Args:
        connect_s: seconds to open a connection.
        answer_s: seconds from request to the end of the answer, per attempt.
        control_s: the same for requests other than sampling: health check, pause, resume.
        attempts: most attempts of one request.
        backoff_s: seconds before the second attempt; doubles each time, with jitter.
        max_backoff_s: longest pause, also if the server requests a longer one with Retry-After.
        max_body_bytes: most bytes of an answer.
        max_connections: most connections to the server at once.
        idle_s: seconds after which an idle connection is not reused: less than the 5 s after which uvicorn
            closes it.
    """

    connect_s: float = 10.0
    answer_s: float = 1800.0
    control_s: float = 30.0
    attempts: int = 4
    backoff_s: float = 0.5
    max_backoff_s: float = 15.0
    max_body_bytes: int = 64 * 2**20
    max_connections: int = 2048
    idle_s: float = 4.0


@dataclass(frozen=True, slots=True)
class _Failed:
    """A failed attempt that may be retried: its error, and the pause that the server requested."""

    error: ServerUnavailable
    pause_s: float | None = None


class Listener(Protocol):
    """Receiver of an answer's body while it arrives."""

    def begin(self) -> None:
        """Start an attempt; data of earlier attempts is void."""
        ...

    def feed(self, data: bytes) -> bool:
        """Receive more of the body; return False if it is too much. Must not raise."""
        ...


class LinkOptions(TypedDict, total=False):
    """Options of `ModelHttpClient`, for clients that pass them on."""

    api_key: str | None
    ca_file: Path | None
    limits: ClientLimits
    clock: Clock | None
    jitter: Callable[[], float]


class ModelHttpClient:
    """HTTP client that sends requests to one server and reads complete answers.

    Args:
        url: base URL, with or without `/v1`.
        api_key: sent as a bearer token.
        ca_file: certificates (PEM) of the authorities to trust; None trusts the public ones.
        limits: times and sizes.
        clock: of timeouts and pauses; by default the machine's.
        jitter: source of a number in [0, 1), spreads retries out.

    Raises:
        InputError: the URL is not one, the key cannot be sent, or the CA file cannot be used.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        ca_file: Path | None = None,
        limits: ClientLimits = ClientLimits(),
        clock: Clock | None = None,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self.url = base_url(url)
        #: Number of overload answers of the server.
        self.complaints = 0
        self._limits = limits
        self._clock = clock or SystemClock()
        self._jitter = jitter
        headers = {"accept-encoding": "identity", "content-type": "application/json"}
        if api_key:
            headers["authorization"] = f"Bearer {api_key}"
        self._origin = Origin(self.url, headers, ca_file)
        self._free = asyncio.Semaphore(limits.max_connections)
        self._busy: set[ModelConnection] = set()
        self._idle: deque[ModelConnection] = deque()  # most recently used at the right
        self._closed = False

    async def aclose(self) -> None:
        """Close the connections; requests in flight fail."""
        self._closed = True
        for connection in (*self._busy, *self._idle):
            connection.abort()
        await asyncio.sleep(0)  # the event loop closes the sockets in its next iteration

    async def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
        heard: Listener | None = None,
        *,
        final: str = "",
    ) -> bytes:
        """Return the body of a successful answer.

        Args:
            method, path: of the request; the path starts with `/`.
            body: JSON.
            headers: further headers.
            heard: receives a successful answer as it arrives; the returned body is then empty.
            final: text in an error message that rules out a retry.

        Raises:
            ServerUnavailable: no answer within the attempts.
            ProtocolError: the server refuses the request (`Refusal`) or its route (`RouteRefused`), or sends
                too much.
        """
        attempt = 1
        while isinstance(outcome := await self._attempt(method, path, body, headers, heard=heard), _Failed):
            if attempt >= self._limits.attempts or (final and final in outcome.error.message):
                raise outcome.error
            grown = self._limits.backoff_s * 2 ** (attempt - 1) * (0.5 + self._jitter())
            asked = grown if outcome.pause_s is None else outcome.pause_s
            await self._clock.sleep(min(asked, self._limits.max_backoff_s))
            attempt += 1
        return outcome

    async def ask(self, method: str, path: str, body: bytes | None = None) -> bytes:
        """Send as `request` does: once, with a short timeout, also if every connection is sampling."""
        outcome = await self._attempt(method, path, body, None, control=True)
        if isinstance(outcome, _Failed):
            raise outcome.error
        return outcome

    async def tell(self, path: str, body: object = None) -> bool:
        """Post `body` as JSON, as `ask` does; return False if the server has no such route."""
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
        heard: Listener | None = None,
    ) -> bytes | _Failed:
        seconds = self._limits.control_s if control else self._limits.answer_s
        try:
            async with self._clock.timeout(seconds):
                answer = await self._exchange(
                    method, path, body or b"", headers, control=control, heard=heard
                )
        except TimeoutError as error:
            raise self._unavailable(f"did not answer within {seconds:g} s") from error
        except Unreachable as error:
            return _Failed(self._unavailable(str(error)))
        except ConnectionBroken as error:
            return _Failed(self._unavailable(f"broke the connection: {error}"))
        except TooLong as error:
            raise ProtocolError(f"{self.url} sent more than {self._limits.max_body_bytes} bytes") from error
        return self._judge(answer)

    async def _exchange(
        self,
        method: str,
        path: str,
        body: bytes,
        headers: dict[str, str] | None,
        *,
        control: bool,
        heard: Listener | None,
    ) -> HttpAnswer:
        head = self._origin.head(method, path, len(body), headers)
        async with nullcontext() if control else self._free:
            if self._closed:
                raise self._unavailable("is no longer in use")
            connection = self._reuse() or await self._connect()
            self._busy.add(connection)
            if heard is not None:
                heard.begin()
            try:
                return await connection.exchange(
                    head, body, max_body=self._limits.max_body_bytes, heard=heard.feed if heard else None
                )
            finally:
                self._busy.discard(connection)
                if connection.usable:
                    connection.idle_since = self._clock.monotonic()
                    self._idle.append(connection)

    def _reuse(self) -> ModelConnection | None:
        """Return the last used idle connection, or None. Close connections that were idle for too long."""
        oldest = self._clock.monotonic() - self._limits.idle_s
        while self._idle and self._idle[0].idle_since < oldest:
            self._idle.popleft().abort()
        while self._idle:
            if (connection := self._idle.pop()).usable:
                return connection
        return None

    async def _connect(self) -> ModelConnection:
        connection = await connect(self._origin, seconds=self._limits.connect_s)
        if self._closed:  # closed while connecting
            connection.abort()
            raise self._unavailable("is no longer in use")
        return connection

    def _judge(self, answer: HttpAnswer) -> bytes | _Failed:
        encoding = answer.headers.get(b"content-encoding", b"identity")
        if encoding.lower() != b"identity":
            raise ProtocolError(f"{self.url} sent its answer encoded, and was asked not to")
        if answer.status == HTTPStatus.OK:
            return answer.body
        message = f"{self.url} answered {answer.status}: {_server_message(answer.body)}"
        if answer.status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE):
            self.complaints += 1
            return _Failed(Overloaded(message), _retry_after(answer))
        if answer.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            return _Failed(ServerUnavailable(message), _retry_after(answer))
        kind = Refusal if answer.status in _REQUEST_STATUSES else RouteRefused
        raise kind(message, hint=_hint(answer.status), status=answer.status)

    def _unavailable(self, what: str) -> ServerUnavailable:
        return ServerUnavailable(f"the model server {self.url} {what}", hint="is it up, and the URL right?")


class NamedModel(msgspec.Struct):
    """A model in the list of `/v1/models`."""

    id: str
    owned_by: str = ""


class _Models(msgspec.Struct):
    data: list[NamedModel]


def first_model(body: bytes, server: str) -> NamedModel:
    """Return the first model in a server's `/v1/models`.

    Raises:
        ProtocolError: the list is empty or invalid.
    """
    try:
        models = msgspec.json.decode(body, type=_Models).data
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ProtocolError(f"{server}/v1/models is not a list of models: {error}") from error
    if not models:
        raise ProtocolError(f"{server} serves no model", hint="is a model still being loaded?")
    return models[0]


def session_headers(session: str) -> dict[str, str]:
    """Return the header by which routers in front of servers group the requests of a session."""
    return {"x-session-id": quote(session, safe="/:")}


def base_url(url: str) -> str:
    """Return the server's base URL without a trailing `/` or `/v1`.

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
    """Return the server's error message, shortened, in any format."""
    try:
        text = msgspec.json.decode(content, type=_ErrorBody).error.message
    except (msgspec.MsgspecError, UnicodeDecodeError):
        text = content[:2000].decode("utf-8", "replace")
    return text[:500].strip() or "(no message)"


def _retry_after(answer: HttpAnswer) -> float | None:
    value = answer.headers.get(b"retry-after", b"")
    return float(value) if value.isdigit() and len(value) < 8 else None


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
