"""Browser sessions: a one-time code in a link starts a session, and a cookie carries it."""

import hashlib
import secrets

#: Maximum number of unused codes, and of sessions; the oldest are dropped first.
MOST_CODES, MOST_SESSIONS = 16, 64


class Logins:
    """One-time codes, and the sessions that they started. Only digests are kept."""

    def __init__(self) -> None:
        self._codes: dict[bytes, None] = {}
        self._sessions: dict[bytes, None] = {}

    def link(self) -> str:
        """Return path and query that sign a browser in, once."""
        return f"/dashboard/login?code={_new(self._codes, MOST_CODES)}"

    def redeem(self, code: str) -> str | None:
        """Return a new session for a code; None if the code was used, or is unknown."""
        digest = _digest(code)
        if digest not in self._codes:
            return None
        del self._codes[digest]
        return _new(self._sessions, MOST_SESSIONS)

    def known(self, session: str) -> bool:
        """Return whether a session was started here."""
        return _digest(session) in self._sessions


def cookie_name(port: int) -> str:
    """Return the cookie name of a service: with its port, as all ports of a host receive its cookies."""
    return f"prorl_session_{port}"


def _new(kept: dict[bytes, None], most: int) -> str:
    secret = secrets.token_urlsafe(32)
    kept[_digest(secret)] = None
    if len(kept) > most:
        del kept[next(iter(kept))]
    return secret


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()
