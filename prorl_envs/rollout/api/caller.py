"""Sender of a request, as the service knows it."""

from dataclasses import dataclass

from prorl_envs.rollout.api.errors import Forbidden


@dataclass(frozen=True, slots=True)
class Caller:
    """Sender of a request.

    Args:
        tenant: name of a tenant, "" for the operator.
        most_jobs: quota of unfinished jobs; None is no bound.
        most_batches: quota of running batches; None is no bound.
        job: the only job that the caller may access; "" if it is not bound to one job.
    """

    tenant: str = ""
    most_jobs: int | None = None
    most_batches: int | None = None
    job: str = ""

    @property
    def prefix(self) -> str:
        """Prefix of the caller's ids."""
        return f"{self.tenant}/" if self.tenant else ""

    @property
    def quota(self) -> tuple[str, int] | None:
        """Prefix of the caller's ids and its quota of unfinished jobs; None is no bound."""
        return (self.prefix, self.most_jobs) if self.most_jobs is not None else None

    @property
    def batches(self) -> tuple[str, int] | None:
        """Prefix of the caller's ids and its quota of running batches; None is no bound."""
        return (self.prefix, self.most_batches) if self.most_batches is not None else None

    def owns(self, name: str) -> bool:
        """Return True if a group, job, batch or episode belongs to the caller."""
        return name == self.job if self.job else name.startswith(self.prefix)

    def leads(self, name: str) -> bool:
        """Return True if a whole group or batch belongs to the caller: to its tenant, or to the operator."""
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
