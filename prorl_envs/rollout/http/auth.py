"""Authentication by token or by the session of a browser, and authorization by id.

The operator's token permits everything. A tenant's token is limited to ids that start with the tenant's name
and a slash: `alice` owns `alice/step7/a` and its jobs. So the id itself names the owner: ownership survives
restarts and needs no table, and a tenant can neither use another tenant's id nor find out that it exists.
"""

import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Annotated

from fastapi import Depends, Request

from prorl_envs.config import ServerSettings, TenantSettings
from prorl_envs.errors import InputError
from prorl_envs.rollout.api.errors import Forbidden, NotFound

#: Routes that tenants may use, for ids of their own. All other routes are for the operator only, so a new
#: route is closed to tenants until it is listed here.
TENANT_ROUTES = frozenset(
    {
        "/v1/groups",
        "/v1/groups/{group_id:path}",
        "/v1/jobs/{job_id:path}",
        "/v1/jobs/{job_id:path}/result",
        "/v1/jobs",
        "/v1/jobs/{job_id:path}/partial",
        "/v1/jobs/{job_id:path}/tokens",
        "/v1/jobs/{job_id:path}/markdown",
        "/v1/jobs/{job_id:path}/request",
        "/v1/jobs/{job_id:path}/retry",
        "/v1/jobs/{job_id:path}/branch",
        "/v1/jobs/{job_id:path}/rewind",
        "/v1/search",
        "/v1/summaries",
        "/v1/results",
        "/v1/results/acknowledge",
        "/v1/batches",
        "/v1/batches/{batch_id:path}",
        "/v1/batches/{batch_id:path}/tasks",
        "/v1/batches/{batch_id:path}/groups",
        "/v1/batches/{batch_id:path}/results",
        "/v1/episodes",
        "/v1/episodes/{episode_id:path}",
        "/v1/episodes/{episode_id:path}/endpoint",
        "/v1/episodes/{episode_id:path}/run",
        "/v1/episodes/{episode_id:path}/eval",
        "/v1/status",
        "/v1/environments",
        "/health",
        "/ready",
    }
)
_NAMES = ("group_id", "job_id", "batch_id", "episode_id")
#: Maximum numbers of unused codes and of sessions. The oldest are dropped first.
MAX_CODES, MAX_SESSIONS = 16, 64


def require_token(settings: ServerSettings) -> None:
    """Refuse settings that give other machines access without a token.

    Raises:
        InputError: the host is not loopback, and there is no token.
    """
    if not settings.loopback and settings.token is None and not settings.tenants:
        raise InputError(
            f"binding {settings.host} gives other machines access, so a token is needed",
            hint="set server.token (PRORL_SERVER__TOKEN), 16 characters or more",
        )


@dataclass(frozen=True, slots=True)
class Caller:
    """Authenticated sender of a request.

    Args:
        tenant: name of a tenant, "" for the operator.
        max_jobs: quota of unfinished jobs; None means no limit.
        max_batches: quota of running batches; None means no limit.
    """

    tenant: str = ""
    max_jobs: int | None = None
    max_batches: int | None = None

    @property
    def prefix(self) -> str:
        """Prefix of the caller's ids."""
        return f"{self.tenant}/" if self.tenant else ""

    @property
    def quota(self) -> tuple[str, int] | None:
        """Prefix of the caller's ids and its quota of unfinished jobs; None means no limit."""
        return (self.prefix, self.max_jobs) if self.max_jobs is not None else None

    @property
    def batches(self) -> tuple[str, int] | None:
        """Prefix of the caller's ids and its quota of running batches; None means no limit."""
        return (self.prefix, self.max_batches) if self.max_batches is not None else None

    def owns(self, name: str) -> bool:
        """Return True if a group, job, batch or episode belongs to the caller."""
        return name.startswith(self.prefix)

    def check_ids(self, *names: str) -> None:
        """Check that the caller may use these new ids.

        Raises:
            Forbidden: an id does not belong to the caller.
        """
        for name in names:
            if not self.owns(name):
                raise Forbidden(f"{name!r} is not yours", hint=f"your ids start with {self.prefix!r}")


OPERATOR = Caller()


class Logins:
    """One-time codes of links, and the browser sessions that they started. Only their digests are stored."""

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
    return sha256(secret.encode("utf-8", "surrogatepass")).digest()


class TokenStore:
    """Finds callers by their tokens.

    Args:
        settings: the tokens of the operator and of the tenants.
        logins: browser sessions of the operator.
    """

    def __init__(self, settings: ServerSettings, logins: Logins | None = None) -> None:
        self.logins = logins or Logins()
        token = settings.token.get_secret_value().encode() if settings.token else None
        self._callers = [
            (tenant.token.get_secret_value().encode(), _caller(name, tenant))
            for name, tenant in settings.tenants.items()
        ]
        if token is not None:
            self._callers.append((token, OPERATOR))

    @property
    def locked(self) -> bool:
        """True if a token is needed."""
        return bool(self._callers)

    def caller(self, token: bytes) -> Caller | None:
        """Return the caller with this token; None if the token is unknown. The token is compared with every
        known token in constant time, so the response time reveals nothing."""
        found = None
        for known, caller in self._callers:
            if hmac.compare_digest(known, token):
                found = caller
        return found


def _caller(name: str, tenant: TenantSettings) -> Caller:
    return Caller(name, tenant.jobs, tenant.batches)


# Dependencies are coroutines: FastAPI runs a plain function in a thread, and both switches between threads
# wait for the interpreter lock, which takes long with a busy event loop.


async def caller_of(request: Request) -> Caller:
    """Return the caller of a request, which `TokenGuard` has authenticated."""
    caller: Caller = request.state.caller
    return caller


CurrentCaller = Annotated[Caller, Depends(caller_of)]


async def authorize(request: Request) -> None:
    """Check that the caller may use the route, and owns the ids in the path.

    Raises:
        Forbidden: the caller may not use the route.
        NotFound: an id in the path belongs to another caller. The error does not reveal whether it exists.
    """
    caller = await caller_of(request)
    if caller == OPERATOR:
        return
    route: str = getattr(request.scope.get("route"), "path", "")
    if route not in TENANT_ROUTES:
        raise Forbidden("only the operator may do this", hint="use the service's own token")
    names: Mapping[str, str] = request.path_params
    for kind in _NAMES:
        if kind in names and not caller.owns(names[kind]):
            raise NotFound(f"no {kind.removesuffix('_id')} {names[kind]!r}")
