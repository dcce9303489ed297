"""verl (0.9): agent loop whose episodes the rollout service runs.

verl creates it from `actor_rollout_ref.rollout.agent.agent_loop_config_path`, a YAML file such as

    - name: prorl
      _target_: prorl_envs.trainers.verl.RolloutAgentLoop
      url: http://127.0.0.1:8600
      environment: bash

and passes it every sample of a data set that `rows` created. It works with both of verl's managers: the
padded batch (`AgentLoopManager`) and TransferQueue (`AgentLoopManagerTQ`), where verl's replay buffer filters
groups, drops stale groups and replaces them. `verl` is imported only for the output type and its managers.
"""

import asyncio
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from uuid import uuid4

from prorl_envs.errors import InputError
from prorl_envs.model.types import InFlight, Sampling
from prorl_envs.rollout.api.types import AgentLimits, Result
from prorl_envs.trainers.asking import GroupTemplate, connect, connect_sync
from prorl_envs.trainers.rollouts import shared
from prorl_envs.trainers.rows import Row, RowStatus, rows_of
from prorl_envs.trainers.tasks import chat_prompt, from_text, to_text
from prorl_envs.trainers.weights import weights_change, weights_change_sync


class RolloutAgentLoop:
    """Agent loop for verl, which creates a new one for every sample.

    Args:
        trainer_config: verl's configuration object. Its prompt and response lengths apply here.
        url: base URL of the service. Its token is read from `$PRORL_SERVER__TOKEN`.
        environment: name of the tasks' environment at the service.
        attempts: maximum number of attempts of an episode before verl gets its failure.
        limits: limits of the agent loop, as in a group request; by default verl's maximum number of tokens.
        rest: further arguments that verl passes to every agent loop; ignored.
    """

    def __init__(
        self,
        trainer_config: Any,
        *,
        url: str,
        environment: str,
        attempts: int = 3,
        limits: Mapping[str, Any] | None = None,
        **rest: Any,
    ) -> None:
        rollout = trainer_config.config.actor_rollout_ref.rollout
        self._prompt_length, self._response_length = int(rollout.prompt_length), int(rollout.response_length)
        max_tokens = {"max_tokens": self._prompt_length + self._response_length}
        self._limits = AgentLimits.model_validate(max_tokens | dict(limits or {}))
        self._url, self._environment, self._attempts = url, environment, attempts

    async def run(self, sampling_params: dict[str, Any], **fields: Any) -> Any:
        """Run and grade one episode.

        Args:
            sampling_params: verl's sampling parameters, of which temperature and top_p are used.
            fields: fields of the data row. The task is in `extra_info`.

        Returns:
            An `AgentLoopOutput`, or a list of them for several rows, which TransferQueue accepts.

        Raises:
            EpisodeFailed: all attempts failed. With TransferQueue, verl replaces the failed group. A failure
                never becomes a reward of 0.
            InputError: the row contains no task, or the prompt is longer than verl's limit.
            QueueFull, Unavailable: the service stays full or unreachable.
        """
        from verl.experimental.agent_loop.agent_loop import AgentLoopOutput

        extra = fields.get("extra_info") or {}
        template = GroupTemplate(
            self._url, self._environment, limits=self._limits, run=f"verl-{uuid4().hex[:16]}"
        )
        sampling = Sampling(
            temperature=float(sampling_params.get("temperature", 1.0)),
            top_p=float(sampling_params.get("top_p", 1.0)),
            max_tokens=self._response_length,
        )
        name = "-".join(str(fields[key]) for key in ("uid", "session_id") if key in fields) or "sample"
        result = await (await shared(self._url)).episode(
            template, name, from_text(extra.get("task")), sampling=sampling, attempts=self._attempts
        )
        outputs = [
            AgentLoopOutput(**output)
            for output in as_verl(result, self._prompt_length, self._response_length)
        ]
        return outputs if len(outputs) > 1 else outputs[0]


def rows(
    tasks: Iterable[Mapping[str, Any]], *, environment: str, agent: str = "prorl"
) -> list[dict[str, Any]]:
    """Convert task rows to rows of verl's data sets, which are Parquet files.

    Args:
        tasks: task rows of the environment.
        environment: value of `data_source`, by which verl groups its metrics.
        agent: name of the agent loop in the YAML file.
    """
    return [
        {
            # verl tokenises the prompt to drop rows that are too long; the service renders its own prompt.
            "prompt": chat_prompt(task),
            "data_source": environment,
            "agent_name": agent,
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": index, "task": to_text(task)},
        }
        for index, task in enumerate(tasks)
    ]


