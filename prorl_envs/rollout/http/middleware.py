"""Middleware in front of all routes: authentication, a check of bodies, and the renewal of leases.

All are plain ASGI applications: the first two must act before the first byte of the body is read.
"""

import ipaddress
import math
import re
from http import HTTPStatus
from urllib.parse import parse_qsl

from starlette.datastructures import Headers
from starlette.requests import cookie_parser
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from prorl_envs.errors import InputError, ProrlError
from prorl_envs.rollout.api.errors import (
    CompressedBody,
    QueueFull,
    Retryable,
    TooLarge,
    Unauthorized,
    Unavailable,
    to_wire,
)
from prorl_envs.rollout.api.views import ErrorBody, ErrorDetail
from prorl_envs.rollout.http.auth import OPERATOR, Caller, TokenStore, cookie_name
from prorl_envs.rollout.service.leases import Leases
from prorl_envs.strict_json import encodable

#: Paths without authentication, so that probes need no token. Their responses reveal only yes or no.
OPEN_PATHS = frozenset({"/health", "/ready"})
#: Path of the dashboard's pages. These are files of the package; their script asks the user for the token.
_PAGES = "/dashboard"

#: Suffixes that may follow an id in a path.
_SUFFIXES = {
    "groups": (),
    "jobs": ("/result",),
    "batches": ("/groups", "/tasks", "/results"),
}

#: Limit of the bytes of all unfinished requests, in bodies of the maximum size.
_BODIES_AT_ONCE = 8

#: A Host header: an IPv6 address in brackets, or a name or an IPv4 address; then an optional port.
_HOST = re.compile(r"(?:\[(?P<ip6>[0-9A-Fa-f:.]+)\]|(?P<name>[^\[\]:]+))(?::[0-9]*)?")

#: Default of the `Retry-After` header in seconds, for errors without a time of their own.
_RETRY_AFTER_S: dict[type[ProrlError], float] = {QueueFull: 1, Unavailable: 5}


def error_response(error: ProrlError) -> JSONResponse:
    """Return the HTTP response for an error. All routes use it."""
    wire = to_wire(error)
    detail = ErrorDetail(type=wire.name, message=encodable(error.message), hint=encodable(error.hint))
    headers = {}
    if isinstance(error, Retryable):
        seconds = error.retry_after_s or _RETRY_AFTER_S[wire.error]
        headers["Retry-After"] = str(math.ceil(seconds))
    if wire.status == HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(ErrorBody(error=detail).model_dump(), status_code=wire.status, headers=headers)


class TokenGuard:
    """Middleware that rejects requests without a valid token, and stores the caller (`auth.caller_of`).

    A service without any token is bound to loopback only. Then two headers are checked. The Host header must
    be a loopback name: a malicious web page whose own host name resolves to 127.0.0.1 cannot send it. The
    Origin header, if there is one, must name the service itself: browsers send it with every request of a
    page that could change another site.

    Args:
        app: the guarded application.
        tokens: knows the tokens.
    """

    def __init__(self, app: ASGIApp, tokens: TokenStore) -> None:
        self._app = app
        self._tokens = tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            caller = OPERATOR if _is_open(scope["path"]) else self._caller(scope)
            if caller is None:
                locked = self._tokens.locked
                hint = "send Authorization: Bearer <token>" if locked else "use a loopback address"
                await error_response(Unauthorized("not allowed", hint=hint))(scope, receive, send)
                return
            scope.setdefault("state", {})["caller"] = caller
        await self._app(scope, receive, send)

    def _caller(self, scope: Scope) -> Caller | None:
        headers = Headers(scope=scope)
        if not self._tokens.locked:
            trusted = _is_loopback(headers.get("host", "")) and _is_own_page(headers)
            return OPERATOR if trusted else None
        if "authorization" not in headers:
            return self._browser(scope, headers)
        scheme, _, token = headers["authorization"].partition(" ")
        return self._tokens.caller(token.strip().encode()) if scheme.lower() == "bearer" else None

    def _browser(self, scope: Scope, headers: Headers) -> Caller | None:
        """Return the operator if a page of the service itself sends a session cookie, otherwise None."""
        cookies = cookie_parser(headers.get("cookie", ""))
        session = cookies.get(cookie_name(scope["server"][1])) if scope.get("server") else None
        if session is None or not _is_own_page(headers):
            return None
        return OPERATOR if self._tokens.logins.known(session) else None


