"""HTTP/1.1 as a caller of model servers needs it: one request, one whole answer, on a connection of its own.

A general client costs 0.5 to 3 ms of CPU a call, several times what the turn around it does; this one 0.1
(docs/decisions/0036-http-to-model-servers.md, `python -m bench.http_clients`). llhttp reads what comes
(https://github.com/nodejs/llhttp, by way of httptools): it refuses what is ambiguous. Framing and connection
reuse follow RFC 9112.
"""

import asyncio
from base64 import b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import cast
from urllib.parse import unquote

import httptools
import httpx

from prorl_envs.errors import InputError

#: Bytes of an answer beside its body: status, headers, the framing of chunks.
MAX_FRAME = 2**16
#: Seconds between the tries of a host's addresses (RFC 8305).
_NEXT_ADDRESS_S = 0.25


class Unreachable(Exception):
    """No connection could be opened; the text says why."""


class Broken(Exception):
    """The connection ended before the answer did, or what came is not HTTP."""


class TooLong(Exception):
    """The answer has more bytes than it may."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer.

    Args:
        status: of HTTP.
        headers: those that `Connection` keeps, by their names in lower case.
        body: as it came, without the framing.
    """

    status: int
    headers: Mapping[bytes, bytes]
    body: bytes


class Origin:
    """Where requests go, and what stands in front of each.

    Args:
        url: http or https, with or without a path; a user in it is sent as basic authorization.
        headers: sent with every request.

    Raises:
        InputError: a header cannot be sent.
    """

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        parsed = httpx.URL(url)
        self.host = parsed.raw_host.decode("ascii")
        # The machine's own settings of certificates are heeded no more than its proxies.
        self.tls = httpx.create_ssl_context(trust_env=False) if parsed.scheme == "https" else None
        self.port = parsed.port or (443 if self.tls else 80)
        self._path = parsed.raw_path.decode("ascii").rstrip("/")
        common = {"host": parsed.netloc.decode("ascii"), **headers}
        if parsed.userinfo:
            common["authorization"] = (
                "Basic " + b64encode(unquote(parsed.userinfo.decode()).encode()).decode()
            )
        self._common = _lines(common)

    def head(self, method: str, path: str, length: int, headers: Mapping[str, str] | None = None) -> bytes:
        """A request up to its body.

        Args:
            method, path: of the request; the path begins with `/` and is escaped already.
            length: bytes of the body.
            headers: further ones.

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


async def connect(origin: Origin, *, seconds: float) -> "Connection":
    """Open a connection.

    Args:
        seconds: to do so, TLS included.

    Raises:
        Unreachable: it does not open, or not in time.
    """
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(seconds):
            _, connection = await loop.create_connection(
                Connection,
                origin.host,
                origin.port,
                ssl=origin.tls,
                happy_eyeballs_delay=_NEXT_ADDRESS_S,
            )
    except TimeoutError as error:
        raise Unreachable("does not accept connections") from error
    except (OSError, UnicodeError) as error:  # the latter of a name that is none
        raise Unreachable(f"cannot be reached: {error}") from error
    return connection


class Connection(asyncio.Protocol):
    """One connection, which has one exchange at a time. Made by `connect`."""

    #: Of an answer's headers, those that are kept.
    KEPT = frozenset({b"content-encoding", b"retry-after"})

    _transport: asyncio.Transport
    _parser: httptools.HttpResponseParser

    def __init__(self) -> None:
        self.usable = False
        self.idle_since = 0.0
        self._answer: asyncio.Future[Answer] | None = None
        self._until_end = False
        self._heard: Callable[[bytes], bool] | None = None

    async def exchange(
        self, head: bytes, body: bytes, *, max_body: int, heard: Callable[[bytes], bool] | None = None
    ) -> Answer:
        """Send a request and read its answer. Who is cancelled meanwhile closes the connection.

        Args:
            head: from `Origin.head`.
            body: of the request.
            max_body: most bytes of the answer's body.
            heard: told of the body of a successful answer as it comes, which is then not kept, and says
                whether it may go on; must not fail.

        Raises:
            Broken: the connection ends, or what comes is not HTTP.
            TooLong: more comes than may.
        """
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._answer, self._heard = answer, heard
        self.usable = False
        self._parser = httptools.HttpResponseParser(self)
        self._max_body, self._left = max_body, max_body + MAX_FRAME
        self._next_answer()
        if self._transport.is_closing():
            raise Broken("it was closed before")
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

    # What asyncio says.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._answer is None or self._answer.done():
            self.abort()  # nothing was asked for
            return
        self._left -= len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._fail(Broken("it wants another protocol"))
        except httptools.HttpParserError as error:
            self._fail(Broken(f"what it sends is not HTTP: {error}"))
        if self._left < 0:
            self._fail(TooLong())

    def eof_received(self) -> None:
        if self._until_end:
            self._finish()

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(Broken(str(exc) if exc else "it ended before the answer did"))

    # What the parser says.

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
            self._left = self._max_body + MAX_FRAME  # who listens knows how much is too much
            if not self._heard(body):
                self._fail(TooLong())
            return
        self._body += body
        if len(self._body) > self._max_body:
            self._fail(TooLong())

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() < 200:  # news on the way to the answer, of no use here
            self._until_end = False
            return
        self._finish(keep=self._parser.should_keep_alive())

    # Steps.

    def _next_answer(self) -> None:
        self._headers: dict[bytes, bytes] = {}
        self._body = bytearray()
        self._framed = self._until_end = self._whole = False

    def _finish(self, *, keep: bool = False) -> None:
        self._until_end, self._whole = False, True
        if self._answer is None or self._answer.done():
            return
        # An answer to a request that is not all sent leaves the rest of it on the way.
        self.usable = keep and self._transport.get_write_buffer_size() == 0
        status = self._parser.get_status_code()
        self._answer.set_result(Answer(status, self._headers, bytes(self._body)))

    def _fail(self, error: Exception) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)
        self.abort()