def as_verl(result: Result, prompt_length: int, response_length: int) -> list[dict[str, Any]]:
    """Convert an episode to the fields of `AgentLoopOutput`s, one for each row. All contain the reward; verl
    computes the advantage from the last output.

    Args:
        result: result of an episode, with a reward.
        prompt_length, response_length: verl's limits. A longer response is cut, as in verl.

    Raises:
        InputError: a prompt is longer than `prompt_length`.
    """
    return [_output(row, result, prompt_length, response_length) for row in rows_of(result)]


def with_weight_announcements(
    update_weights: Callable[[int | None], Any], url: str, *, mode: InFlight = "finish"
) -> Callable[[int | None], Any]:
    """Wrap `update_weights` of verl's `CheckpointEngineManager`. The wrapper holds the service's turns during
    the update, and announces `global_steps` as the weight version. Like the method, it returns an awaitable
    if an event loop is running, and blocks otherwise.

        manager.update_weights = with_weight_announcements(manager.update_weights, url)

    Raises:
        WeightUpdateFailed, Unavailable: see `weights_change`.
    """

    def update(global_steps: int | None = None) -> Any:
        version = "" if global_steps is None else global_steps
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            with connect_sync(url) as client, weights_change_sync(client, version, mode=mode):
                return update_weights(global_steps)

        async def update_async() -> Any:
            async with connect(url) as client, weights_change(client, version, mode=mode):
                outcome = update_weights(global_steps)
                return await outcome if inspect.isawaitable(outcome) else outcome

        return update_async()

    return update


def patch_weight_updates(url: str, *, mode: InFlight = "finish") -> None:
    """Announce every weight update in this process to the service, whichever part of verl starts it."""
    from verl.checkpoint_engine.base import CheckpointEngineManager

    update_weights = CheckpointEngineManager.update_weights

    def update(self: Any, global_steps: int | None = None) -> Any:
        return with_weight_announcements(lambda steps: update_weights(self, steps), url, mode=mode)(
            global_steps
        )

    CheckpointEngineManager.update_weights = update


class RolloutManager:
    """verl's TransferQueue manager, with announced weight updates. It is a value for
    `actor_rollout_ref.rollout.agent.agent_loop_manager_class`, and runs in the process of verl's trainer."""

    @classmethod
    def create(cls, config: Any, **rest: Any) -> Any:
        """Create verl's manager. The service is that of the `RolloutAgentLoop` in `agent_loop_config_path`.

        Raises:
            InputError: the file has no `RolloutAgentLoop`.
        """
        from omegaconf import OmegaConf
        from verl.trainer.ppo.v1 import AgentLoopManagerTQ

        path = config.actor_rollout_ref.rollout.agent.agent_loop_config_path
        loops = OmegaConf.load(path) if path else []
        urls = [entry.url for entry in loops if str(entry.get("_target_", "")).endswith(".RolloutAgentLoop")]
        if not urls:
            raise InputError(
                f"{path} names no RolloutAgentLoop", hint="see examples/trainers/verl/agent.yaml"
            )
        patch_weight_updates(urls[0])
        return AgentLoopManagerTQ.create(config=config, **rest)


def _output(row: Row, result: Result, prompt_length: int, response_length: int) -> dict[str, Any]:
    if len(row.prompt_ids) > prompt_length:
        raise InputError(
            f"{row.job_id} has a prompt of {len(row.prompt_ids)} tokens; verl's limit is {prompt_length}",
            hint="raise data.max_prompt_length and rollout.prompt_length",
        )
    versions = [int(span.version) for span in row.versions if span.version.isdecimal()]
    cut = len(row.response_ids) > response_length
    return {
        "prompt_ids": row.prompt_ids,
        "response_ids": row.response_ids[:response_length],
        "response_mask": row.mask[:response_length],
        "response_logprobs": row.logprobs[:response_length],
        "reward_score": row.reward,
        "num_turns": 2 * len(row.turns),
        "metrics": {
            "generate_sequences": result.timings.model_s,
            "tool_calls": result.timings.tools_s,
            "compute_score": result.timings.eval_s,
        },
        "extra_fields": {
            "min_global_steps": min(versions, default=None),
            "max_global_steps": max(versions, default=None),
            "turn_scores": [],
            "tool_rewards": [],
            "job_id": row.job_id,
            "reward_extra_info": {
                "turns": len(row.turns),
                "truncated": int(cut or row.status is RowStatus.TRUNCATED),
            },
        },
    }
