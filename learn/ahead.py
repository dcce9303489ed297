"""Asynchronous rollouts with a bound on their staleness, for TRL's `GRPOTrainer`.

The rollouts of a step are requested some steps ahead, so they run while the trainer trains and while the
weights change. Their first tokens may be older by that many steps than the weights that are trained on them,
but never by more.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

from prorl_envs import GroupRequest, ProrlError, Sampling
from prorl_envs.trainers.asking import GroupTemplate, cancelled_on_error, connect_sync
from prorl_envs.trainers.tasks import to_text
from prorl_envs.trainers.trl import Trainer, UploadWeights, as_trl
from prorl_envs.trainers.weights import weights_change_sync


class AheadRollouts:
    """A `rollout_func` that is `staleness` steps ahead.

    Args:
        url: base URL of the service.
        environment: the tasks' environment.
        rows: the tasks in the order in which the trainer takes them, each once.
        step: number of tasks that it takes at once; `samples`: rollouts of each.
        staleness: number of steps; with 0 nothing is requested ahead.
        weights: puts the trainer's weights into the model server. Turns in flight finish first, so a turn has
            one version, and an episode may have several.
        sampling: parameters that the trainer expects.
    """

    def __init__(
        self,
        url: str,
        environment: str,
        rows: Sequence[Mapping[str, Any]],
        *,
        step: int,
        samples: int,
        staleness: int,
        weights: UploadWeights,
        sampling: Sampling,
    ) -> None:
        self._client = connect_sync(url)
        self._asking = GroupTemplate(url, environment, sampling)
        self._rows = rows
        self._places = {to_text(row): place for place, row in enumerate(rows)}
        self._step = step
        self._samples = samples
        self._staleness = staleness
        self._weights = weights
        #: By the index of its first task: the groups of a requested step, and a cursor from before it.
        self._asked: dict[int, tuple[list[GroupRequest], int]] = {}

    def __call__(self, prompts: Sequence[Any], trainer: Trainer) -> dict[str, list[Any]]:
        """Return rollouts like `prorl_envs.trainers.trl.TrlRollouts`, for the same prompts.

        Raises:
            KeyError: a prompt is not in the rows.
        """
        version = int(trainer.state.global_step)
        with weights_change_sync(self._client, version):
            self._weights(trainer, version)
        place = self._places[prompts[0]]
        for one in range(place, place + (self._staleness + 1) * self._step, self._step):
            self._ask(one)
        groups, after = self._asked[place]
        names = [group.id for group in groups]
        with cancelled_on_error(self._client, names):
            results = {result.job_id: result for result in self._client.follow(names, after)}
        del self._asked[place]
        ordered = [results[f"{name}/{sample}"] for name in names for sample in range(self._samples)]
        return as_trl(ordered, int(trainer.processing_class.eos_token_id))

    def close(self) -> None:
        """Cancel rollouts that will not be trained on, and close the connection. Idempotent."""
        for group in chain.from_iterable(groups for groups, _ in self._asked.values()):
            with suppress(ProrlError):  # the service is unavailable
                self._client.cancel_group(group.id)
        self._asked.clear()
        self._client.close()

    def _ask(self, place: int) -> None:
        """Request a step's rollouts, unless that was done or there are no such tasks."""
        rows = self._rows[place : place + self._step]
        if place in self._asked or not rows:
            return
        after = self._client.status().newest_cursor
        groups = [
            self._asking.group(str(place + index), row, self._samples) for index, row in enumerate(rows)
        ]
        self._asked[place] = groups, after
        self._client.submit(groups)
