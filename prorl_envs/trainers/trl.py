"""TRL's `GRPOTrainer` with rollouts by the rollout service (TRL 1.16, `rollout_func`).

    rollouts = TrlRollouts("http://127.0.0.1:8600", "bash", weights=upload)
    trainer = GRPOTrainer(
        model, args=config, train_dataset=prompts(task_rows), rollout_func=rollouts,
        reward_funcs=service_reward,
    )

A sample that failed has no reward (None), not 0: TRL excludes it from its group's mean, and its mask is 0
throughout. TRL takes one row for each sample, so episodes must not fork (`service.reasoning: keep`).
"""

import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from prorl_envs.model.types import InFlight, Sampling
from prorl_envs.rollout.api.types import AgentLimits, Result
from prorl_envs.trainers.advantages import NothingScored
from prorl_envs.trainers.asking import GroupTemplate, collect, collect_informative, connect_sync
from prorl_envs.trainers.rows import Row, one_row
from prorl_envs.trainers.tasks import from_text, to_text
from prorl_envs.trainers.weights import weights_change_sync

logger = logging.getLogger(__name__)

#: Maximum number of started groups per wanted group, if there is a reserve.
OVERSAMPLED = 3


class Trainer(Protocol):
    """Attributes of a `GRPOTrainer` that are read here."""

    args: Any
    state: Any
    model: Any
    accelerator: Any
    processing_class: Any
    num_generations: int
    num_generations_eval: int


type UploadWeights = Callable[[Any, int], None]
"""Puts the trainer's current weights into the service's model servers. Called in every process of the trainer
with the trainer and the version, while no turn is sampled."""


class TrlRollouts:
    """A `rollout_func`: prompts in, one graded episode per prompt out.

    Args:
        url: base URL of the service. Its token is read from `$PRORL_SERVER__TOKEN`.
        environment: the service's environment that the tasks are of.
        task: converts a prompt of the data set to the environment's task row. By default a prompt is the row
            as JSON, as `prompts` makes it.
        weights: puts the trainer's weights into the model servers, before rollouts with new weights are
            requested; None if this happens elsewhere. With it no token is sampled by older weights.
        mode: treatment of other clients' turns in flight meanwhile; the trainer's own are finished.
        reserve: further task rows, for dynamic sampling (DAPO, arXiv 2503.14476): a training group whose
            rewards are all equal is replaced by a group of the next of these rows, so that each step has as
            many groups to learn from as the trainer's prompts make. If `OVERSAMPLED` times as many do not
            suffice, groups of equal rewards fill up. None disables it.
        sampling: sampling parameters. By default those of the trainer's configuration (`temperature`,
            `top_p`), and at most `max_completion_length` tokens a turn.
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
        self._asking = GroupTemplate(url, environment, sampling, limits)
        self._task = task or from_text
        self._weights = weights
        self._mode = mode
        self._reserve = reserve
        self._client = connect_sync(url)
        self._calls = itertools.count()
        self._uploaded = -1

    def __call__(self, prompts: Sequence[Any], trainer: Trainer) -> dict[str, list[Any]]:
        """Run the rollouts of a step; each prompt is repeated once per wanted sample.

        Returns:
            `prompt_ids`, `completion_ids`, `logprobs`, `env_mask`: a list of ids (numbers, bits) for each
                prompt, in order. `reward` (None if there is none), `status`, `stop_reason`, `turns`,
                `job_id`, `weight_version`: one for each prompt; TRL passes them to the reward functions.

        Raises:
            InputError: a prompt is not a task; or groups of a step differ in size, with `reserve`.
            NothingScored: no episode has a reward.
            SeveralRows: an episode forked.
            QueueFull, Unavailable: the service stays full or unreachable.
        """
        version = int(trainer.state.global_step)
        if self._weights is not None and version != self._uploaded:
            self._upload(self._weights, trainer, version)
        most = trainer.num_generations if trainer.model.training else trainer.num_generations_eval
        name = f"step{version}/{next(self._calls)}/{trainer.accelerator.process_index}"
        runs = list(_runs(prompts, most))
        groups = [
            self._asking.group(f"{name}/{index}", self._task(prompt), samples, sampling=_sampling(trainer))
            for index, (prompt, samples) in enumerate(runs)
        ]
        if self._reserve is None or not trainer.model.training:
            found = collect(self._client, groups)
        else:
            extra = itertools.islice(self._reserve, (OVERSAMPLED - 1) * len(groups))
            found = collect_informative(self._client, name, groups, list(extra))
        results = [result for group in found for result in group]
        return as_trl(results, _end_token(trainer))

    def close(self) -> None:
        """Close the connection to the service. Idempotent."""
        self._client.close()

    def _upload(self, weights: UploadWeights, trainer: Trainer, version: int) -> None:
        """Upload the weights in all processes, as gathering them may need all; only the main process calls
        the service."""
        if trainer.accelerator.is_main_process:
            with weights_change_sync(self._client, version, mode=self._mode):
                trainer.accelerator.wait_for_everyone()
                weights(trainer, version)
                trainer.accelerator.wait_for_everyone()
        else:
            trainer.accelerator.wait_for_everyone()
            weights(trainer, version)
            trainer.accelerator.wait_for_everyone()
        trainer.accelerator.wait_for_everyone()
        self._uploaded = version


def prompts(tasks: Iterable[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Convert task rows to rows of a TRL data set, for `Dataset.from_list`. The environment supplies the
    start of the conversation, so a prompt is only the task: as JSON, since rows may have differing
    columns."""
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
    """Return the rewards of the service's graders, None if there is none; a reward function for TRL. Adds the
    job's id to TRL's table of completions (`prorl-envs show` displays the episode), and the share of each
    status to its metrics."""
    if log_extra is not None and job_id:
        log_extra("job", list(job_id))
    if log_metric is not None and status:
        for name, count in Counter(status).items():
            log_metric(f"rollouts/{name}", count / len(status))
    return list(reward)


