"""What stands in front of every route: who may call, and how much may be sent.

Plain ASGI, because both must act before a byte of the body is read.
"""

import ipaddress
import math
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from prorl_envs.errors import InputError, ProrlError
from prorl_envs.rollout.access import OPERATOR, Caller, Keyring
from prorl_envs.rollout.agent import unicode
from prorl_envs.rollout.errors import Full, Later, TooLarge, Unauthorized, Unavailable, to_wire
from prorl_envs.rollout.views import ErrorBody, ErrorDetail

#: Answered without a token, so that probes need none; they say nothing but yes or no.
OPEN_PATHS = frozenset({"/health", "/ready"})
#: Below it are the pages of the dashboard: files of the package, which ask for the token themselves.
_PAGES = "/dashboard"

#: Where the error itself names no time.
_RETRY_AFTER_S: dict[type[ProrlError], float] = {Full: 1, Unavailable: 5}


def error_response(error: ProrlError) -> JSONResponse:
    """An error as every route answers it."""
    wire = to_wire(error)
    detail = ErrorDetail(type=wire.name, message=unicode(error.message), hint=unicode(error.hint))
    headers = {}
    if isinstance(error, Later):
        seconds = error.retry_after_s or _RETRY_AFTER_S[wire.error]
        headers["Retry-After"] = str(math.ceil(seconds))
    if wire.status == HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(ErrorBody(error=detail).model_dump(), status_code=wire.status, headers=headers)


class TokenGuard:
    """Lets through who knows a token, and notes whose it is (`access.caller_of`).

    Without any token only loopback is bound. There, the Host header must be a loopback name, which a web
    page that had its own name resolve to 127.0.0.1 cannot send; and an Origin header, which browsers send
    with whatever a page would change elsewhere, must be the service's own.

    Args:
        app: what is guarded.
        keyring: knows the tokens.
    """

    def __init__(self, app: ASGIApp, keyring: Keyring) -> None:
        self._app = app
        self._keyring = keyring

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            caller = OPERATOR if _is_open(scope["path"]) else self._caller(Headers(scope=scope))
            if caller is None:
                locked = self._keyring.locked
                hint = "send Authorization: Bearer <token>" if locked else "call it by a loopback address"
                await error_response(Unauthorized("not allowed", hint=hint))(scope, receive, send)
                return
            scope.setdefault("state", {})["caller"] = caller
        await self._app(scope, receive, send)

    def _caller(self, headers: Headers) -> Caller | None:
        if not self._keyring.locked:
            trusted = _is_loopback(headers.get("host", "")) and _is_own_page(headers)
            return OPERATOR if trusted else None
        scheme, _, given = headers.get("authorization", "").partition(" ")
        return self._keyring.caller(given.strip().encode()) if scheme.lower() == "bearer" else None


class BodyLimit:
    """Refuses bodies over a size, whether they announce it or not.

    Args:
        app: what is guarded.
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
    """Passes through the framework's `except Exception`, which would call it a malformed body."""


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or path == _PAGES or path.startswith(f"{_PAGES}/")


def _is_own_page(headers: Headers) -> bool:
    """Whether a request comes from a page of the service itself, or from no page."""
    origin = headers.get("origin")
    return origin is None or origin.lower().removeprefix("http://") == headers.get("host", "").lower()


def _is_loopback(host: str) -> bool:
    """Whether a Host header names this machine's loopback."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    if name.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
