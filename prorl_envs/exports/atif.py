"""Export in Harbor's Agent Trajectory Interchange Format (ATIF, version 1.7).

The specification is RFC 0001 of Harbor (https://harborframework.com/docs/trajectory-format).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from prorl_envs.exports.chat import message_of
from prorl_envs.rollout.api.types import Result, Trajectory, TurnRecord
from prorl_envs.runs.folder import RunDescription
from prorl_envs.strict_json import json_object

#: Harbor's current version is 1.8, which adds audio; NeMo Relay reads 1.7.
SCHEMA_VERSION = "ATIF-v1.7"
_SOURCES = {"system": "system", "developer": "system", "assistant": "agent"}
#: Default name of the agent, and its version if the run is unknown.
_AGENT, _UNKNOWN = "prorl-envs", "unknown"
#: Fields of a result without an equivalent in ATIF, copied unchanged to `extra`.
_EXTRA = {
    *("environment", "task_id", "group_id", "sample", "attempts", "state", "stop_reason", "failure"),
    *("reward", "mask_sample", "components", "evidence", "timings", "metadata"),
}


def atif_of(result: Result, run: RunDescription | None) -> dict[str, Any] | None:
    """Return the ATIF document of a result; None if the result has no messages.

    If the result has one model call for each of the model's messages, steps contain the token ids,
    log-probabilities and token counts of their call. `extra` contains the reward and all other fields.

    Args:
        result: the result.
        run: description of the result's run; None if unknown.
    """
    if not result.messages:
        return None
    _, _, agent = result.environment.partition("@")
    calls = [(row, turn) for row in result.rows for turn in row.turns]
    steps = _steps([message_of(message) for message in result.messages], calls)
    return {
        "schema_version": SCHEMA_VERSION,
        "session_id": result.job_id,
        "trajectory_id": result.job_id,
        "agent": {
            "name": agent or _AGENT,
            "version": run.version if run else _UNKNOWN,
            **({"model_name": run.model} if run and run.model else {}),
            **({"tool_definitions": result.tools} if result.tools else {}),
        },
        "steps": steps,
        "final_metrics": _final_metrics([turn for _, turn in calls], len(steps)),
        "extra": result.model_dump(mode="json", include=_EXTRA),
    }


def _steps(
    messages: Sequence[Mapping[str, Any]], calls: Sequence[tuple[Trajectory, TurnRecord]]
) -> list[dict[str, Any]]:
    """Return a step for each message, except tool results, which are observations of the previous step."""
    answers = sum(message["role"] == "assistant" for message in messages)
    metrics = [_metrics(row, turn) for row, turn in calls] if answers == len(calls) else []
    remaining = iter(metrics)
    steps: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "tool" and steps:
            results = steps[-1].setdefault("observation", {"results": []})["results"]
            results.append(_observation(message, steps[-1]))
            continue
        step = {
            "step_id": len(steps) + 1,
            "source": _SOURCES.get(message["role"], "user"),
            "message": message["content"],
        }
        if step["source"] == "agent":
            step.update(_agent_fields(message))
            if of_call := next(remaining, None):
                step.update(of_call)
        steps.append(step)
    return steps


def _agent_fields(message: Mapping[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if "reasoning_content" in message:
        fields["reasoning_content"] = message["reasoning_content"]
    if "tool_calls" in message:
        fields["tool_calls"] = [_tool_call(call) for call in message["tool_calls"]]
    return fields


def _tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a tool call. Arguments that are not a JSON object are stored as text in `extra`."""
    text = call["function"]["arguments"]
    converted: dict[str, Any] = {"tool_call_id": call["id"], "function_name": call["function"]["name"]}
    arguments = json_object(text)
    if arguments is not None:
        return converted | {"arguments": arguments}
    return converted | {"arguments": {}, "extra": {"arguments": text}}


def _observation(message: Mapping[str, Any], step: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a tool result. As specified, it names its call only if the step contains this call."""
    id_ = message.get("tool_call_id", "")
    if any(call["tool_call_id"] == id_ for call in step.get("tool_calls", ())):
        return {"source_call_id": id_, "content": message["content"]}
    return {"content": message["content"], **({"extra": {"tool_call_id": id_}} if id_ else {})}


def _metrics(row: Trajectory, turn: TurnRecord) -> dict[str, Any]:
    metrics: dict[str, Any] = {"prompt_tokens": turn.start, "completion_tokens": turn.end - turn.start}
    if turn.cached_tokens is not None:
        metrics["cached_tokens"] = turn.cached_tokens
    if turn.token_exact and row.token_exact:
        metrics["completion_token_ids"] = row.ids[turn.start : turn.end]
        metrics["logprobs"] = row.logprobs[turn.start : turn.end]
    metrics["extra"] = {
        "finish_reason": turn.finish_reason,
        "weight_version": turn.weight_version,
        "model_s": turn.model_s,
        "tools_s": turn.tools_s,
    }
    return {"metrics": metrics, "llm_call_count": 1}


def _final_metrics(turns: Sequence[TurnRecord], steps: int) -> dict[str, Any]:
    cached = [turn.cached_tokens for turn in turns if turn.cached_tokens is not None]
    return {
        "total_prompt_tokens": sum(turn.start for turn in turns),
        "total_completion_tokens": sum(turn.end - turn.start for turn in turns),
        **({"total_cached_tokens": sum(cached)} if cached and len(cached) == len(turns) else {}),
        "total_steps": steps,
    }
