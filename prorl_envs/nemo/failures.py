"""Mapping of our typed failures to NeMo Gym's vocabulary and to HTTP."""

from prorl_envs.errors import FailureKind, InputError, ProrlError, RolloutFailure
from prorl_envs.nemo.sessions import SessionExpired, SessionLost
from prorl_envs.rollout.api.errors import QueueFull, Unavailable
from prorl_envs.rollout.api.types import Failure
from prorl_envs.tools.types import JsonObject

#: Text that an agent passes to the model if our infrastructure failed during a tool call. The model learns
#: that the episode is over, but not the reason.
TOOL_UNAVAILABLE = "The environment is no longer available. This episode is over."

#: Failures that NeMo Gym (0.5 and later) names itself. Servers name all other failures `<server>:<kind>`.
_SHARED_KINDS = {
    FailureKind.SANDBOX: "provider_unavailable",
    FailureKind.GRADER: "verifier_error",
    FailureKind.CANCELLED: "cancelled",
}


def failure_kind(failure: RolloutFailure) -> str:
    """Return the `failure_kind` of a verify response."""
    if isinstance(failure, SessionExpired):
        return "session_expired"
    if isinstance(failure, SessionLost):
        return "session_lost"
    return _SHARED_KINDS.get(failure.kind, f"prorl:{failure.kind}")


def as_error(failure: Failure) -> RolloutFailure:
    """Convert a rollout service's failure of a job to the corresponding error."""
    fields = {"kind": failure.kind, "retryable": failure.retryable}
    error: RolloutFailure = type("JobFailed", (RolloutFailure,), fields)(failure.message, hint=failure.hint)
    return error


def http_status(error: ProrlError) -> int:
    """Return 422 for the caller's mistakes, 503 if another attempt may succeed, else 500."""
    if isinstance(error, InputError):
        return 422
    if isinstance(error, QueueFull | Unavailable):
        return 503
    return 503 if isinstance(error, RolloutFailure) and error.retryable else 500


def error_body(error: ProrlError) -> JsonObject:
    """Return the JSON body of an error response: `{"error": {kind, message, hint, retryable}}`."""
    failure = error if isinstance(error, RolloutFailure) else None
    return {
        "error": {
            "kind": failure_kind(failure) if failure else "input",
            "message": error.message,
            "hint": error.hint,
            "retryable": failure is not None and failure.retryable,
        }
    }
