"""TRL's experimental `AsyncGRPOTrainer` with rollouts of the rollout service (TRL 1.16).

    trainer = AsyncGRPOTrainer(
        model,
        args=args,
        train_dataset=...,
        rollout_worker=TrlAsyncWorker(url, "bash", task_rows, max_staleness=args.max_staleness),
        weight_transfer=TrlWeightTransfer(url, send),
    )

While the trainer trains, the worker keeps groups in flight. It computes the advantages, passes the episodes
of groups with differing rewards to the trainer, and drops all other groups. Groups that are too old when new
weights arrive are cancelled at the service. `trl` is imported only for the type of the queue's items.
"""

import asyncio
import contextlib
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from statistics import pstdev
from typing import Any

from prorl_envs.errors import InputError
from prorl_envs.model.types import InFlight, Sampling
from prorl_envs.rollout.api.types import AgentLimits, Result
from prorl_envs.trainers.advantages import group_advantages, spread
from prorl_envs.trainers.asking import GroupTemplate, connect_sync, keep_in_flight, shuffled
from prorl_envs.trainers.rollouts import Rollouts
from prorl_envs.trainers.rows import rows_of, training_reward
from prorl_envs.trainers.weights import weights_change_sync

logger = logging.getLogger(__name__)

#: Polling interval of a full queue, and heartbeat interval, in seconds.
TICK_S = 0.2


