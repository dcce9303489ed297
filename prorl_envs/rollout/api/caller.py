"""Authenticated sender of a request."""

from dataclasses import dataclass

from prorl_envs.rollout.api.errors import Forbidden


@dataclass(frozen=True, slots=True)
class Caller:
    """Authenticated sender of a request.

    Args:
        tenant: name of a tenant, "" for the operator.
        max_jobs: quota of unfinished jobs; None means no limit.
        max_batches: quota of running batches; None means no limit.
        job: the only job that the caller may access; "" if the caller is not restricted to one job.
    """

    tenant: str = ""
    max_jobs: int | None = None
    max_batches: int | None = None
    job: str = ""

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
        return name == self.job if self.job else name.startswith(self.prefix)

    def owns_all(self, name: str) -> bool:
        """Return True if a group or batch with all its jobs belongs to the caller. A caller that is
        restricted to one job owns no group."""
        return not self.job and self.owns(name)

    def check_ids(self, *names: str) -> None:
        """Check that the caller may use these new ids.

        Raises:
            Forbidden: an id does not belong to the caller.
        """
        for name in names:
            if not self.owns(name):
                raise Forbidden(f"{name!r} is not yours", hint=f"your ids start with {self.prefix!r}")


OPERATOR = Caller()
