"""One episode's connection to a resources server. What comes back is bounded in bytes and in time."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from prorl_envs.clock import Clock
from prorl_envs.errors import EnvironmentFault, RolloutFailure
from prorl_envs.tools.types import JsonObject

#: Most bytes of the cookies that a server may leave with an episode.
MAX_COOKIE_BYTES = 16 * 1024
#: Deepest nesting of a JSON answer.
MAX_DEPTH = 64


class ServerUnavailable(EnvironmentFault):
    """The server cannot be reached, or says that it cannot answer now."""

    retryable = True


class Unanswered(Exception):
    """A request got no answer that can be used.

    Args:
        why: for people.
        sent: whether the server may have acted on it.
    """

    def __init__(self, why: str, *, sent: bool) -> None:
        super().__init__(why)
        self.why = why
        self.sent = sent


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer.

    Args:
        status: of HTTP.
        body: its first bytes.
        cut: whether there were more.
        refused: the server's own word that a tool call was refused.
    """

    status: int
    body: bytes
    cut: bool = False
    refused: bool = False

    @property
    def away(self) -> bool:
        """A proxy, or the server itself, says that it cannot answer now."""
        return self.status in (502, 503, 504)

    @property
    def text(self) -> str:
        return self.body.decode("utf-8", "replace")

    def excerpt(self) -> str:
        """For an error's message."""
        return f"HTTP {self.status}: {self.text[:500].strip() or 'nothing'}"


#: Says that a tool call which was answered was not carried out; see `nemo/server.py`.
REFUSED_HEADER = "x-prorl-refused"


class Connection:
    """Posts JSON, and keeps the cookies that make an episode of single requests.

    Args:
        url: base URL of the server.
        connect_s: seconds that reaching it may take.
        tls: trusted certificates, shared by all connections.
        clock: bounds the requests.
    """

    def __init__(self, url: str, *, connect_s: float, tls: Any, clock: Clock) -> None:
        self.url = url
        self._clock = clock
        # A client of its own per episode: its cookies, and no search through the others' connections.
        self._http = httpx.AsyncClient(
            base_url=url,
            verify=tls,
            trust_env=False,
            headers={"Accept-Encoding": "identity"},
            timeout=httpx.Timeout(None, connect=connect_s),
            limits=httpx.Limits(max_connections=1),
        )

    async def post(self, path: str, body: Mapping[str, Any], *, seconds: float, most: int) -> Reply:
        """Post `body`.

        Args:
            path: of the route.
            body: what JSON can say.
            seconds: all of it may take.
            most: bytes of the answer that are read; what is more is left unread, and the connection closed.

        Raises:
            Unanswered: no answer came.
            TimeoutError: it did not come in time.
        """
        content = json.dumps(body).encode()  # ASCII: a lone surrogate travels as its escape
        try:
            async with self._clock.timeout(seconds):
                return await self._post(path, content, most)
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as error:
            raise Unanswered(f"{self.url} cannot be reached: {error!r}", sent=False) from error
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise Unanswered(f"{self.url} broke the connection: {error!r}", sent=True) from error

    async def _post(self, path: str, content: bytes, most: int) -> Reply:
        headers = {"Content-Type": "application/json"}
        async with self._http.stream("POST", path, content=content, headers=headers) as response:
            if response.headers.get("content-encoding", "identity") != "identity":
                raise Unanswered("the answer is compressed, which nobody asked for", sent=True)
            if sum(len(c.name) + len(c.value or "") for c in self._http.cookies.jar) > MAX_COOKIE_BYTES:
                raise Unanswered(f"the server's cookies take more than {MAX_COOKIE_BYTES} bytes", sent=True)
            read = bytearray()
            async for chunk in response.aiter_raw():
                read += chunk
                if len(read) > most:
                    break
            refused = REFUSED_HEADER in response.headers
            return Reply(response.status_code, bytes(read[:most]), len(read) > most, refused)

    def forget(self) -> None:
        """Drop the cookies: the next request begins a new session."""
        self._http.cookies.clear()

    async def aclose(self) -> None:
        await self._http.aclose()


def json_object(reply: Reply, failure: type[RolloutFailure]) -> JsonObject:
    """The object an answer holds.

    Raises:
        RolloutFailure: `failure`, where it is cut, no JSON object or nested too deeply. NaN is no JSON.
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
