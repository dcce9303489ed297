"""Connection of one episode to a resources server. The size and the time of answers are limited."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from prorl_envs.clock import Clock
from prorl_envs.errors import EnvironmentFault, RolloutFailure
from prorl_envs.tools.types import JsonObject

#: Maximum number of bytes in the cookies that a server sets in an episode.
MAX_COOKIE_BYTES = 16 * 1024
#: Maximum nesting of a JSON answer.
MAX_DEPTH = 64


class RemoteUnavailable(EnvironmentFault):
    """Error: the server cannot be reached, or reports that it is unavailable."""

    retryable = True


class Unanswered(Exception):
    """Error: a request got no usable answer. The message describes the problem."""


@dataclass(frozen=True, slots=True)
class HttpReply:
    """HTTP response.

    Args:
        status: HTTP status.
        body: first bytes of the body.
        cut: True if the body was longer.
        refused: True if the server reported that it refused a tool call.
    """

    status: int
    body: bytes
    cut: bool = False
    refused: bool = False

    @property
    def unavailable(self) -> bool:
        """True if the server, or a proxy, reports that the server is temporarily unavailable."""
        return self.status in (502, 503, 504)

    @property
    def text(self) -> str:
        return self.body.decode("utf-8", "replace")

    def excerpt(self) -> str:
        """Return the status and the start of the body, for an error message."""
        return f"HTTP {self.status}: {self.text[:500].strip() or 'nothing'}"


#: Response header which reports that a tool call was not run; see `nemo/server.py`.
REFUSED_HEADER = "x-prorl-refused"


class RemoteConnection:
    """HTTP client of one episode. It posts JSON, and keeps the cookies that identify the episode.

    Args:
        url: base URL of the server.
        connect_s: timeout in seconds for connecting.
        tls: trusted certificates, shared by all connections.
        clock: measures the timeouts of requests.
    """

    def __init__(self, url: str, *, connect_s: float, tls: Any, clock: Clock) -> None:
        self.url = url
        self._clock = clock
        # One client per episode, for separate cookies, and for no search among other episodes' connections.
        self._http = httpx.AsyncClient(
            base_url=url,
            verify=tls,
            trust_env=False,
            headers={"Accept-Encoding": "identity"},
            timeout=httpx.Timeout(None, connect=connect_s),
            limits=httpx.Limits(max_connections=1),
        )

    async def post(self, path: str, body: Mapping[str, Any], *, seconds: float, max_bytes: int) -> HttpReply:
        """Post `body`; arguments and errors as for `request`."""
        return await self.request("POST", path, body, seconds=seconds, max_bytes=max_bytes)

    async def request(
        self, method: str, path: str, body: Mapping[str, Any], *, seconds: float, max_bytes: int
    ) -> HttpReply:
        """Send a request.

        Args:
            method: method of HTTP.
            path: path of the route.
            body: JSON-compatible values.
            seconds: timeout of the whole request in seconds.
            max_bytes: maximum number of bytes that are read. If there are more, the connection is closed.

        Raises:
            Unanswered: there is no usable answer.
            TimeoutError: the answer did not arrive in time.
        """
        content = json.dumps(body).encode()  # ASCII, so that lone surrogates are sent as escapes
        try:
            async with self._clock.timeout(seconds):
                return await self._request(method, path, content, max_bytes)
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as error:
            raise Unanswered(f"{self.url} cannot be reached: {error!r}") from error
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise Unanswered(f"{self.url} broke the connection: {error!r}") from error

    async def _request(self, method: str, path: str, content: bytes, max_bytes: int) -> HttpReply:
        headers = {"Content-Type": "application/json"}
        async with self._http.stream(method, path, content=content, headers=headers) as response:
            if response.headers.get("content-encoding", "identity") != "identity":
                raise Unanswered("the answer is compressed, which was not requested")
            if sum(len(c.name) + len(c.value or "") for c in self._http.cookies.jar) > MAX_COOKIE_BYTES:
                raise Unanswered(f"the server's cookies take more than {MAX_COOKIE_BYTES} bytes")
            read = bytearray()
            async for chunk in response.aiter_raw():
                read += chunk
                if len(read) > max_bytes:
                    break
            refused = REFUSED_HEADER in response.headers
            return HttpReply(response.status_code, bytes(read[:max_bytes]), len(read) > max_bytes, refused)

    def forget(self) -> None:
        """Drop the cookies, so that the next request starts a new session."""
        self._http.cookies.clear()

    async def aclose(self) -> None:
        await self._http.aclose()


def json_object(reply: HttpReply, failure: type[RolloutFailure]) -> JsonObject:
    """Return the JSON object of an answer.

    Raises:
        RolloutFailure: of class `failure`: the answer is cut, not a JSON object, too deep or contains NaN.
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
    raise ValueError(f"{constant} is not valid JSON")


def _too_deep(answer: object) -> bool:
    level = [answer]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for value in level
            if isinstance(value, dict | list)
            for child in (value.values() if isinstance(value, dict) else value)
        ]
        if not level:
            return False
    return True
