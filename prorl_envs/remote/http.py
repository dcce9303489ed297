"""One episode's connection to a resources server. Answers are bounded in bytes and in time."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from prorl_envs.clock import Clock
from prorl_envs.errors import EnvironmentFault, RolloutFailure
from prorl_envs.tools.types import JsonObject

#: Most bytes of the cookies that a server may set in an episode.
MAX_COOKIE_BYTES = 16 * 1024
#: Deepest nesting of a JSON answer.
MAX_DEPTH = 64


class RemoteUnavailable(EnvironmentFault):
    """Server that cannot be reached, or reports that it cannot answer now."""

    retryable = True


class Unanswered(Exception):
    """Request without a usable answer.

    Args:
        why: reason, for people.
        sent: whether the server may have acted on the request.
    """

    def __init__(self, why: str, *, sent: bool) -> None:
        super().__init__(why)
        self.why = why
        self.sent = sent


@dataclass(frozen=True, slots=True)
class HttpReply:
    """An HTTP answer.

    Args:
        status: HTTP status.
        body: its first bytes.
        cut: whether the body was longer.
        refused: whether the server reported that it refused a tool call.
    """

    status: int
    body: bytes
    cut: bool = False
    refused: bool = False

    @property
    def away(self) -> bool:
        """True if a proxy, or the server itself, reports that it cannot answer now."""
        return self.status in (502, 503, 504)

    @property
    def text(self) -> str:
        return self.body.decode("utf-8", "replace")

    def excerpt(self) -> str:
        """Return the status and the start of the body, for an error message."""
        return f"HTTP {self.status}: {self.text[:500].strip() or 'nothing'}"


#: Header of an answered tool call that was not carried out; see `nemo/server.py`.
REFUSED_HEADER = "x-prorl-refused"


class RemoteConnection:
    """HTTP client that posts JSON and keeps the cookies that join requests to one episode.

    Args:
        url: base URL of the server.
        connect_s: seconds to connect.
        tls: trusted certificates, shared by all connections.
        clock: for the timeouts of requests.
    """

    def __init__(self, url: str, *, connect_s: float, tls: Any, clock: Clock) -> None:
        self.url = url
        self._clock = clock
        # One client per episode: it has separate cookies and need not search the other episodes' connections.
        self._http = httpx.AsyncClient(
            base_url=url,
            verify=tls,
            trust_env=False,
            headers={"Accept-Encoding": "identity"},
            timeout=httpx.Timeout(None, connect=connect_s),
            limits=httpx.Limits(max_connections=1),
        )

    async def post(self, path: str, body: Mapping[str, Any], *, seconds: float, most: int) -> HttpReply:
        """Post `body`.

        Args:
            path: of the route.
            body: JSON-compatible values.
            seconds: limit of the whole request.
            most: bytes of the answer to read; if there are more, the connection is closed.

        Raises:
            Unanswered: no answer came.
            TimeoutError: it did not come in time.
        """
        content = json.dumps(body).encode()  # ASCII: a lone surrogate is sent as its escape
        try:
            async with self._clock.timeout(seconds):
                return await self._post(path, content, most)
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as error:
            raise Unanswered(f"{self.url} cannot be reached: {error!r}", sent=False) from error
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise Unanswered(f"{self.url} broke the connection: {error!r}", sent=True) from error

    async def _post(self, path: str, content: bytes, most: int) -> HttpReply:
        headers = {"Content-Type": "application/json"}
        async with self._http.stream("POST", path, content=content, headers=headers) as response:
            if response.headers.get("content-encoding", "identity") != "identity":
                raise Unanswered("the answer is compressed, which was not requested", sent=True)
            if sum(len(c.name) + len(c.value or "") for c in self._http.cookies.jar) > MAX_COOKIE_BYTES:
                raise Unanswered(f"the server's cookies take more than {MAX_COOKIE_BYTES} bytes", sent=True)
            read = bytearray()
            async for chunk in response.aiter_raw():
                read += chunk
                if len(read) > most:
                    break
            refused = REFUSED_HEADER in response.headers
            return HttpReply(response.status_code, bytes(read[:most]), len(read) > most, refused)

    def forget(self) -> None:
        """Drop the cookies: the next request starts a new session."""
        self._http.cookies.clear()

    async def aclose(self) -> None:
        await self._http.aclose()


def json_object(reply: HttpReply, failure: type[RolloutFailure]) -> JsonObject:
    """Return the JSON object of an answer.

    Raises:
        RolloutFailure: `failure`, if the answer is cut, no JSON object, nested too deeply or contains NaN.
    """
    if reply.cut:
        raise failure(f"the server's answer is longer than {len(reply.body)} bytes")
    try:
        answer = json.loads(reply.body, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise failure(f"the server's answer is not JSON: {str(error)[:200]}") from error
    if not isinstance(answer, dict):
        raise failure(f"the server's answer is a {type(answer).__name__}, not a JSON object")
    if _too_deep(answer):
        raise failure(f"the server's answer is nested more than {MAX_DEPTH} deep")
    return answer


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is no JSON")


def _too_deep(answer: object) -> bool:
    level = [answer]
    for _ in range(MAX_DEPTH):
        level = [
            below
            for value in level
            if isinstance(value, dict | list)
            for below in (value.values() if isinstance(value, dict) else value)
        ]
        if not level:
            return False
    return True
