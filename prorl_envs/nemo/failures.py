"""How our typed failures look in NeMo Gym's vocabulary and over HTTP."""

from prorl_envs.errors import FailureKind, InputError, ProrlError, RolloutFailure
from prorl_envs.nemo.sessions import SessionExpired, SessionLost
from prorl_envs.rollout.errors import Full, Unavailable
from prorl_envs.rollout.types import Failure
from prorl_envs.tools.types import JsonObject

#: What an agent passes on to the model when a tool call met a failure of ours. The model learns that the
#: episode is over, and nothing of why.
TOOL_UNAVAILABLE = "The environment is no longer available. This episode is over."

#: NeMo Gym (0.5 and later) names failures `<domain>_<condition>`, and asks for `<server>:<kind>` elsewhere.
_SHARED_KINDS = {
    FailureKind.SANDBOX: "provider_unavailable",
    FailureKind.GRADER: "verifier_error",
    FailureKind.CANCELLED: "cancelled",
}


def failure_kind(failure: RolloutFailure) -> str:
    """The `failure_kind` of a verify response."""
    if isinstance(failure, SessionExpired):
        return "session_expired"
    if isinstance(failure, SessionLost):
        return "session_lost"
    return _SHARED_KINDS.get(failure.kind, f"prorl:{failure.kind}")


def as_error(failure: Failure) -> RolloutFailure:
    """What a rollout service says of a job that has no reward, as the error that it was there."""
    fields = {"kind": failure.kind, "retryable": failure.retryable}
    error: RolloutFailure = type("JobFailed", (RolloutFailure,), fields)(failure.message, hint=failure.hint)
    return error


def http_status(error: ProrlError) -> int:
    """422 for the caller's mistakes, 503 where another attempt may do well, else 500."""
    if isinstance(error, InputError):
        return 422
    if isinstance(error, Full | Unavailable):
        return 503
    return 503 if isinstance(error, RolloutFailure) and error.retryable else 500


def error_body(error: ProrlError) -> JsonObject:
    """The JSON body of an error response: `{"error": {kind, message, hint, retryable}}`."""
    failure = error if isinstance(error, RolloutFailure) else None
    return {
        "error": {
            "kind": failure_kind(failure) if failure else "input",
            "message": error.message,
            "hint": error.hint,
            "retryable": failure is not None and failure.retryable,
        }
    }
