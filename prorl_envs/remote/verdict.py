"""What `/verify` answered, as a grade or as the failure it is. Pure."""

import json
import math
from collections.abc import Mapping
from typing import Any

from prorl_envs.env.base import Grade
from prorl_envs.errors import EnvironmentFault, GraderError, RolloutFailure, SandboxError, ToolError
from prorl_envs.remote.http import Reply, json_object
from prorl_envs.tools.types import JsonObject

#: Most bytes of evidence that a result keeps; what does not fit is named.
MAX_EVIDENCE_BYTES = 256 * 1024
MAX_COMPONENTS = 256

#: The boundary that a mask's `failure_kind` names: NeMo Gym's words, and ours as `nemo/failures.py` has them.
_KINDS: dict[str, type[RolloutFailure]] = {
    "provider_unavailable": SandboxError,
    "prorl:sandbox": SandboxError,
    "prorl:tool": ToolError,
    "verifier_error": GraderError,
}
#: Fields of the answer that are no finding of the grader's.
_ENVELOPE = frozenset({"responses_create_params", "response", "reward", "mask_sample"})


class VerifierUnavailable(GraderError):
    """The server could not be asked for its verdict; another attempt may well get one."""

    retryable = True


def read_verdict(reply: Reply, row: Mapping[str, Any]) -> Grade:
    """The grade in a verify response.

    Args:
        reply: the answer to `/verify`.
        row: what was sent with it; a server repeats it, and what is repeated is no evidence.

    Raises:
        RolloutFailure: the server has no verdict, or masks the sample, or its answer is not to be believed.
    """
    if reply.status != 200:
        raise (VerifierUnavailable if reply.away else GraderError)(
            f"the server gave no verdict: {reply.excerpt()}", hint="the server's log says more"
        )
    answer = json_object(reply, GraderError)
    _check_mask(answer)
    reward = _number(answer.get("reward"))
    if reward is None:
        raise GraderError(f"the server's reward is {str(answer.get('reward'))[:100]!r}, not a finite number")
    own, evidence = answer.get("reward_components"), answer.get("evidence")
    if isinstance(own, dict) and isinstance(evidence, dict):  # a server of ours says both
        return Grade(reward=reward, components=_numbers(own), evidence=_bounded(evidence))
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
    """A finite number; True and False are none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _numbers(found: Mapping[str, Any]) -> dict[str, float]:
    """Numbers, and what is true or false, as parts of the reward."""
    parts = {}
    for name, value in list(found.items())[:MAX_COMPONENTS]:
        number = float(value) if isinstance(value, bool) else _number(value)
        if number is not None:
            parts[name[:200]] = number
    return parts


def _bounded(found: Mapping[str, Any]) -> JsonObject:
    kept: JsonObject = {}
    left_out, room = [], MAX_EVIDENCE_BYTES
    for name, value in found.items():
        size = len(name) + len(json.dumps(value))
        if size <= room:
            kept[name] = value
            room -= size
        else:
            left_out.append(name[:100])
    return kept | ({"left_out": left_out[:100]} if left_out else {})
