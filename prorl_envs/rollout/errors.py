"""What the service refuses, as types: the same on both sides of the wire.

    ProrlError
    ├── InputError
    │   ├── Conflict        the id is taken by another request
    │   ├── OutOfOrder      an episode is not where this could be done
    │   ├── NotFound        no such job, group or route
    │   ├── CursorExpired   results so old are no longer kept
    │   ├── Unauthorized    the bearer token is missing or wrong
    │   ├── Forbidden       the token is right, and not for this
    │   ├── TooLarge        the request body is over the limit
    │   └── WrongMethod     the route does not know the HTTP method
    ├── Later               the same request may be answered later
    │   ├── Full            there is no room for it now
    │   └── Unavailable     the service is stopping, or cannot be reached
    └── ServerFault         the service has a bug

Only the name in `type` crosses the wire. A client looks it up in this fixed table; nothing is imported or
built from what a server sends.
"""

from typing import NamedTuple

from prorl_envs.errors import InputError, ProrlError


class Conflict(InputError):
    """The id is already taken by a request with other content."""


class OutOfOrder(InputError):
    """An episode that a caller drives is not in the state for this."""


class NotFound(InputError):
    """There is no such job, group, model server or route."""


class CursorExpired(InputError):
    """The results after this cursor are no longer all kept."""


class Unauthorized(InputError):
    """The bearer token is missing or wrong."""


class Forbidden(InputError):
    """The token is one that may not do this."""


class TooLarge(InputError):
    """The request body is over the limit."""


class WrongMethod(InputError):
    """The route does not know the HTTP method."""


class Later(ProrlError):
    """The same request may be answered later.

    Args:
        message, hint: as of every error.
        retry_after_s: seconds to wait before it is asked again; over HTTP it is the `Retry-After` header.
    """

    def __init__(self, message: str, *, hint: str = "", retry_after_s: float = 0.0) -> None:
        super().__init__(message, hint=hint)
        self.retry_after_s = retry_after_s


class Full(Later):
    """There is no room for it now."""


class Unavailable(Later):
    """The service is stopping, or cannot be reached."""


class ServerFault(ProrlError):
    """The service failed at something it should not fail at: a bug."""


class WireError(NamedTuple):
    """How an error looks on the wire: its `type`, the HTTP status, the class on both sides."""

    name: str
    status: int
    error: type[ProrlError]


#: Subclasses before their bases, so that the first match of a walk is the closest.
WIRE_ERRORS: tuple[WireError, ...] = (
    WireError("conflict", 409, Conflict),
    WireError("out_of_order", 409, OutOfOrder),
    WireError("not_found", 404, NotFound),
    WireError("cursor_expired", 410, CursorExpired),
    WireError("unauthorized", 401, Unauthorized),
    WireError("forbidden", 403, Forbidden),
    WireError("too_large", 413, TooLarge),
    WireError("method_not_allowed", 405, WrongMethod),
    WireError("full", 429, Full),
    WireError("unavailable", 503, Unavailable),
    WireError("internal", 500, ServerFault),
    WireError("invalid_request", 422, InputError),
)

_BY_TYPE = {wire.name: wire for wire in WIRE_ERRORS}


def to_wire(error: ProrlError) -> WireError:
    """The row of an error; what has none of its own is a server fault."""
    return next((wire for wire in WIRE_ERRORS if isinstance(error, wire.error)), _BY_TYPE["internal"])


def from_wire(name: str, message: str, hint: str) -> ProrlError:
    """The error a server named, or a `ServerFault` for a name this version does not know."""
    return _BY_TYPE.get(name, _BY_TYPE["internal"]).error(message, hint=hint)