class BodyLimit:
    """Middleware that rejects compressed bodies, and bodies over a size, with or without a Content-Length.

    Args:
        app: the guarded application.
        max_bytes: maximum size of a body; bodies of all unfinished requests together have at most
            `_BODIES_AT_ONCE` times this size.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if (encoding := headers.get("content-encoding", "identity")).lower() not in ("", "identity"):
            refusal = CompressedBody(
                f"the body has the encoding {encoding[:20]!r}", hint="send it uncompressed"
            )
            await error_response(refusal)(scope, receive, send)
            return
        announced = headers.get("content-length", "0")
        if announced.isascii() and announced.isdecimal() and int(announced[:20]) > self._max_bytes:
            await error_response(self._too_large())(scope, receive, send)
            return
        started, total = False, 0

        async def counting_receive() -> Message:
            nonlocal total
            message = await receive()
            size = len(message.get("body", b""))
            total += size
            self._held += size
            if total > self._max_bytes:
                raise _BodyRefused(self._too_large())
            if self._held > _BODIES_AT_ONCE * self._max_bytes:
                raise _BodyRefused(QueueFull("too many large requests at once", hint="send it again later"))
            return message

        async def tracking_send(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, counting_receive, tracking_send)
        except _BodyRefused as refused:
            if started:
                raise
            await error_response(refused.error)(scope, receive, send)
        finally:
            self._held -= total

    def _too_large(self) -> InputError:
        return TooLarge(f"the body is larger than {self._max_bytes} bytes", hint="send fewer groups at once")


class LeaseMiddleware:
    """Middleware that renews the leases of the groups and batches that a request names, if they belong to the
    caller.

    Args:
        app: the next application. The caller must be authenticated before this middleware runs.
        leases: leases of the service.
    """

    def __init__(self, app: ASGIApp, leases: Leases) -> None:
        self._app = app
        self._leases = leases

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._leases:
            await self._app(scope, receive, send)
            return
        caller: Caller = scope["state"]["caller"]
        items = named_items(scope["path"], scope["query_string"])
        with self._leases.keep_alive({(kind, name) for kind, name in items if caller.owns(name)}):
            await self._app(scope, receive, send)


class _BodyRefused(BaseException):
    """Body over a limit. Not an `Exception`, since FastAPI would report it as a malformed body."""

    def __init__(self, error: ProrlError) -> None:
        super().__init__(error)
        self.error = error


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or path == _PAGES or path.startswith(f"{_PAGES}/")


def _is_own_page(headers: Headers) -> bool:
    """Return True if a request comes from a page of the service itself, or from no page. Pages on other ports
    of the same host may belong to another user, and their requests carry the same cookies."""
    if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        return False
    origin = headers.get("origin")
    return origin is None or origin.lower().removeprefix("http://") == headers.get("host", "").lower()


def _is_loopback(host: str) -> bool:
    """Return True if a Host header names a loopback address."""
    found = _HOST.fullmatch(host)
    if found is None:
        return False
    if (name := found["name"] or "").lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(found["ip6"] or name).is_loopback
    except ValueError:
        return False


def named_items(path: str, query: bytes) -> set[tuple[str, str]]:
    """Return the groups and batches that a request names, by kind and id."""
    _, version, kind, rest = (*path.split("/", 3), "", "", "")[:4]
    if version != "v1":
        return set()
    if kind == "results":
        return {("groups", value) for key, value in parse_qsl(query.decode("latin-1")) if key == "group"}
    for suffix in _SUFFIXES.get(kind, ()):
        rest = rest.removesuffix(suffix)
    match kind:
        case "groups" | "batches" if rest:
            return {(kind, rest)}
        case "jobs":
            return {("groups", rest.rpartition("/")[0])}
        case _:
            return set()
