"""Conversion of the response to `/verify` into a grade or a typed failure. Pure."""

import json
import math
from collections.abc import Mapping
from typing import Any

from prorl_envs.env.base import Grade
from prorl_envs.errors import EnvironmentFault, GraderError, RolloutFailure, SandboxError, ToolError
from prorl_envs.remote.http import HttpReply, json_object
from prorl_envs.tools.types import JsonObject

#: Maximum number of bytes of evidence in a result. The names of omitted fields are listed.
MAX_EVIDENCE_BYTES = 256 * 1024
MAX_COMPONENTS = 256

#: Failures by `failure_kind` of a masked sample: values of NeMo Gym, and ours, see `nemo/failures.py`.
_KINDS: dict[str, type[RolloutFailure]] = {
    "provider_unavailable": SandboxError,
    "provider_quota_exhausted": SandboxError,
    "prorl:sandbox": SandboxError,
    "prorl:tool": ToolError,
    "verifier_error": GraderError,
}
#: Fields of the response that the grader did not produce.
_ENVELOPE = frozenset({"responses_create_params", "response", "reward", "mask_sample"})


class VerifierUnavailable(GraderError):
    """Error: the server did not answer the verify request. Another attempt may succeed."""

    retryable = True


def read_verdict(reply: HttpReply, row: Mapping[str, Any]) -> Grade:
    """Return the grade in a verify response.

    Args:
        reply: the response to `/verify`.
        row: the row that was sent. The response repeats its fields, so equal fields are not evidence.

    Raises:
        RolloutFailure: the server returned no verdict or an invalid response, or masks the sample.
    """
    if reply.status != 200:
        raise (VerifierUnavailable if reply.unavailable else GraderError)(
            f"the server returned no verdict: {reply.excerpt()}", hint="see the server's log"
        )
    answer = json_object(reply, GraderError)
    _check_mask(answer)
    reward = _number(answer.get("reward"))
    if reward is None:
        raise GraderError(f"the server's reward is {str(answer.get('reward'))[:100]!r}, not a finite number")
    components, evidence = answer.get("reward_components"), answer.get("evidence")
    if isinstance(components, dict) and isinstance(evidence, dict):  # only servers of this package send both
        return Grade(reward=reward, components=_numbers(components), evidence=_bounded(evidence))
    found = {key: value for key, value in answer.items() if key not in _ENVELOPE and row.get(key) != value}
    return Grade(reward=reward, components=_numbers(found), evidence=_bounded(found))


def _check_mask(answer: JsonObject) -> None:
    kind = answer.get("failure_kind") or answer.get("_ng_failure_class")
    if not kind and not answer.get("mask_sample"):
        return
    reason = str(answer.get("failure_reason") or "no reason is given")[:2000]
    failure = _KINDS.get(str(kind), EnvironmentFault)
    raise failure(f"the server masks this sample: {str(kind or 'without a kind')[:200]}: {reason}")


def _number(value: object) -> float | None:
    """Return the value if it is a finite number, otherwise None. Booleans are not numbers."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _numbers(found: Mapping[str, Any]) -> dict[str, float]:
    """Return the numeric and Boolean fields as components of the reward."""
    parts = {}
    for name, value in list(found.items())[:MAX_COMPONENTS]:
        number = float(value) if isinstance(value, bool) else _number(value)
        if number is not None:
            parts[name[:200]] = number
    return parts


def _bounded(found: Mapping[str, Any]) -> JsonObject:
    evidence: JsonObject = {}
    omitted, room = [], MAX_EVIDENCE_BYTES
    for name, value in found.items():
        size = len(name) + len(json.dumps(value))
        if size <= room:
            evidence[name] = value
            room -= size
        else:
            omitted.append(name[:100])
    return evidence | ({"left_out": omitted[:100]} if omitted else {})
