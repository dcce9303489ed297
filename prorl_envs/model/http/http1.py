"""HTTP/1.1 client for model servers: one request, one complete answer, on a connection of its own.

A general client costs 0.5 to 3 ms of CPU a call, several times the cost of the turn around it; this client
0.1 ms (docs/decisions/model-servers.md, `python -m bench.http_clients`). llhttp parses the
answers (https://github.com/nodejs/llhttp, through httptools) and rejects ambiguous ones. Framing and
connection reuse follow RFC 9112.
"""

import asyncio
import ssl
from base64 import b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import cast
from urllib.parse import unquote

import httptools
import httpx

from prorl_envs.errors import InputError
from prorl_envs.model.http.tls import client_tls

#: Most bytes of an answer beside its body: status, headers, the framing of chunks.
MAX_FRAME = 2**16
#: Seconds between attempts to connect to the addresses of a host (RFC 8305).
_NEXT_ADDRESS_S = 0.25


class Unreachable(Exception):
    """Failure to open a connection; the text gives the reason."""


class ConnectionBroken(Exception):
    """Connection that closed before the end of the answer, or whose answer is not HTTP."""


class TooLong(Exception):
    """Answer that exceeds its size limit."""


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """A complete answer.

    Args:
        status: HTTP status.
        headers: those that `ModelConnection` keeps, by lower-case name.
        body: as it came, without the framing.
    """

    status: int
    headers: Mapping[bytes, bytes]
    body: bytes


class Origin:
    """Target of requests, and the start of each request.

    Args:
        url: http or https, with or without a path; a user in it is sent as basic authorization.
        headers: sent with every request.
        ca_file: as `client_tls`.

    Raises:
        InputError: a header cannot be sent, or the CA file cannot be used.
    """

    def __init__(self, url: str, headers: Mapping[str, str], ca_file: Path | None = None) -> None:
        parsed = httpx.URL(url)
        self.host = parsed.raw_host.decode("ascii")
        self.tls = client_tls(ca_file) if parsed.scheme == "https" else None
        self.port = parsed.port or (443 if self.tls else 80)
        self._path = parsed.raw_path.decode("ascii").rstrip("/")
        common = {"host": parsed.netloc.decode("ascii"), **headers}
        if parsed.userinfo:
            common["authorization"] = (
                "Basic " + b64encode(unquote(parsed.userinfo.decode()).encode()).decode()
            )
        self._common = _lines(common)

    def head(self, method: str, path: str, length: int, headers: Mapping[str, str] | None = None) -> bytes:
        """Return a request up to its body.

        Args:
            method, path: of the request; the path starts with `/` and is escaped already.
            length: bytes of the body.
            headers: further headers.

        Raises:
            InputError: a header cannot be sent.
        """
        size = f"content-length: {length}\r\n" if length or method != "GET" else ""
        further = _lines(headers) if headers else ""
        return f"{method} {self._path}{path} HTTP/1.1\r\n{self._common}{further}{size}\r\n".encode("ascii")


def _lines(headers: Mapping[str, str]) -> str:
    for name, value in headers.items():
        if not (value.isascii() and value.isprintable()):
            raise InputError(f"the header {name} can only have printable ASCII characters")
    return "".join(f"{name}: {value}\r\n" for name, value in headers.items())


async def connect(origin: Origin, *, seconds: float) -> "ModelConnection":
    """Open a connection.

    Args:
        seconds: to open it, including TLS.

    Raises:
        Unreachable: it does not open, or not in time.
    """
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(seconds):
            _, connection = await loop.create_connection(
                ModelConnection,
                origin.host,
                origin.port,
                ssl=origin.tls,
                happy_eyeballs_delay=_NEXT_ADDRESS_S,
            )
    except TimeoutError as error:
        raise Unreachable("does not accept connections") from error
    except ssl.SSLCertVerificationError as error:
        reason = f"has no certificate of a trusted authority: {error.verify_message}"
        raise Unreachable(f"{reason} (model.ca_file names a private authority)") from error
    except (OSError, UnicodeError) as error:  # UnicodeError: invalid host name
        raise Unreachable(f"cannot be reached: {error}") from error
    return connection


