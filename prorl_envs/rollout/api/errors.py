"""Errors of the service: the same types on both sides of the wire.

Over HTTP, only the name in the field `type` is sent. The client looks it up in the fixed table `WIRE_ERRORS`,
and never imports or creates a class that a server names.
"""

from typing import NamedTuple

from prorl_envs.errors import InputError, ProrlError


class Conflict(InputError):
    """Error: the id is already taken by a request with other content."""


class OutOfOrder(InputError):
    """Error: the state of an interactive episode does not allow the request."""


class NotFound(InputError):
    """Error: there is no such job, group, model server or route."""


class CursorExpired(InputError):
    """Error: some results after this cursor are no longer kept."""


class Unauthorized(InputError):
    """Error: the bearer token is missing or wrong."""


class Forbidden(InputError):
    """Error: the token is valid, but does not permit the request."""


class TooLarge(InputError):
    """Error: the request body is over the limit."""


class CompressedBody(InputError):
    """Error: the request body is compressed, which no route reads."""


class WrongMethod(InputError):
    """Error: the route does not support the HTTP method."""


class Retryable(ProrlError):
    """Error: the same request may succeed later.

    Args:
        message, hint: see `ProrlError`.
        retry_after_s: seconds to wait before the next try; over HTTP the `Retry-After` header.
    """

    def __init__(self, message: str, *, hint: str = "", retry_after_s: float = 0.0) -> None:
        super().__init__(message, hint=hint)
        self.retry_after_s = retry_after_s


class QueueFull(Retryable):
    """Error: there is no capacity for the request at the moment."""


class Unavailable(Retryable):
    """Error: the service is stopping, or cannot be reached."""


class ServerFault(ProrlError):
    """Error: the service has a bug."""


class ErrorMapping(NamedTuple):
    """Wire form of an error: its `type`, the HTTP status, and the class on both sides."""

    name: str
    status: int
    error: type[ProrlError]


#: Subclasses come before their bases, so that the first match is the closest one.
WIRE_ERRORS: tuple[ErrorMapping, ...] = (
    ErrorMapping("conflict", 409, Conflict),
    ErrorMapping("out_of_order", 409, OutOfOrder),
    ErrorMapping("not_found", 404, NotFound),
    ErrorMapping("cursor_expired", 410, CursorExpired),
    ErrorMapping("unauthorized", 401, Unauthorized),
    ErrorMapping("forbidden", 403, Forbidden),
    ErrorMapping("too_large", 413, TooLarge),
    ErrorMapping("unsupported_media_type", 415, CompressedBody),
    ErrorMapping("method_not_allowed", 405, WrongMethod),
    ErrorMapping("full", 429, QueueFull),
    ErrorMapping("unavailable", 503, Unavailable),
    ErrorMapping("internal", 500, ServerFault),
    ErrorMapping("invalid_request", 422, InputError),
)

_BY_TYPE = {wire.name: wire for wire in WIRE_ERRORS}


def to_wire(error: ProrlError) -> ErrorMapping:
    """Return the wire form of an error. Errors of other classes than in `WIRE_ERRORS` are server faults."""
    return next((wire for wire in WIRE_ERRORS if isinstance(error, wire.error)), _BY_TYPE["internal"])


def from_wire(name: str, message: str, hint: str) -> ProrlError:
    """Return the error that a server named, or a `ServerFault` for an unknown name."""
    return _BY_TYPE.get(name, _BY_TYPE["internal"]).error(message, hint=hint)