def as_trl(results: Sequence[Result], end_token: int) -> dict[str, list[Any]]:
    """Convert results to the output of a `rollout_func`, in their order.

    Args:
        results: of whole groups, one result for each prompt.
        end_token: placeholder for the response of an episode without tokens; no loss uses it.

    Raises:
        NothingScored, SeveralRows, NotContiguous.
    """
    rows = [one_row(result) for result in results]
    _warn(rows)
    known = {row.group_id: row.prompt_ids for row in rows if row.prompt_ids}
    some = next(iter(known.values()), [end_token])
    rows = [row.filled(known.get(row.group_id, some), end_token) for row in rows]
    return {
        "prompt_ids": [row.prompt_ids for row in rows],
        "completion_ids": [row.response_ids for row in rows],
        "logprobs": [row.logprobs for row in rows],
        "env_mask": [row.mask for row in rows],
        "reward": [row.reward for row in rows],
        "status": [str(row.status) for row in rows],
        "stop_reason": [str(row.stop_reason) for row in rows],
        "turns": [len(row.turns) for row in rows],
        "job_id": [row.job_id for row in rows],
        "weight_version": [row.versions[0].version if row.versions else "" for row in rows],
    }


def _warn(rows: Sequence[Row]) -> None:
    """Log the failures.

    Raises:
        NothingScored: all episodes failed.
    """
    failures = Counter(row.failure for row in rows if row.reward is None)
    if not failures:
        return
    named = ", ".join(f"{kind or 'none'}: {count}" for kind, count in failures.most_common())
    if failures.total() == len(rows):
        raise NothingScored(
            f"none of {len(rows)} episodes has a reward ({named})",
            hint="`prorl-envs show` or the service's log says why",
        )
    logger.warning("%d of %d episodes have no reward (%s)", failures.total(), len(rows), named)


def _runs(prompts: Sequence[Any], most: int) -> Iterable[tuple[Any, int]]:
    """Group adjacent equal prompts, at most `most` in one group."""
    for prompt, same in itertools.groupby(prompts):
        left = len(list(same))
        while left > 0:
            yield prompt, min(left, most)
            left -= most


def _sampling(trainer: Trainer) -> Sampling:
    args = trainer.args
    return Sampling(
        temperature=args.temperature, top_p=args.top_p, max_tokens=args.max_completion_length or 2048
    )


def _end_token(trainer: Trainer) -> int:
    tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
    return int(tokenizer.eos_token_id)
