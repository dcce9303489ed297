"""Mapping of our typed failures to NeMo Gym's vocabulary and to HTTP."""

import httpx

from prorl_envs.errors import FailureKind, InputError, ProrlError, RolloutFailure, SandboxMemoryLimit
from prorl_envs.nemo.sessions import SessionExpired, SessionLost, SessionsFull
from prorl_envs.rollout.api.errors import NotFound, QueueFull, Retryable
from prorl_envs.rollout.api.types import Failure, Stage
from prorl_envs.tools.types import JsonObject

#: Text that an agent passes to the model if our infrastructure failed during a tool call. The model learns
#: that the episode is over, but not the reason.
TOOL_UNAVAILABLE = "The environment is no longer available. This episode is over."

#: Failures that NeMo Gym (0.5 and later) names itself. Servers name all other failures `<server>:<kind>`.
_SHARED_KINDS = {
    FailureKind.SANDBOX: "provider_unavailable",
    FailureKind.GRADER: "verifier_error",
    FailureKind.AGENT: "agent_run_error",
    FailureKind.NODE: "transport_unreachable",
    FailureKind.CANCELLED: "cancelled",
}
#: Errors that are more specific than their kind, and reasons why the rollout service cannot be reached.
_SHARED_ERRORS: tuple[tuple[type[Exception], str], ...] = (
    (SessionExpired, "session_expired"),
    (SessionLost, "session_lost"),
    (NotFound, "session_lost"),  # the rollout service no longer knows the job
    (SessionsFull, "provider_quota_exhausted"),
    (SandboxMemoryLimit, "provider_oom_killed"),
    (QueueFull, "provider_quota_exhausted"),
    (httpx.PoolTimeout, "transport_local_resource"),
    (httpx.TimeoutException, "transport_timeout"),
    (httpx.ConnectError, "transport_unreachable"),
    (httpx.TransportError, "transport_peer_drop"),
)
#: Stages whose timeout NeMo Gym names.
_TIMEOUTS = {Stage.RUN: "agent_timeout", Stage.EVAL: "verifier_error"}


def failure_kind(error: ProrlError) -> str:
    """Return the `failure_kind` of a response."""
    for cause in (error, error.__cause__):
        for known, word in _SHARED_ERRORS:
            if isinstance(cause, known):
                return word
    if not isinstance(error, RolloutFailure):
        return "prorl:input" if isinstance(error, InputError) else "prorl:service"
    if error.kind is FailureKind.TIMEOUT and (stage := getattr(error, "stage", None)) in _TIMEOUTS:
        return _TIMEOUTS[stage]
    return _SHARED_KINDS.get(error.kind, f"prorl:{error.kind}")


def as_error(failure: Failure) -> RolloutFailure:
    """Convert a rollout service's failure of a job to the corresponding error, with its `stage`."""
    fields = {"kind": failure.kind, "retryable": failure.retryable, "stage": failure.stage}
    error: RolloutFailure = type("JobFailed", (RolloutFailure,), fields)(failure.message, hint=failure.hint)
    return error


def may_succeed_later(error: ProrlError) -> bool:
    """Return true if another attempt may succeed."""
    return error.retryable if isinstance(error, RolloutFailure) else isinstance(error, Retryable | NotFound)


def http_status(error: ProrlError) -> int:
    """Return 503 if another attempt may succeed, 422 for the caller's mistakes, else 500."""
    return 503 if may_succeed_later(error) else 422 if isinstance(error, InputError) else 500


def error_body(error: ProrlError) -> JsonObject:
    """Return the JSON body of an error response: `{"error": {kind, message, hint, retryable}}`."""
    return {
        "error": {
            "kind": "input" if http_status(error) == 422 else failure_kind(error),
            "message": error.message,
            "hint": error.hint,
            "retryable": may_succeed_later(error),
        }
    }
