"""Who calls, and what is theirs.

The operator's token may do everything. A tenant's may do what concerns ids that begin with the tenant's name
and a slash: `alice` owns `alice/step7/a` and its jobs. So what belongs to whom is in the id itself, holds
over restarts and needs no table, and no tenant can take, or find out about, another's id. A job's token may
look at that job and end it.
"""

import base64
import binascii
import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Annotated

from fastapi import Depends, Request

from prorl_envs.config import ServerSettings, TenantSettings
from prorl_envs.rollout.errors import Conflict, Forbidden, NotFound

#: Routes that tenants may use; where a path names something, it must be theirs. All others are the
#: operator's, so that a new route is closed until somebody has thought about it.
TENANT_ROUTES = frozenset(
    {
        "/v1/groups",
        "/v1/groups/{group_id:path}",
        "/v1/jobs/{job_id:path}",
        "/v1/jobs/{job_id:path}/result",
        "/v1/jobs",
        "/v1/jobs/{job_id:path}/token",
        "/v1/jobs/{job_id:path}/partial",
        "/v1/jobs/{job_id:path}/tokens",
        "/v1/jobs/{job_id:path}/retry",
        "/v1/search",
        "/v1/summaries",
        "/v1/results",
        "/v1/results/stream",
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
JOB_ROUTES = frozenset(
    {
        "/v1/jobs/{job_id:path}",
        "/v1/jobs/{job_id:path}/result",
        "/v1/jobs/{job_id:path}/partial",
        "/v1/jobs/{job_id:path}/tokens",
        "/v1/environments",
        "/health",
        "/ready",
    }
)
_NAMES = ("group_id", "job_id", "batch_id", "episode_id")
_JOB_TOKEN = "prorl-job"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sends a request.

    Args:
        tenant: name of a tenant, "" for the operator.
        most_jobs: unfinished jobs it may have; None is no bound.
        most_batches: batches it may have running; None is no bound.
        job: the only job it may ask for, "" where it is not bound to one.
    """

    tenant: str = ""
    most_jobs: int | None = None
    most_batches: int | None = None
    job: str = ""

    @property
    def prefix(self) -> str:
        """How ids of the caller begin."""
        return f"{self.tenant}/" if self.tenant else ""

    @property
    def quota(self) -> tuple[str, int] | None:
        """The prefix of the caller's ids and the unfinished jobs it may have; None is no bound."""
        return (self.prefix, self.most_jobs) if self.most_jobs is not None else None

    @property
    def batches(self) -> tuple[str, int] | None:
        """The prefix of the caller's ids and the batches it may have running; None is no bound."""
        return (self.prefix, self.most_batches) if self.most_batches is not None else None

    def owns(self, name: str) -> bool:
        """Whether a group, job, batch or episode is the caller's."""
        return name == self.job if self.job else name.startswith(self.prefix)

    def leads(self, name: str) -> bool:
        """Whether a group or batch is the caller's as a whole: its tenant's, or the operator's."""
        return not self.job and self.owns(name)

    def check_ids(self, *names: str) -> None:
        """Raises:
        Forbidden: a new id is not the caller's to give.
        """
        for name in names:
            if not self.owns(name):
                raise Forbidden(f"{name!r} is not yours", hint=f"ids of yours begin with {self.prefix!r}")


OPERATOR = Caller()


class Keyring:
    """Tells callers by their tokens.

    Args:
        settings: the operator's token and those of the tenants.
    """

    def __init__(self, settings: ServerSettings) -> None:
        token = settings.token.get_secret_value().encode() if settings.token else None
        self._known = [
            (tenant.token.get_secret_value().encode(), _caller(name, tenant))
            for name, tenant in settings.tenants.items()
        ]
        if token is not None:
            self._known.append((token, OPERATOR))
        self._key = hmac.digest(token, b"jobs", sha256) if token is not None else None

    @property
    def locked(self) -> bool:
        """Whether a token is needed."""
        return bool(self._known)

    def caller(self, token: bytes) -> Caller | None:
        """Whose token it is; None for nobody's. Compares with each in constant time, so that the answer's
        delay tells nothing."""
        found = None
        for known, caller in self._known:
            if hmac.compare_digest(known, token):
                found = caller
        return found or self._job_caller(token)

    def job_token(self, job: str) -> str:
        """A token that may look at one job and end it, as long as the operator's token stays the same.

        Raises:
            Conflict: the service has no token to derive it from.
        """
        if self._key is None:
            raise Conflict("the service has no token of its own", hint="set server.token")
        name = base64.urlsafe_b64encode(job.encode()).decode().rstrip("=")
        return f"{_JOB_TOKEN}.{name}.{self._sign(self._key, job)}"

    def _job_caller(self, token: bytes) -> Caller | None:
        kind, _, rest = token.decode("latin-1").partition(".")
        name, _, signature = rest.partition(".")
        if kind != _JOB_TOKEN or self._key is None:
            return None
        try:
            job = base64.urlsafe_b64decode(name + "=" * (-len(name) % 4)).decode()
        except (binascii.Error, ValueError):  # which UnicodeDecodeError is
            return None
        right = hmac.compare_digest(self._sign(self._key, job).encode(), signature.encode("latin-1"))
        return Caller(job=job) if right and job else None

    @staticmethod
    def _sign(key: bytes, job: str) -> str:
        return hmac.digest(key, job.encode(), sha256).hex()


def _caller(name: str, tenant: TenantSettings) -> Caller:
    return Caller(name, tenant.jobs, tenant.batches)


# Dependencies are coroutines: the framework runs a plain function in a thread, and the way there and back
# waits for the interpreter twice, which is long where an event loop has much to do.


async def caller_of(request: Request) -> Caller:
    """Who sends a request, as the guard in front has found."""
    caller: Caller = request.state.caller
    return caller


TheCaller = Annotated[Caller, Depends(caller_of)]


async def authorize(request: Request) -> None:
    """Raises:
    Forbidden: the route is not for this caller.
    NotFound: what the path names is not the caller's, who is not told whether it exists.
    """
    caller = await caller_of(request)
    if caller == OPERATOR:
        return
    route: str = getattr(request.scope.get("route"), "path", "")
    if route not in (JOB_ROUTES if caller.job else TENANT_ROUTES):
        raise Forbidden("this is the operator's", hint="it takes the service's own token")
    names: Mapping[str, str] = request.path_params
    for kind in _NAMES:
        if kind in names and not caller.owns(names[kind]):
            raise NotFound(f"no {kind.removesuffix('_id')} {names[kind]!r}")