class ModelConnection(asyncio.Protocol):
    """One connection, with one exchange at a time. Created by `connect`."""

    #: Headers of an answer that are kept.
    KEPT = frozenset({b"content-encoding", b"retry-after"})

    _transport: asyncio.Transport
    _parser: httptools.HttpResponseParser

    def __init__(self) -> None:
        self.usable = False
        self.idle_since = 0.0
        self._answer: asyncio.Future[HttpAnswer] | None = None
        self._until_end = False
        self._heard: Callable[[bytes], bool] | None = None

    async def exchange(
        self, head: bytes, body: bytes, *, max_body: int, heard: Callable[[bytes], bool] | None = None
    ) -> HttpAnswer:
        """Send a request and read its answer. Cancelling this coroutine closes the connection.

        Args:
            head: from `Origin.head`.
            body: of the request.
            max_body: most bytes of the answer's body.
            heard: receives the body of a successful answer as it arrives (the body is then not kept), and
                returns whether to continue; must not raise.

        Raises:
            ConnectionBroken: the connection closes, or the answer is not HTTP.
            TooLong: the answer exceeds `max_body`.
        """
        answer: asyncio.Future[HttpAnswer] = asyncio.get_running_loop().create_future()
        self._answer, self._heard = answer, heard
        self.usable = False
        self._parser = httptools.HttpResponseParser(self)
        self._max_body, self._left = max_body, max_body + MAX_FRAME
        self._next_answer()
        if self._transport.is_closing():
            raise ConnectionBroken("it was closed before")
        self._transport.write(head + body)
        try:
            return await answer
        finally:
            self._answer = None
            if not self.usable:
                self.abort()

    def abort(self) -> None:
        """Close the connection now. Idempotent."""
        self.usable = False
        self._transport.abort()

    # Callbacks of asyncio.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._answer is None or self._answer.done():
            self.abort()  # data without a request
            return
        self._left -= len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._fail(ConnectionBroken("it wants another protocol"))
        except httptools.HttpParserError as error:
            self._fail(ConnectionBroken(f"what it sends is not HTTP: {error}"))
        if self._left < 0:
            self._fail(TooLong())

    def eof_received(self) -> None:
        if self._until_end:
            self._finish()

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(ConnectionBroken(str(exc) if exc else "it ended before the answer did"))

    # Callbacks of the parser.

    def on_message_begin(self) -> None:
        if self._whole:
            self.usable = False  # a second answer to one request
        self._next_answer()

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name in self.KEPT:
            self._headers[name] = value
        elif name == b"content-length" or (name == b"transfer-encoding" and b"chunked" in value.lower()):
            self._framed = True

    def on_headers_complete(self) -> None:
        self._until_end = not self._framed

    def on_body(self, body: bytes) -> None:
        if self._heard is not None and self._parser.get_status_code() == HTTPStatus.OK:
            self._left = self._max_body + MAX_FRAME  # the listener limits the size
            if not self._heard(body):
                self._fail(TooLong())
            return
        self._body += body
        if len(self._body) > self._max_body:
            self._fail(TooLong())

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() < 200:  # an interim answer, which is ignored
            self._until_end = False
            return
        self._finish(keep=self._parser.should_keep_alive())

    # Helpers.

    def _next_answer(self) -> None:
        self._headers: dict[bytes, bytes] = {}
        self._body = bytearray()
        self._framed = self._until_end = self._whole = False

    def _finish(self, *, keep: bool = False) -> None:
        self._until_end, self._whole = False, True
        if self._answer is None or self._answer.done():
            return
        # If the answer precedes the end of the request, the rest of the request is still being sent.
        self.usable = keep and self._transport.get_write_buffer_size() == 0
        status = self._parser.get_status_code()
        self._answer.set_result(HttpAnswer(status, self._headers, bytes(self._body)))

    def _fail(self, error: Exception) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)
        self.abort()
