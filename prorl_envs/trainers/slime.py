"""slime (August 2026): samples whose episodes the rollout service runs.

    --custom-generate-function-path prorl_envs.trainers.slime.generate
    --dynamic-sampling-filter-path prorl_envs.trainers.slime.keep_informative
    --custom-config-path slime.yaml        # with prorl_url and prorl_environment
    --input-key prompt --metadata-key metadata

Both functions are needed: an episode that failed has no reward, and the filter, which sees whole groups, sets
the replacement that slime requires. When slime has enough groups it aborts the rest; their episodes are
cancelled at the service. `slime` is imported only to detect the abort and to return the filter's output.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from prorl_envs.errors import InputError
from prorl_envs.model.types import Sampling
from prorl_envs.rollout.api.types import AgentLimits, Result
from prorl_envs.trainers.advantages import neutral_rewards, spread
from prorl_envs.trainers.asking import GroupTemplate
from prorl_envs.trainers.rollouts import shared
from prorl_envs.trainers.rows import Row, RowStatus, rows_of
from prorl_envs.trainers.tasks import from_text, to_text

#: Interval of the checks whether slime has enough groups, in seconds.
LOOK_S = 0.5

# slime has no status for rejected samples; they are aborted like cancelled ones.
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
    """Run one episode; slime's `--custom-generate-function-path`.

    Args:
        args: slime's, with `prorl_url`, `prorl_environment` and, if wanted, `prorl_limits` (a mapping).
        sample: slime's; its `metadata` has the task, as `rows` writes it.
        sampling_params: temperature, top_p and max_new_tokens are used.
        evaluation: no filter runs in an evaluation, so a failed episode is requested again.

    Returns:
        the sample, filled in; a list of samples if the episode is several rows.

    Raises:
        InputError: the sample carries no task, or the service refuses it.
        EpisodeFailed: in an evaluation, all attempts failed.
        QueueFull, Unavailable: the service stays full or unreachable.
    """
    if evaluation:
        asking, task, sampling = _asked(args, sample, sampling_params)
        result = await (await shared(asking.url)).episode(asking, "evaluation", task, sampling=sampling)
        return _filled(sample, result)
    from slime.rollout.sglang_rollout import GenerateState

    return await episode(args, sample, sampling_params, lambda: bool(GenerateState(args).aborted))


async def episode(
    args: Any, sample: Any, sampling_params: Mapping[str, Any], over: Callable[[], bool]
) -> Any:
    """Run one episode like `generate`; cancel it at the service when `over` returns true."""
    asking, task, sampling = _asked(args, sample, sampling_params)
    request = asking.group("sample", task, 1, sampling=sampling)
    asked = asyncio.create_task((await shared(asking.url)).group(request))
    try:
        while not asked.done():
            await asyncio.wait([asked], timeout=LOOK_S)
            if not asked.done() and over():
                sample.status = type(sample).Status("aborted")
                return sample
        [result] = asked.result()
    finally:
        asked.cancel()
        await asyncio.wait([asked])
    return _filled(sample, result)


def keep_informative(args: Any, samples: Sequence[Any], **_: Any) -> Any:
    """Keep groups whose rewards differ; slime's `--dynamic-sampling-filter-path`. Samples without a reward
    get the mean of their group and are excluded from the loss (`remove_sample`)."""
    from slime.rollout.filter_hub.base_types import DynamicFilterOutput

    keep, reason = settle(samples)
    return DynamicFilterOutput(keep=keep, reason=reason)


def settle(samples: Sequence[Any]) -> tuple[bool, str | None]:
    """Return whether to keep a group, and the reason if not. Sets the missing rewards of its samples.

    Args:
        samples: slime's samples, or lists of them if episodes are several rows.
    """
    episodes = [one if isinstance(one, list) else [one] for one in samples]
    rewards = [rows[-1].reward for rows in episodes]
    if spread(rewards) == 0:
        return False, "failed" if None in rewards and len(set(rewards)) == 1 else "equal_rewards"
    for rows, reward in zip(episodes, neutral_rewards([rewards])[0], strict=True):
        for row in rows:
            row.remove_sample = row.reward is None
            row.reward = reward
    return True, None


def rows(tasks: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Convert task rows to rows of slime's data sets, to be written as JSONL."""
    return [
        {
            "prompt": [{"role": "user", "content": str(task.get("instruction", task.get("id", "task")))}],
            "metadata": {"task": to_text(task)},
        }
        for task in tasks
    ]


def as_slime(result: Result, index: int | None) -> list[dict[str, Any]]:
    """Convert an episode to the fields of slime's `Sample`s, one for each row. Rows of one episode share a
    `rollout_id`, by which slime normalises their loss.

    Args:
        result: of the episode.
        index: of the requested sample.
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


def _asked(
    args: Any, sample: Any, params: Mapping[str, Any]
) -> tuple[GroupTemplate, dict[str, Any], Sampling]:
    """Return the request: group template, task and sampling parameters."""
    limits = getattr(args, "prorl_limits", None)
    asking = GroupTemplate(
        args.prorl_url, args.prorl_environment, limits=AgentLimits.model_validate(limits) if limits else None
    )
    return asking, from_text((sample.metadata or {}).get("task")), _sampling(params)


def _filled(sample: Any, result: Result) -> Any:
    made = [_fill(sample, fields) for fields in as_slime(result, sample.index)]
    return made if len(made) > 1 else made[0]


def _fill(sample: Any, fields: Mapping[str, Any]) -> Any:
    """Return a copy of the sample with these fields."""
    made = type(sample).from_dict(sample.to_dict())
    for name, value in fields.items():
        setattr(made, name, value)
    made.status = type(sample).Status(fields["status"])
    made.metadata = {**(sample.metadata or {}), **fields["metadata"]}
    return made


def _sampling(params: Mapping[str, Any]) -> Sampling:
    names = {"temperature": "temperature", "top_p": "top_p", "max_new_tokens": "max_tokens"}
    given = {mine: params[theirs] for theirs, mine in names.items() if params.get(theirs) is not None}
    if given.get("top_p") == 0:
        raise InputError("top_p is 0", hint="it is a share of the probability: 1 for all of it")
    return Sampling(**given)
