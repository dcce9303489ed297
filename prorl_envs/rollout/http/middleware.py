"""Middleware in front of all routes: authentication, and a limit of body sizes.

Plain ASGI, because both must act before a byte of the body is read.
"""

import ipaddress
import math
import re
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.requests import cookie_parser
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from prorl_envs.errors import InputError, ProrlError
from prorl_envs.rollout.agent.agent_loop import unicode
from prorl_envs.rollout.api.caller import OPERATOR, Caller
from prorl_envs.rollout.api.errors import QueueFull, Retryable, TooLarge, Unauthorized, Unavailable, to_wire
from prorl_envs.rollout.api.views import ErrorBody, ErrorDetail
from prorl_envs.rollout.http.auth import TokenStore
from prorl_envs.rollout.http.logins import cookie_name

#: Answered without a token, so that probes need none; these routes reveal only yes or no.
OPEN_PATHS = frozenset({"/health", "/ready"})
#: Path of the dashboard's pages: files of the package, whose script asks for the token itself.
_PAGES = "/dashboard"

#: A Host header: an IPv6 address in brackets, or a name or an IPv4 address; then an optional port.
_HOST = re.compile(r"(?:\[(?P<ip6>[0-9A-Fa-f:.]+)\]|(?P<name>[^\[\]:]+))(?::[0-9]*)?")

#: Used if the error itself has no time.
_RETRY_AFTER_S: dict[type[ProrlError], float] = {QueueFull: 1, Unavailable: 5}


def error_response(error: ProrlError) -> JSONResponse:
    """Return the response of every route to an error."""
    wire = to_wire(error)
    detail = ErrorDetail(type=wire.name, message=unicode(error.message), hint=unicode(error.hint))
    headers = {}
    if isinstance(error, Retryable):
        seconds = error.retry_after_s or _RETRY_AFTER_S[wire.error]
        headers["Retry-After"] = str(math.ceil(seconds))
    if wire.status == HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(ErrorBody(error=detail).model_dump(), status_code=wire.status, headers=headers)


class TokenGuard:
    """Rejects requests without a valid token, and stores the caller in the request (`auth.caller_of`).

    Without any token only loopback is bound. There, the Host header must be a loopback name, which a web page
    whose own name resolves to 127.0.0.1 cannot send. An Origin header, which browsers send with every request
    by which a page would change another site, must be the service's own.

    Args:
        app: the guarded application.
        keyring: knows the tokens.
    """

    def __init__(self, app: ASGIApp, keyring: TokenStore) -> None:
        self._app = app
        self._keyring = keyring

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            caller = OPERATOR if _is_open(scope["path"]) else self._caller(scope)
            if caller is None:
                locked = self._keyring.locked
                hint = "send Authorization: Bearer <token>" if locked else "call it by a loopback address"
                await error_response(Unauthorized("not allowed", hint=hint))(scope, receive, send)
                return
            scope.setdefault("state", {})["caller"] = caller
        await self._app(scope, receive, send)

    def _caller(self, scope: Scope) -> Caller | None:
        headers = Headers(scope=scope)
        if not self._keyring.locked:
            trusted = _is_loopback(headers.get("host", "")) and _is_own_page(headers)
            return OPERATOR if trusted else None
        if "authorization" not in headers:
            return self._browser(scope, headers)
        scheme, _, given = headers["authorization"].partition(" ")
        return self._keyring.caller(given.strip().encode()) if scheme.lower() == "bearer" else None

    def _browser(self, scope: Scope, headers: Headers) -> Caller | None:
        """Return the operator if a page of the service itself sends a session cookie, otherwise None."""
        cookies = cookie_parser(headers.get("cookie", ""))
        session = cookies.get(cookie_name(scope["server"][1])) if scope.get("server") else None
        if session is None or not _is_own_page(headers):
            return None
        return OPERATOR if self._keyring.logins.known(session) else None


class BodyLimit:
    """Rejects bodies over a size, with or without a Content-Length header.

    Args:
        app: the guarded application.
        max_bytes: largest body.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "0")
        if announced.isascii() and announced.isdecimal() and int(announced[:20]) > self._max_bytes:
            await error_response(self._too_large())(scope, receive, send)
            return
        started, total = False, 0

        async def counted() -> Message:
            nonlocal total
            message = await receive()
            total += len(message.get("body", b""))
            if total > self._max_bytes:
                raise _BodyTooLarge
            return message

        async def noted(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, counted, noted)
        except _BodyTooLarge:
            if started:
                raise
            await error_response(self._too_large())(scope, receive, send)

    def _too_large(self) -> InputError:
        return TooLarge(f"the body is larger than {self._max_bytes} bytes", hint="send fewer groups at once")


class _BodyTooLarge(BaseException):
    """A body over the limit. Not an `Exception`: the framework would report a malformed body."""


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or path == _PAGES or path.startswith(f"{_PAGES}/")


def _is_own_page(headers: Headers) -> bool:
    """Return whether a request comes from a page of the service itself, or from no page. Pages on other ports
    of the host may belong to another user, and send the same cookies."""
    if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        return False
    origin = headers.get("origin")
    return origin is None or origin.lower().removeprefix("http://") == headers.get("host", "").lower()


def _is_loopback(host: str) -> bool:
    """Return whether a Host header names this machine's loopback."""
    found = _HOST.fullmatch(host)
    if found is None:
        return False
    if (name := found["name"] or "").lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(found["ip6"] or name).is_loopback
    except ValueError:
        return False
