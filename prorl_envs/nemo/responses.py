"""Conversion of a rollout service result to the Responses items that trainers read from NeMo Gym. Pure;
imports nothing of NeMo Gym.

The last item of each model call carries `prompt_token_ids`, `generation_token_ids` and
`generation_log_probs`. NeMo RL joins the calls to one row, and requires that each prompt starts with all
earlier tokens. This holds by construction, because prompts are prefixes of one ledger. It is checked anyway
before the result is used for training.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from prorl_envs.rollout.api.types import Result, Trajectory, TurnRecord
from prorl_envs.rollout.client.trajectory_checks import NotContiguous, check_trajectory
from prorl_envs.tools.types import JsonObject


def output_items(result: Result) -> list[JsonObject]:
    """Return the model's answers and their observations as Responses output items, with the tokens of each
    model call.

    Args:
        result: result of a job. If it has no trajectory, the list is empty.

    Raises:
        NotContiguous: the trajectory is inconsistent with its turns, or has several rows.
    """
    trajectory = result.trajectory
    if trajectory is None or not trajectory.turns:
        return []
    if result.forks:
        hint = "NeMo accepts only one row: set service.reasoning to keep"
        raise NotContiguous("the episode has several rows", hint=hint)
    check_trajectory(trajectory)
    messages = _since_first_answer(result.messages, len(trajectory.turns))
    turns = iter(trajectory.turns)
    items: list[JsonObject] = []
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            answer = list(_answer(message, f"{result.job_id}-{number}"))
            answer[-1] |= _tokens(trajectory, next(turns))
            items += answer
        elif message["role"] == "tool":
            items.append(
                {
                    "type": "function_call_output",
                    "call_id": message["tool_call_id"],
                    "output": message["content"],
                }
            )
        else:
            items.append({"type": "message", "role": message["role"], "content": message["content"]})
    check_contiguous(items)
    return items


def check_contiguous(items: Iterable[Mapping[str, Any]]) -> None:
    """Check the condition that NeMo RL requires of a row: each prompt starts with all earlier tokens.

    Raises:
        NotContiguous: names the call and the token that break the condition.
    """
    seen: list[int] = []
    for call, item in enumerate(item for item in items if "generation_token_ids" in item):
        prompt, generated = item["prompt_token_ids"], item["generation_token_ids"]
        if prompt[: len(seen)] != seen:
            same = next(
                (i for i, (a, b) in enumerate(zip(prompt, seen, strict=False)) if a != b), len(prompt)
            )
            raise NotContiguous(
                f"the prompt of model call {call} differs from the history at token {same} of {len(seen)}",
                hint="the history was rewritten or tokenised again; such a rollout has several rows",
            )
        if len(generated) != len(item["generation_log_probs"]):
            raise NotContiguous(f"model call {call} has different numbers of tokens and log-probabilities")
        seen = [*prompt, *generated]


def usage(trajectory: Trajectory | None) -> JsonObject:
    """Return the input and output tokens of the model, over all calls."""
    turns = trajectory.turns if trajectory else []
    prompts, sampled = sum(turn.start for turn in turns), sum(turn.end - turn.start for turn in turns)
    return {
        "input_tokens": prompts,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompts + sampled,
    }


def _since_first_answer(messages: Sequence[Mapping[str, Any]], turns: int) -> Sequence[Mapping[str, Any]]:
    """Return the conversation from the first sampled answer on. The prompt may contain example answers."""
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if len(answers) < turns:
        raise NotContiguous(f"{turns} model calls, but {len(answers)} answers in the conversation")
    return messages[answers[-turns] :]


def _answer(message: Mapping[str, Any], item_id: str) -> Iterator[JsonObject]:
    """Yield the items of one answer, at least one."""
    calls = message.get("tool_calls") or ()
    if message["content"] or not calls:
        text = {"type": "output_text", "text": message["content"], "annotations": []}
        yield {
            "type": "message",
            "id": f"msg-{item_id}",
            "role": "assistant",
            "status": "completed",
            "content": [text],
        }
    for call in calls:
        yield {
            "type": "function_call",
            "id": f"fc-{item_id}",
            "call_id": call["id"],
            "name": call["function"]["name"],
            "arguments": call["function"]["arguments"],
            "status": "completed",
        }


def _tokens(trajectory: Trajectory, turn: TurnRecord) -> JsonObject:
    return {
        "prompt_token_ids": trajectory.ids[: turn.start],
        "generation_token_ids": trajectory.ids[turn.start : turn.end],
        "generation_log_probs": trajectory.logprobs[turn.start : turn.end],
    }
