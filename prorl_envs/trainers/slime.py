"""slime (August 2026): custom generate function whose episodes the rollout service runs.

    --custom-generate-function-path prorl_envs.trainers.slime.generate
    --dynamic-sampling-filter-path prorl_envs.trainers.slime.keep_informative
    --custom-config-path slime.yaml        # with prorl_url and prorl_environment
    --input-key prompt --metadata-key metadata

Both functions are needed: a failed episode has no reward, but slime requires one, so the filter, which
receives whole groups, sets a replacement. When slime has enough groups it aborts all others; their episodes
are cancelled at the service. `slime` is imported only to detect the abort and to return the filter's output.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from prorl_envs.model.types import Sampling
from prorl_envs.rollout.api.types import AgentLimits, Result
from prorl_envs.trainers.advantages import neutral_rewards, spread
from prorl_envs.trainers.asking import GroupTemplate, sampling_of
from prorl_envs.trainers.rollouts import shared
from prorl_envs.trainers.rows import Row, RowStatus, rows_of
from prorl_envs.trainers.tasks import chat_prompt, from_text, to_text

#: Seconds between two checks whether slime has enough groups.
CHECK_S = 0.5

# slime has no status for rejected samples. They are marked as aborted, like cancelled samples.
_STATUS = {
    RowStatus.COMPLETED: "completed",
    RowStatus.TRUNCATED: "truncated",
    RowStatus.FAILED: "aborted",
    RowStatus.ABORTED: "aborted",
    RowStatus.REJECTED: "aborted",
}


async def generate(
    args: Any, sample: Any, sampling_params: Mapping[str, Any], evaluation: bool = False
) -> Any:
    """Run one episode. Use it as slime's `--custom-generate-function-path`.

    Args:
        args: slime's arguments, with `prorl_url`, `prorl_environment` and optionally `prorl_limits`, a dict.
        sample: slime's sample. Its `metadata` contains the task, as `rows` writes it.
        sampling_params: only temperature, top_p and max_new_tokens are used.
        evaluation: request a failed episode again, since slime runs no filter in an evaluation.

    Returns:
        The sample with the fields of the episode, or a list of samples if the episode has several rows.

    Raises:
        InputError: the sample contains no task, or the service refuses it.
        EpisodeFailed: in an evaluation, all attempts failed.
        QueueFull, Unavailable: the service stays full or unreachable.
    """
    if evaluation:
        template, task, sampling = _parse_arguments(args, sample, sampling_params)
        result = await (await shared(template.url)).episode(template, "evaluation", task, sampling=sampling)
        return _filled(sample, result)
    from slime.rollout.sglang_rollout import GenerateState

    return await episode(args, sample, sampling_params, lambda: bool(GenerateState(args).aborted))


async def episode(
    args: Any, sample: Any, sampling_params: Mapping[str, Any], is_over: Callable[[], bool]
) -> Any:
    """Run one episode like `generate`. Cancel it at the service when `is_over` returns True."""
    template, task, sampling = _parse_arguments(args, sample, sampling_params)
    request = template.group("sample", task, 1, sampling=sampling)
    waiting = asyncio.create_task((await shared(template.url)).group(request))
    try:
        while not waiting.done():
            await asyncio.wait([waiting], timeout=CHECK_S)
            if not waiting.done() and is_over():
                sample.status = type(sample).Status("aborted")
                return sample
        [result] = waiting.result()
    finally:
        waiting.cancel()
        await asyncio.wait([waiting])
    return _filled(sample, result)


def keep_informative(args: Any, samples: Sequence[Any], **_: Any) -> Any:
    """Keep groups whose rewards differ. Use it as slime's `--dynamic-sampling-filter-path`. Samples without a
    reward get the mean of their group and are excluded from the loss (`remove_sample`)."""
    from slime.rollout.filter_hub.base_types import DynamicFilterOutput

    keep, reason = settle(samples)
    return DynamicFilterOutput(keep=keep, reason=reason)


def settle(samples: Sequence[Any]) -> tuple[bool, str | None]:
    """Return True and None to keep a group, or False and the reason. Sets missing rewards of kept groups.

    Args:
        samples: slime's samples. An episode with several rows is a list of samples.
    """
    episodes = [each if isinstance(each, list) else [each] for each in samples]
    rewards = [next((row.reward for row in rows if row.reward is not None), None) for rows in episodes]
    if spread(rewards) == 0:
        return False, "failed" if None in rewards and len(set(rewards)) == 1 else "equal_rewards"
    for rows, reward in zip(episodes, neutral_rewards([rewards])[0], strict=True):
        for row in rows:
            row.remove_sample = row.reward is None
            row.reward = reward
    return True, None


def rows(tasks: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Convert task rows to rows of slime's data sets, which are JSONL files."""
    return [
        {
            "prompt": chat_prompt(task),
            "metadata": {"task": to_text(task)},
        }
        for task in tasks
    ]


def as_slime(result: Result, index: int | None) -> list[dict[str, Any]]:
    """Convert an episode to the fields of slime's `Sample`s, one for each row. Rows of one episode share a
    `rollout_id`, so that slime normalises their loss per episode.

    Args:
        result: result of the episode.
        index: index of slime's sample.
    """
    return [_fields(row, index) for row in rows_of(result)]


def _fields(row: Row, index: int | None) -> dict[str, Any]:
    row = row.filled([0], 0)
    return {
        "tokens": row.prompt_ids + row.response_ids,
        "response_length": len(row.response_ids),
        "loss_mask": row.mask,
        "rollout_log_probs": row.logprobs,
        "reward": row.reward if row.trains else None,
        "status": _STATUS[row.status],
        "weight_versions": [span.version for span in row.versions],
        "rollout_id": index if row.count > 1 else None,
        "response": row.messages[-1].get("content") or "" if row.messages else "",
        "metadata": {"job_id": row.job_id, "stop_reason": str(row.stop_reason), "failure": row.failure},
    }


def _parse_arguments(
    args: Any, sample: Any, params: Mapping[str, Any]
) -> tuple[GroupTemplate, dict[str, Any], Sampling]:
    """Return the group template, the task and the sampling parameters."""
    limits = getattr(args, "prorl_limits", None)
    template = GroupTemplate(
        args.prorl_url, args.prorl_environment, limits=AgentLimits.model_validate(limits) if limits else None
    )
    return template, from_text((sample.metadata or {}).get("task")), sampling_of(params)


def _filled(sample: Any, result: Result) -> Any:
    filled = [_with_fields(sample, fields) for fields in as_slime(result, sample.index)]
    return filled if len(filled) > 1 else filled[0]


def _with_fields(sample: Any, fields: Mapping[str, Any]) -> Any:
    """Return a copy of the sample with these fields."""
    filled = type(sample).from_dict(sample.to_dict())
    for name, value in fields.items():
        setattr(filled, name, value)
    filled.status = type(sample).Status(fields["status"])
    filled.metadata = {**(sample.metadata or {}), **fields["metadata"]}
    return filled
