"""verl (0.9): an agent loop whose episodes the rollout service runs.

verl makes it from `actor_rollout_ref.rollout.agent.agent_loop_config_path`, a YAML file such as

    - name: prorl
      _target_: prorl_envs.trainers.verl.RolloutAgentLoop
      url: http://127.0.0.1:8600
      environment: bash

and gives it every sample of a data set that `rows` made. It serves both of verl's managers: the padded batch
(`AgentLoopManager`) and TransferQueue (`AgentLoopManagerTQ`), where verl's own replay buffer filters groups,
drops stale ones and refills. Needs `verl` only for the type of what it returns.
"""

import asyncio
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from uuid import uuid4

from prorl_envs.errors import InputError
from prorl_envs.policy.types import InFlight, Sampling
from prorl_envs.rollout.types import AgentLimits, Result
from prorl_envs.trainers.asking import Asking, connect, connect_sync
from prorl_envs.trainers.rollouts import shared
from prorl_envs.trainers.rows import Row, Status, rows_of
from prorl_envs.trainers.tasks import from_text, to_text
from prorl_envs.trainers.weights import weights_change, weights_change_sync


class RolloutAgentLoop:
    """One of verl's agent loops; verl makes one for every sample.

    Args:
        trainer_config: verl's, with `config`; its lengths of prompt and response are the bounds here.
        url: base URL of the service. Its token is read from `$PRORL_SERVER__TOKEN`.
        environment: the service's environment that the tasks are of.
        attempts: how often an episode that fails is asked for, before verl is told.
        limits: of the agent loop, as the service takes them; by default as many tokens as verl has room for.
        rest: what verl gives every agent loop, and this one has no use for.
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
        bound = {"max_tokens": self._prompt_length + self._response_length}
        self._limits = AgentLimits.model_validate(bound | dict(limits or {}))
        self._url, self._environment, self._attempts = url, environment, attempts

    async def run(self, sampling_params: dict[str, Any], **fields: Any) -> Any:
        """One episode, graded.

        Args:
            sampling_params: verl's, of which temperature and top_p are taken.
            fields: of the data row; the task is in `extra_info`.

        Returns:
            an `AgentLoopOutput`; a list of them where the episode is several rows, which TransferQueue takes.

        Raises:
            EpisodeFailed: there is no reward, for all attempts. With TransferQueue the group is a failure
                then, which verl evicts and refills; a failure is never a reward of 0.
            InputError: the row carries no task, or the prompt is longer than verl has room for.
            Full, Unavailable: the service is full or away, and stays so.
        """
        from verl.experimental.agent_loop.agent_loop import AgentLoopOutput

        extra = fields.get("extra_info") or {}
        asking = Asking(self._url, self._environment, limits=self._limits, run=f"verl-{uuid4().hex[:16]}")
        sampling = Sampling(
            temperature=float(sampling_params.get("temperature", 1.0)),
            top_p=float(sampling_params.get("top_p", 1.0)),
            max_tokens=self._response_length,
        )
        name = "-".join(str(fields[key]) for key in ("uid", "session_id") if key in fields) or "sample"
        result = await (await shared(self._url)).episode(
            asking, name, from_text(extra.get("task")), sampling=sampling, attempts=self._attempts
        )
        outputs = [
            AgentLoopOutput(**output)
            for output in as_verl(result, self._prompt_length, self._response_length)
        ]
        return outputs if len(outputs) > 1 else outputs[0]


def rows(
    tasks: Iterable[Mapping[str, Any]], *, environment: str, agent: str = "prorl"
) -> list[dict[str, Any]]:
    """Task rows as rows of verl's data sets, to be written as parquet.

    Args:
        tasks: the environment's rows.
        environment: becomes the `data_source`, by which verl groups its metrics.
        agent: name of the agent loop in the YAML file.
    """
    return [
        {
            # verl tokenises it to leave out rows that are too long; the service makes its own prompt.
            "prompt": [{"role": "user", "content": str(task.get("instruction", task.get("id", "task")))}],
            "data_source": environment,
            "agent_name": agent,
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": index, "task": to_text(task)},
        }
        for index, task in enumerate(tasks)
    ]


def as_verl(result: Result, prompt_length: int, response_length: int) -> list[dict[str, Any]]:
    """An episode as the fields of `AgentLoopOutput`s, one for each row. All carry the reward; verl's
    advantage is of the last.

    Args:
        result: of an episode with a reward.
        prompt_length, response_length: what verl has room for. A longer response is cut there, as verl does.

    Raises:
        InputError: a prompt is longer.
    """
    return [_output(row, result, prompt_length, response_length) for row in rows_of(result)]


def announced(
    update_weights: Callable[[int | None], Any], url: str, *, mode: InFlight = "finish"
) -> Callable[[int | None], Any]:
    """verl's `update_weights`, with the service's turns held meanwhile, and its `global_steps` named as the
    version: `manager.update_weights = announced(manager.update_weights, url)` of a `CheckpointEngineManager`.
    Like that method, what it gives is awaited where an event loop runs, and waits itself where none does.

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

        async def updating() -> Any:
            async with connect(url) as client, weights_change(client, version, mode=mode):
                outcome = update_weights(global_steps)
                return await outcome if inspect.isawaitable(outcome) else outcome

        return updating()

    return update


def announce_updates(url: str, *, mode: InFlight = "finish") -> None:
    """Have every update of weights in this process announced to the service, whoever of verl does it."""
    from verl.checkpoint_engine.base import CheckpointEngineManager

    update_weights = CheckpointEngineManager.update_weights

    def update(self: Any, global_steps: int | None = None) -> Any:
        return announced(lambda steps: update_weights(self, steps), url, mode=mode)(global_steps)

    CheckpointEngineManager.update_weights = update


class RolloutManager:
    """verl's TransferQueue manager, whose service is told of weights: the value of
    `actor_rollout_ref.rollout.agent.agent_loop_manager_class`. It runs in the process of verl's trainer."""

    @classmethod
    def create(cls, config: Any, **rest: Any) -> Any:
        """As verl's own; the service's URL is that of the agent loop in `agent_loop_config_path`.

        Raises:
            InputError: the file names no `RolloutAgentLoop`.
        """
        from omegaconf import OmegaConf
        from verl.trainer.ppo.v1 import AgentLoopManagerTQ

        path = config.actor_rollout_ref.rollout.agent.agent_loop_config_path
        loops = OmegaConf.load(path) if path else []
        ours = [one.url for one in loops if str(one.get("_target_", "")).endswith(".RolloutAgentLoop")]
        if not ours:
            raise InputError(
                f"{path} names no RolloutAgentLoop", hint="see examples/trainers/verl/agent.yaml"
            )
        announce_updates(ours[0])
        return AgentLoopManagerTQ.create(config=config, **rest)


def _output(row: Row, result: Result, prompt_length: int, response_length: int) -> dict[str, Any]:
    if len(row.prompt_ids) > prompt_length:
        raise InputError(
            f"{row.job_id} has a prompt of {len(row.prompt_ids)} tokens, verl has room for {prompt_length}",
            hint="raise data.max_prompt_length and rollout.prompt_length",
        )
    numbers = [int(span.version) for span in row.versions if span.version.isdecimal()]
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
            "min_global_steps": min(numbers, default=None),
            "max_global_steps": max(numbers, default=None),
            "turn_scores": [],
            "tool_rewards": [],
            "job_id": row.job_id,
            "reward_extra_info": {
                "turns": len(row.turns),
                "truncated": int(cut or row.status is Status.TRUNCATED),
            },
        },
    }
