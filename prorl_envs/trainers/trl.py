"""TRL's `GRPOTrainer` with rollouts of the rollout service (TRL 1.16, `rollout_func`).

    rollouts = TrlRollouts("http://127.0.0.1:8600", "bash", weights=upload)
    trainer = GRPOTrainer(
        model, args=config, train_dataset=prompts(task_rows), rollout_func=rollouts,
        reward_funcs=service_reward,
    )

A sample that cannot be trained on has the reward None: TRL excludes it from its group's mean, and its mask is
all 0. TRL
accepts one row per sample, so episodes must not fork (`service.reasoning: keep`).
"""

import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Protocol

from prorl_envs.model.types import InFlight, Sampling
from prorl_envs.rollout.api.types import AgentLimits, Result
from prorl_envs.trainers.advantages import NothingScored
from prorl_envs.trainers.asking import GroupTemplate, collect, collect_informative, connect_sync
from prorl_envs.trainers.rows import Row, filled_rows, one_row
from prorl_envs.trainers.tasks import from_text, to_text
from prorl_envs.trainers.weights import weights_change_sync

logger = logging.getLogger(__name__)

#: Maximum number of started groups per wanted group, if there is a reserve.
OVERSAMPLED = 3


class Trainer(Protocol):
    """Attributes of a `GRPOTrainer` that this module reads."""

    args: Any
    state: Any
    model: Any
    accelerator: Any
    processing_class: Any
    num_generations: int
    num_generations_eval: int


type UploadWeights = Callable[[Any, int], None]
"""Function that sends the trainer's current weights to the service's model servers. It is called with the
trainer and the version, in every process of the trainer, while no turn is sampled."""


class TrlRollouts:
    """Implementation of TRL's `rollout_func`. It returns one graded episode for each prompt.

    Args:
        url: base URL of the service. Its token is read from `$PRORL_SERVER__TOKEN`.
        environment: name of the tasks' environment at the service.
        task: converts a prompt of the data set to a task row. By default the prompt is a row as JSON, as
            `prompts` creates it.
        weights: sends the trainer's weights to the model servers, before rollouts with new weights are
            requested. So no token is sampled by older weights. None if another component sends them.
        mode: handling of other clients' turns in flight during this. The trainer itself has none.
        reserve: further task rows, for dynamic sampling (DAPO, arXiv 2503.14476). A training group with equal
            rewards is replaced by a group of the next of these rows. Groups with equal rewards are returned
            only if `OVERSAMPLED` times the number of wanted groups were not enough. None disables this.
        sampling: sampling parameters. By default `temperature` and `top_p` of the trainer's configuration,
            and at most `max_completion_length` tokens per turn.
        limits: limits of the agent loop; None uses the service's limits for the environment.
    """

    def __init__(
        self,
        url: str,
        environment: str,
        *,
        task: Callable[[Any], Mapping[str, Any]] | None = None,
        weights: UploadWeights | None = None,
        mode: InFlight = "finish",
        reserve: Iterator[Mapping[str, Any]] | None = None,
        sampling: Sampling | None = None,
        limits: AgentLimits | None = None,
    ) -> None:
        self._template = GroupTemplate(url, environment, sampling, limits)
        self._task = task or from_text
        self._weights = weights
        self._mode = mode
        self._reserve = reserve
        self._client = connect_sync(url)
        self._calls = itertools.count()
        self._uploaded = -1

    def __call__(self, prompts: Sequence[Any], trainer: Trainer) -> dict[str, list[Any]]:
        """Run the rollouts of a step. `prompts` contains a prompt once for each wanted sample.

        Returns:
            `prompt_ids`, `completion_ids`, `logprobs`, `env_mask`: for each prompt a list with a value per
                token. `reward` (None without one, or without tokens to train on), `status`, `stop_reason`,
                `turns`, `job_id`, `weight_version`: one value for each prompt, which TRL passes to the reward
                functions.

        Raises:
            InputError: a prompt is not a task. Or, with `reserve`, groups of a step differ in size.
            NothingScored: no episode can be trained on.
            SeveralRows: an episode forked.
            QueueFull, Unavailable: the service stays full or unreachable.
        """
        version = int(trainer.state.global_step)
        if self._weights is not None and version != self._uploaded:
            self._upload(self._weights, trainer, version)
        group_size = trainer.num_generations if trainer.model.training else trainer.num_generations_eval
        name = f"step{version}/{next(self._calls)}/{trainer.accelerator.process_index}"
        repeated = list(_repeated(prompts, group_size))
        groups = [
            self._template.group(f"{name}/{index}", self._task(prompt), samples, sampling=_sampling(trainer))
            for index, (prompt, samples) in enumerate(repeated)
        ]
        if self._reserve is None or not trainer.model.training:
            result_groups = collect(self._client, groups)
        else:
            extra = itertools.islice(self._reserve, (OVERSAMPLED - 1) * len(groups))
            result_groups = collect_informative(self._client, name, groups, list(extra))
        results = [result for group in result_groups for result in group]
        return as_trl(results, _end_token(trainer))

    def close(self) -> None:
        """Close the connection to the service. Idempotent."""
        self._client.close()

    def _upload(self, weights: UploadWeights, trainer: Trainer, version: int) -> None:
        """Upload the weights. All processes take part, since gathering the weights may need all of them. Only
        the main process calls the service."""
        change = weights_change_sync(self._client, version, mode=self._mode)
        with change if trainer.accelerator.is_main_process else nullcontext():
            trainer.accelerator.wait_for_everyone()
            weights(trainer, version)
            trainer.accelerator.wait_for_everyone()
        trainer.accelerator.wait_for_everyone()
        self._uploaded = version


