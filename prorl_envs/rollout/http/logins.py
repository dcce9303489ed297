"""Browser sessions: a one-time code in a link starts a session, whose secret is in a cookie."""

import hashlib
import secrets

#: Maximum numbers of unused codes and of sessions. The oldest are dropped first.
MAX_CODES, MAX_SESSIONS = 16, 64


class Logins:
    """One-time codes, and the sessions that they started. Only digests of codes and sessions are stored."""

    def __init__(self) -> None:
        self._codes: dict[bytes, None] = {}
        self._sessions: dict[bytes, None] = {}

    def link(self) -> str:
        """Return path and query of a link that signs one browser in, once."""
        return f"/dashboard/login?code={_new(self._codes, MAX_CODES)}"

    def redeem(self, code: str) -> str | None:
        """Return the secret of a new session; None if the code was used or is unknown."""
        digest = _digest(code)
        if digest not in self._codes:
            return None
        del self._codes[digest]
        return _new(self._sessions, MAX_SESSIONS)

    def known(self, session: str) -> bool:
        """Return True if the session was started by this service and is not dropped."""
        return _digest(session) in self._sessions


def cookie_name(port: int) -> str:
    """Return the name of the session cookie, with the port: all ports of a host receive the same cookies."""
    return f"prorl_session_{port}"


def _new(digests: dict[bytes, None], limit: int) -> str:
    secret = secrets.token_urlsafe(32)
    digests[_digest(secret)] = None
    if len(digests) > limit:
        del digests[next(iter(digests))]
    return secret


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()