class TrlAsyncWorker:
    """TRL's `rollout_worker`. A thread fills `rollout_buffer` with `RolloutSample`s. Can be started once.

    Args:
        url: base URL of the service. Its token is read from `$PRORL_SERVER__TOKEN`.
        environment: name of the tasks' environment at the service.
        tasks: task rows of the environment; repeated without end, each time in a new random order.
        samples: number of episodes in a group.
        groups: maximum number of groups in flight.
        max_staleness: maximum number of versions between the start of a group and the trainer's weights. Use
            the `max_staleness` of `AsyncGRPOConfig`, with which TRL drops samples that are too old.
        equal: also pass groups with equal rewards to the trainer; they have no gradient.
        buffer: maximum number of samples that wait for the trainer. No group starts while the buffer is full.
        sampling, limits: settings of the groups; None uses the service's. The temperature must equal the
            trainer's.
        seed: seed of the order of tasks.
    """

    def __init__(
        self,
        url: str,
        environment: str,
        tasks: Sequence[Mapping[str, Any]],
        *,
        samples: int = 8,
        groups: int = 16,
        max_staleness: int = 3,
        equal: bool = False,
        buffer: int = 256,
        sampling: Sampling | None = None,
        limits: AgentLimits | None = None,
        seed: int = 0,
    ) -> None:
        if not tasks:
            raise InputError("there are no tasks", hint="give the environment's task rows")
        self.rollout_buffer: queue.Queue[Any] = queue.Queue(buffer)
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue(4096)
        self._template = GroupTemplate(url, environment, sampling, limits)
        self._tasks = tasks
        self._samples = samples
        self._groups = groups
        self._max_staleness = max_staleness
        self._equal = equal
        self._seed = seed
        self._version = 0
        self._in_flight: dict[asyncio.Task[None], int] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._main: asyncio.Task[None] | None = None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._last_heartbeat = time.monotonic()

    def start(self) -> None:
        """Start the thread. TRL calls this method when the servers have the trainer's first weights."""
        if self._thread is None:
            self._last_heartbeat = time.monotonic()
            self._thread = threading.Thread(target=self._run, name="rollout-worker", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Cancel all groups in flight, also at the service, and wait until they are cancelled. Idempotent."""
        if self._thread is None:
            return
        while self._thread.is_alive() and self._main is None:  # the thread has not started its event loop yet
            self._thread.join(TICK_S)
        if self._thread.is_alive() and self._loop is not None and self._main is not None:
            # Cancelled only once, since a second cancellation would interrupt the cleanup.
            with contextlib.suppress(RuntimeError):  # the loop has already stopped
                self._loop.call_soon_threadsafe(self._main.cancel)
        self._thread.join()
        self._thread = None

    def update_model_version(self, model_version: int) -> None:
        """Record the version of the servers' weights, and cancel the groups that are too old for it."""
        self._version = model_version
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has stopped; `check_health` reports the reason
                self._loop.call_soon_threadsafe(self._cancel_stale)

    def check_health(self, stale_after_s: float) -> None:
        """Raise RuntimeError if the worker has failed, or sent no heartbeat for `stale_after_s` seconds."""
        if self._failure is not None:
            raise RuntimeError(f"the rollout worker has failed: {self._failure}") from self._failure
        age = time.monotonic() - self._last_heartbeat
        if age > stale_after_s:
            raise RuntimeError(f"the rollout worker has sent no heartbeat for {age:.0f} s")

    def _run(self) -> None:
        try:
            asyncio.run(self._work())
        except asyncio.CancelledError:
            pass
        except BaseException as error:  # noqa: BLE001 - `check_health` raises it in the trainer's thread
            logger.error("the rollout worker has failed: %s", error)
            self._failure = error

    async def _work(self) -> None:
        self._loop, self._main = asyncio.get_running_loop(), asyncio.current_task()
        async with Rollouts(self._template.url) as rollouts:
            tasks = enumerate(shuffled(self._tasks, self._seed))

            def start() -> asyncio.Task[None]:
                group = asyncio.create_task(self._group(rollouts, *next(tasks), self._version))
                self._in_flight[group] = self._version
                group.add_done_callback(self._in_flight.pop)
                return group

            await keep_in_flight(start, self._must_wait, TICK_S)

    async def _must_wait(self, in_flight: int) -> bool:
        self._last_heartbeat = time.monotonic()
        return in_flight >= self._groups or self.rollout_buffer.full()

    def _cancel_stale(self) -> None:
        stale = [
            group
            for group, version in self._in_flight.items()
            if self._version - version > self._max_staleness
        ]
        for group in stale:
            group.cancel()
        if stale:
            self._report({"rollout/evicted_groups": float(len(stale))})

    async def _group(self, rollouts: Rollouts, number: int, task: Mapping[str, Any], version: int) -> None:
        results = await rollouts.group(self._template.group(f"{number}", task, self._samples))
        rewards = [training_reward(result) for result in results]
        self._report(
            {
                "rollout/failed": sum(reward is None for reward in rewards) / len(rewards),
                "rollout/equal_groups": float(spread(rewards) == 0),
            }
        )
        if spread(rewards) > 0 or self._equal:
            for sample in as_samples(results, number, version):
                await self._put(sample)

    async def _put(self, fields: Mapping[str, Any]) -> None:
        sample = _rollout_sample(fields)
        while True:
            try:
                return self.rollout_buffer.put_nowait(sample)
            except queue.Full:
                await asyncio.sleep(TICK_S)

    def _report(self, metrics: dict[str, float]) -> None:
        if not self.metrics_queue.full():  # no other thread puts metrics
            self.metrics_queue.put_nowait(metrics)


class TrlWeightTransfer:
    """Implementation of TRL's `weight_transfer`. It holds the service's turns while weights change, and
    announces the new version. Versions are counted from 1, as in the trainer.

    Args:
        url: base URL of the service.
        send: sends the weights, `(name, tensor)` pairs, to the model servers: `send_weights` of TRL's
            `WeightTransferClient` (NCCL), or your own function.
        begin, end: called before the first and after the last transfer, such as `init_weight_transfer` and
            `destroy` of that client.
        mode: handling of turns in flight.
    """

    def __init__(
        self,
        url: str,
        send: Callable[[Iterator[tuple[str, Any]]], None],
        *,
        begin: Callable[[], None] | None = None,
        end: Callable[[], None] | None = None,
        mode: InFlight = "keep",
    ) -> None:
        self._client = connect_sync(url)
        self._send = send
        self._begin = begin
        self._end = end
        self._mode = mode
        self._versions = itertools.count(1)
        self._change = ExitStack()

    def init_weight_transfer(self) -> None:
        """Prepare the first transfer."""
        if self._begin is not None:
            self._begin()

    def pause(self) -> None:
        """Hold the service's turns. Raise ProrlError on failure."""
        self._change.enter_context(weights_change_sync(self._client, next(self._versions), mode=self._mode))

    def send_weights(self, iterator: Iterator[tuple[str, Any]]) -> None:
        """Send the weights to the model servers."""
        self._send(iterator)

    def resume(self) -> None:
        """Announce the new weights, and release the turns. Raise ProrlError on failure."""
        self._change.close()

    def destroy(self) -> None:
        """Close the connection. After a failed transfer turns stay held, because the weights are unknown."""
        self._change.pop_all()
        if self._end is not None:
            self._end()
        self._client.close()


def as_samples(results: Sequence[Result], group_id: int, version: int) -> list[dict[str, Any]]:
    """Convert a group's results to the fields of `RolloutSample`s, with lists for arrays. Episodes without a
    reward or without tokens to train on are omitted. An episode with several rows becomes several samples
    with the same advantage, since TRL's loss is a mean over tokens.

    Args:
        results: results of one group.
        group_id: number of the group.
        version: version of the weights at the group's start, used if the servers name no versions.
    """
    rewards = [training_reward(result) for result in results]
    known = [reward for reward in rewards if reward is not None]
    metrics = {"reward_std": pstdev(known) if known else 0.0}
    samples = []
    for result, advantage in zip(results, group_advantages(rewards), strict=True):
        for row in rows_of(result):
            if advantage is None or not row.trains:
                continue
            context = [0] * len(row.prompt_ids)
            oldest = row.oldest_version
            samples.append(
                {
                    "prompt": [],
                    "completion": list(row.messages),
                    "input_ids": row.prompt_ids + row.response_ids,
                    "completion_mask": context + row.mask,
                    "old_log_probs": [0.0] * len(context) + row.logprobs,
                    "advantage": advantage,
                    "model_version": version if oldest is None else oldest,
                    "group_id": group_id,
                    "metrics": metrics | {"reward": row.reward, "rollout/turns": float(len(row.turns))},
                }
            )
    return samples


def _rollout_sample(fields: Mapping[str, Any]) -> Any:
    import numpy
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

    return RolloutSample(
        **{
            **fields,
            "input_ids": numpy.asarray(fields["input_ids"], dtype=numpy.int64),
            "completion_mask": numpy.asarray(fields["completion_mask"], dtype=numpy.int64),
            "old_log_probs": numpy.asarray(fields["old_log_probs"], dtype=numpy.float32),
            "enqueued_at": time.time(),
        }
    )
