"""SkyRL (0.4): generator whose episodes the rollout service runs (`GeneratorInterface`).

    class Experiment(BasePPOExp):
        def get_generator(self, cfg, tokenizer, inference_engine_client):
            return RolloutGenerator("http://127.0.0.1:8600", "bash", end_token=tokenizer.eos_token_id)

SkyRL requires a number as every reward. An episode that cannot be trained on gets the mean of its group and a
mask of 0, so it does not affect the advantages of others. Inputs and outputs are dicts, so `skyrl` is not
imported.
"""

import asyncio
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from prorl_envs.errors import InputError
from prorl_envs.rollout.api.types import AgentLimits, Result
from prorl_envs.trainers.advantages import neutral_rewards
from prorl_envs.trainers.asking import GroupTemplate, sampling_of
from prorl_envs.trainers.rollouts import shared
from prorl_envs.trainers.rows import RowStatus, filled_rows, one_row, rows_of, training_reward
from prorl_envs.trainers.tasks import chat_prompt, from_text, to_text


class RolloutGenerator:
    """Generator for SkyRL's trainers.

    Args:
        url: base URL of the service. Its token is read from `$PRORL_SERVER__TOKEN`.
        environment: name of the tasks' environment at the service.
        end_token: placeholder id for the response of an episode without tokens.
        step_wise: SkyRL trains step-wise (`generator.step_wise_trajectories`), so an episode may have several
            rows. Otherwise it must have one.
        limits: limits of the agent loop; None uses the service's limits for the environment.
    """

    def __init__(
        self,
        url: str,
        environment: str,
        *,
        end_token: int,
        step_wise: bool = False,
        limits: AgentLimits | None = None,
    ) -> None:
        self._template = GroupTemplate(url, environment, limits=limits)
        self._end_token = end_token
        self._step_wise = step_wise
        self._calls = itertools.count()

    async def generate(self, input_batch: Mapping[str, Any], **_: Any) -> dict[str, Any]:
        """Return a `GeneratorOutput` in the order of the input. Cancelling this call cancels its groups.

        Raises:
            InputError: a row contains no task, or the service refuses it.
            NothingScored: no episode has a reward.
            SeveralRows: an episode forked, and SkyRL does not train step-wise.
            QueueFull, Unavailable: the service stays full or unreachable.
        """
        rollouts = await shared(self._template.url)
        sampling = sampling_of(input_batch.get("sampling_params") or {})
        call = next(self._calls)
        requests = [
            self._template.group(f"{call}/{index}", from_text(task), samples, sampling=sampling)
            for index, (task, samples) in enumerate(_groups(input_batch))
        ]
        waits = [asyncio.create_task(rollouts.group(request)) for request in requests]
        try:
            results = await asyncio.gather(*waits)
        finally:  # if a group fails or this call is cancelled, cancel all groups
            for group in waits:
                group.cancel()
            await asyncio.wait(waits)
        ids = input_batch.get("trajectory_ids")
        return as_skyrl(results, ids, self._end_token, step_wise=self._step_wise)


def rows(tasks: Iterable[Mapping[str, Any]], *, environment: str) -> list[dict[str, Any]]:
    """Convert task rows to rows of SkyRL's data sets, which are Parquet files. SkyRL requires a prompt and
    the name of one of its environments in each row; neither is used."""
    return [
        {
            "prompt": chat_prompt(task),
            "env_class": environment,
            "task": to_text(task),
        }
        for task in tasks
    ]


def as_skyrl(
    groups: Sequence[Sequence[Result]],
    trajectory_ids: Sequence[Any] | None,
    end_token: int,
    *,
    step_wise: bool = False,
) -> dict[str, Any]:
    """Convert groups of results to a `GeneratorOutput`.

    Args:
        groups: the results, group by group.
        trajectory_ids: SkyRL's ids, one for each result.
        end_token: placeholder for the response of an episode without tokens.
        step_wise: an episode may have several rows. Its last row is marked.

    Raises:
        NothingScored, SeveralRows, NotContiguous: see `neutral_rewards`, `one_row`.
    """
    results = [result for group in groups for result in group]
    rewards = itertools.chain(
        *neutral_rewards([[training_reward(result) for result in group] for group in groups])
    )
    episodes = [rows_of(result) if step_wise else [one_row(result)] for result in results]
    ids = trajectory_ids or [None] * len(results)
    flat = [
        (row, reward, trajectory_id)
        for rows, reward, trajectory_id in zip(episodes, rewards, ids, strict=True)
        for row in rows
    ]
    filled = filled_rows([row for row, _, _ in flat], end_token)
    statuses = Counter(row[-1].status for row in episodes)
    return {
        "prompt_token_ids": [row.prompt_ids for row in filled],
        "response_ids": [row.response_ids for row in filled],
        "rewards": [reward for _, reward, _ in flat],
        "loss_masks": [row.mask for row in filled],
        "stop_reasons": ["length" if row.status is RowStatus.TRUNCATED else "stop" for row in filled],
        "rollout_logprobs": [row.logprobs for row in filled],
        "rollout_metrics": {
            f"rollouts/mean_{status}": statuses[status] / len(episodes) for status in RowStatus
        },
        "trajectory_ids": [trajectory_id for _, _, trajectory_id in flat] if trajectory_ids else None,
        "is_last_step": [row.last for row in filled] if step_wise else None,
        "trajectory_generation_times": None,
        "trajectory_time_splits": None,
        "rollout_expert_indices": None,
        "rollout_sample_support": None,
    }


def _groups(batch: Mapping[str, Any]) -> Iterable[tuple[Any, int]]:
    """Yield the tasks of a batch, each with its number of adjacent samples."""
    extras = batch.get("env_extras") or []
    if len(extras) != len(batch["prompts"]) or any("task" not in (extra or {}) for extra in extras):
        raise InputError("a row has no column `task`", hint="create the data set with skyrl.rows()")
    ids = batch.get("trajectory_ids") or range(len(extras))
    keys = [getattr(trajectory_id, "instance_id", trajectory_id) for trajectory_id in ids]
    for _, indices in itertools.groupby(range(len(extras)), key=lambda index: keys[index]):
        members = list(indices)
        yield extras[members[0]]["task"], len(members)