def prompts(tasks: Iterable[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Convert task rows to rows of a TRL data set, for `Dataset.from_list`. A prompt is only the task row as
    JSON, since the environment creates the initial messages."""
    return [{"prompt": to_text(task)} for task in tasks]


def service_reward(
    *,
    reward: Sequence[float | None],
    status: Sequence[str] = (),
    job_id: Sequence[str] = (),
    log_extra: Callable[[str, list[Any]], None] | None = None,
    log_metric: Callable[[str, float], None] | None = None,
    **_: Any,
) -> list[float | None]:
    """Reward function for TRL: return the rewards of the service's graders. Adds the job id to TRL's table of
    completions (`prorl-envs show` displays the episode), and the share of each status to its metrics."""
    if log_extra is not None and job_id:
        log_extra("job", list(job_id))
    if log_metric is not None and status:
        for name, count in Counter(status).items():
            log_metric(f"rollouts/{name}", count / len(status))
    return list(reward)


def as_trl(results: Sequence[Result], end_token: int) -> dict[str, list[Any]]:
    """Convert results to the output of a `rollout_func`, in their order.

    Args:
        results: one result for each prompt; all results of a group are included.
        end_token: placeholder for the response of an episode without tokens; no loss uses it.

    Raises:
        NothingScored, SeveralRows, NotContiguous: see `__call__` and `one_row`.
    """
    rows = [one_row(result) for result in results]
    _log_failures(rows)
    rows = filled_rows(rows, end_token)
    return {
        "prompt_ids": [row.prompt_ids for row in rows],
        "completion_ids": [row.response_ids for row in rows],
        "logprobs": [row.logprobs for row in rows],
        "env_mask": [row.mask for row in rows],
        "reward": [row.reward if row.trains else None for row in rows],
        "status": [str(row.status) for row in rows],
        "stop_reason": [str(row.stop_reason) for row in rows],
        "turns": [len(row.turns) for row in rows],
        "job_id": [row.job_id for row in rows],
        "weight_version": [row.versions[0].version if row.versions else "" for row in rows],
    }


def _log_failures(rows: Sequence[Row]) -> None:
    """Log how many episodes cannot be trained on.

    Raises:
        NothingScored: no episode can be trained on.
    """
    failures = Counter(row.failure or row.status for row in rows if not row.trains)
    if not failures:
        return
    counts = ", ".join(f"{kind}: {count}" for kind, count in failures.most_common())
    if failures.total() == len(rows):
        raise NothingScored(
            f"none of {len(rows)} episodes can be trained on ({counts})",
            hint="see `prorl-envs show`, or the service's log",
        )
    logger.warning("%d of %d episodes cannot be trained on (%s)", failures.total(), len(rows), counts)


def _repeated(prompts: Sequence[Any], group_size: int) -> Iterable[tuple[Any, int]]:
    """Yield adjacent equal prompts as one prompt and their number, which is at most `group_size`."""
    for prompt, equal in itertools.groupby(prompts):
        remaining = len(list(equal))
        while remaining > 0:
            yield prompt, min(remaining, group_size)
            remaining -= group_size


def _sampling(trainer: Trainer) -> Sampling:
    args = trainer.args
    return Sampling(
        temperature=args.temperature, top_p=args.top_p, max_tokens=args.max_completion_length or 2048
    )


def _end_token(trainer: Trainer) -> int:
    tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
    return int(tokenizer.eos_token_id)
