"""HTTP client of one model server, independent of its protocol.

Connection failures, 429 and 5xx are retried with growing pauses. A refused request or an invalid answer is
not retried, because the result would be the same. Cancelling a request closes its connection, and servers
then stop the generation.
"""

import asyncio
import random
from base64 import b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from io import BytesIO
from pathlib import Path
from typing import TypedDict
from urllib.parse import quote, unquote

import aiohttp
import httpx
import msgspec
import yarl

from prorl_envs.clock import Clock, SystemClock
from prorl_envs.errors import InputError
from prorl_envs.model.answer_checks import (
    Overloaded,
    ProtocolError,
    Refusal,
    RouteRefused,
    ServerUnavailable,
    decoded,
)
from prorl_envs.model.http.event_stream import Events
from prorl_envs.model.http.tls import client_tls

#: Bodies of at least this many bytes are sent in pieces, so that the event loop runs in between.
_LARGE = 2**20
#: Seconds without data after which the client checks whether the connection is still open.
_CHECK_S = 1.0
#: Statuses that refuse one request for its content. Every other 4xx refuses the route or the client.
_REQUEST_STATUSES = frozenset({400, 409, 413, 414, 415, 422, 431})


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLimits:
    """Bounds of the connections and requests to a server.

    Args:
        connect_s: timeout of opening a connection, in seconds.
        answer_s: seconds from request to the end of the answer, per attempt.
        control_s: the same for control requests: health check, pause, resume.
        attempts: maximum attempts of one request.
        backoff_s: seconds before the second attempt; doubles each time, with jitter.
        max_backoff_s: maximum pause, even if the server requests a longer pause with Retry-After.
        max_body_bytes: maximum bytes of an answer.
        max_connections: maximum concurrent connections for sampling.
        idle_s: seconds after which an idle connection is not reused. uvicorn closes it after 5 s.
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
    """A failed attempt that may be retried: its error, and the pause if the server requested one."""

    error: ServerUnavailable
    pause_s: float | None = None


@dataclass(frozen=True, slots=True)
class _Answer:
    """A complete answer; the body is empty if a listener received it."""

    status: int
    headers: Mapping[str, str]
    body: bytes


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
        clock: clock of timeouts and pauses; by default the machine's.
        jitter: returns a random number in [0, 1), which spreads retries.

    Raises:
        InputError: the URL is invalid, the key cannot be sent, or the CA file cannot be used.
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
        parsed = httpx.URL(self.url)
        if parsed.userinfo:
            credentials = b64encode(unquote(parsed.userinfo.decode()).encode()).decode()
            headers["authorization"] = f"Basic {credentials}"
        self._headers = checked_headers(headers)
        self._base = str(parsed.copy_with(username=None, password=None)).rstrip("/")
        self._tls = client_tls(ca_file) if parsed.scheme == "https" else True
        self._sessions: dict[bool, aiohttp.ClientSession] = {}
        self._closed = False

    async def aclose(self) -> None:
        """Close the connections; requests in flight fail."""
        self._closed = True
        for session in self._sessions.values():
            await session.close()

    async def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
        listener: Events | None = None,
        *,
        final: str = "",
    ) -> bytes:
        """Return the body of a successful answer.

        Args:
            method, path: method and path of the request; the path starts with `/`.
            body: JSON.
            headers: further headers.
            listener: receives a successful answer while it arrives; the returned body is then empty.
            final: text of an error message that rules out a retry.

        Raises:
            ServerUnavailable: no answer within the attempts.
            ProtocolError: the server refuses the request (`Refusal`) or its route (`RouteRefused`), or sends
                too much.
        """
        attempt = 1
        while isinstance(
            outcome := await self._attempt(method, path, body, headers, listener=listener), _Failed
        ):
            if attempt >= self._limits.attempts or (final and final in outcome.error.message):
                raise outcome.error
            grown = self._limits.backoff_s * 2 ** (attempt - 1) * (0.5 + self._jitter())
            asked = grown if outcome.pause_s is None else outcome.pause_s
            await self._clock.sleep(min(asked, self._limits.max_backoff_s))
            attempt += 1
        return outcome

    async def ask(self, method: str, path: str, body: bytes | None = None) -> bytes:
        """Send a control request: one attempt, with a short timeout, even if all connections are in use."""
        outcome = await self._attempt(method, path, body, None, control=True)
        if isinstance(outcome, _Failed):
            raise outcome.error
        return outcome

    async def post(self, path: str, body: object = None) -> bool:
        """Post `body` as JSON in a control request; return False if the server has no such route."""
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
        listener: Events | None = None,
    ) -> bytes | _Failed:
        seconds = self._limits.control_s if control else self._limits.answer_s
        try:
            async with self._clock.timeout(seconds):
                answer = await self._exchange(method, path, body, headers, control=control, listener=listener)
        except aiohttp.ServerTimeoutError:  # also a TimeoutError
            return _Failed(self._unavailable("does not accept connections"))
        except TimeoutError as error:
            raise self._unavailable(f"did not answer within {seconds:g} s") from error
        except aiohttp.ClientConnectorCertificateError as error:
            reason = getattr(error.certificate_error, "verify_message", error.certificate_error)
            problem = f"has no certificate of a trusted authority: {reason}"
            return _Failed(self._unavailable(f"{problem} (model.ca_file names a private authority)"))
        except aiohttp.ClientConnectorError as error:
            return _Failed(self._unavailable(f"cannot be reached: {error.os_error}"))
        except UnicodeError as error:  # invalid host name
            return _Failed(self._unavailable(f"cannot be reached: {error}"))
        except (aiohttp.ClientError, OSError) as error:
            if self._closed:
                raise self._unavailable("is no longer in use") from error
            reason = getattr(error, "message", "") or str(error) or type(error).__name__
            return _Failed(self._unavailable(f"broke the connection: {reason}"))
        return self._judge(answer)

    async def _exchange(
        self,
        method: str,
        path: str,
        body: bytes | None,
        headers: dict[str, str] | None,
        *,
        control: bool,
        listener: Events | None,
    ) -> _Answer:
        if self._closed:
            raise self._unavailable("is no longer in use")
        url = yarl.URL(f"{self._base}{path}", encoded=True)
        further = checked_headers(headers or {})
        if listener is not None:
            listener.begin()
        data = BytesIO(body) if body is not None and len(body) >= _LARGE else body
        # Leaving the block before the end of the answer closes the connection, and the server stops sampling.
        async with self._session(control).request(
            method, url, data=data or None, headers=further, allow_redirects=False
        ) as response:
            content = bytearray()
            streamed = listener if response.status == HTTPStatus.OK else None
            while part := await _next_part(response):
                if streamed is not None:
                    too_much = not streamed.feed(part)
                else:
                    content += part
                    too_much = len(content) > self._limits.max_body_bytes
                if too_much:
                    raise ProtocolError(f"{self.url} sent more than {self._limits.max_body_bytes} bytes")
            return _Answer(response.status, response.headers, bytes(content))

    def _session(self, control: bool) -> aiohttp.ClientSession:
        """Return the session for sampling requests, or for control requests, which never wait for a free
        connection. A session is created at first use, because it belongs to the running event loop."""
        if control not in self._sessions:
            limit = 0 if control else self._limits.max_connections
            self._sessions[control] = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=limit, keepalive_timeout=self._limits.idle_s, ssl=self._tls
                ),
                headers=self._headers,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._limits.connect_s),
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._sessions[control]

    def _judge(self, answer: _Answer) -> bytes | _Failed:
        if answer.headers.get("content-encoding", "identity").lower() != "identity":
            raise ProtocolError(f"{self.url} sent an encoded answer, although only identity was accepted")
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

    def _unavailable(self, problem: str) -> ServerUnavailable:
        return ServerUnavailable(
            f"the model server {self.url} {problem}", hint="is it up, and the URL right?"
        )


async def _next_part(response: aiohttp.ClientResponse) -> bytes:
    """Return more of an answer's body, or b"" at its end.

    Raises:
        aiohttp.ClientError: the connection closed before the end.
    """
    while True:
        try:
            async with asyncio.timeout(_CHECK_S):
                return await response.content.readany()
        except TimeoutError:
            if response.content.is_eof():  # the end arrived together with the timeout
                continue
            # aiohttp 3.14 closes the connection after a malformed chunk, but its reader keeps waiting.
            connection = response.connection
            if connection is None or connection.transport is None or connection.transport.is_closing():
                raise aiohttp.ClientPayloadError("the answer is malformed") from None


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
    models = decoded(body, _Models, f"{server}/v1/models is not a list of models").data
    if not models:
        raise ProtocolError(f"{server} serves no model", hint="is a model still being loaded?")
    return models[0]


def checked_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return `headers` if they can be sent.

    Raises:
        InputError: a value has characters other than printable ASCII.
    """
    for name, value in headers.items():
        if not (value.isascii() and value.isprintable()):
            raise InputError(f"the header {name} can only have printable ASCII characters")
    return dict(headers)


def session_headers(session: str) -> dict[str, str]:
    """Return the header that lets a router in front of servers recognise the requests of a session."""
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
    """Return the error message of an answer in any format, shortened."""
    try:
        text = decoded(content, _ErrorBody, "").error.message
    except ProtocolError:
        text = content[:2000].decode("utf-8", "replace")
    return text[:500].strip() or "(no message)"


def _retry_after(answer: _Answer) -> float | None:
    value = answer.headers.get("retry-after", "")
    return float(value) if value.isascii() and value.isdigit() and len(value) < 8 else None


def _hint(status: int) -> str:
    match status:
        case 400 | 413 | 422:
            return (
                "often the context is too long: lower limits.max_tokens or raise the server's --max-model-len"
            )
        case 401 | 403:
            return "the server requires an API key"
        case 404:
            return "wrong base URL, or a model name the server does not serve"
        case _:
            return ""
