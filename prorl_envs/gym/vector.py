"""Parallel episodes in one process: a `gymnasium.vector.VectorEnv` that survives failures of its members."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from prorl_envs.env.runner import Runner
from prorl_envs.errors import InputError
from prorl_envs.gym.env import Info, TaskEnv

type Rewards = NDArray[np.float64]
type Flags = NDArray[np.bool_]


class TaskVectorEnv(VectorEnv[tuple[str, ...], tuple[str, ...], Any]):
    """Vector environment of one family. Its members step in parallel, and share a thread and a node.

        envs = gymnasium.make_vec("prorl_envs.gym:prorl/Bash-v0", num_envs=8, step_timeout_s=60)
        observations, infos = envs.reset(seed=1)
        observations, rewards, terminated, truncated, infos = envs.step(actions)

    A member whose sandbox dies, whose grader fails or whose step takes longer than `step_timeout_s` is
    truncated with reward 0, `infos["error"]` and `infos["mask_sample"]`. The step of the other members is not
    affected, and the next step resets the failed member. Gymnasium's `AsyncVectorEnv`, in contrast, needs a
    process and templates for each member, and waits for the slowest member without a time limit.

    After the end of an episode, the member's next step starts another episode and ignores the action
    (`AutoresetMode.NEXT_STEP`).

    Args:
        num_envs: number of members.
        environment, tasks, max_turns, render_mode, config, step_timeout_s: see `TaskEnv`.

    Raises:
        InputError: as `TaskEnv`.
    """

    def __init__(
        self,
        num_envs: int,
        environment: str,
        *,
        tasks: str | Path | Sequence[Mapping[str, Any]] | None = None,
        max_turns: int = 30,
        render_mode: str | None = None,
        config: str | Path | None = None,
        step_timeout_s: float | None = None,
    ) -> None:
        if num_envs < 1:
            raise InputError(f"num_envs is {num_envs}", hint="give at least 1")
        self.metadata = {**TaskEnv.metadata, "autoreset_mode": AutoresetMode.NEXT_STEP}
        self.render_mode = render_mode
        self.num_envs = num_envs
        self._runner = Runner()
        make = partial(
            TaskEnv, environment, tasks=tasks, max_turns=max_turns, render_mode=render_mode, config=config,
            runner=self._runner, step_timeout_s=step_timeout_s,
        )  # fmt: skip
        self._members = [make() for _ in range(num_envs)]
        self._over = np.zeros(num_envs, dtype=np.bool_)
        self.single_action_space = self._members[0].action_space
        self.single_observation_space = self._members[0].observation_space
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        # These threads only wait for the runner's thread, which does the work. They start on demand.
        self._threads = ThreadPoolExecutor(num_envs, "prorl-vector")

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[tuple[str, ...], Info]:
        """Start an episode in every member.

        Args:
            seed: seed of the first member (the others get the following numbers), or one seed per member.
            options: options of `TaskEnv.reset` for every member.

        Raises:
            InputError: unknown options, or a wrong task.
        """
        seeds = (
            seed if isinstance(seed, list) else [None if seed is None else seed + n for n in self._numbers]
        )
        if len(seeds) != self.num_envs:
            raise InputError(
                f"{len(seeds)} seeds for {self.num_envs} members", hint="give one number, or one per member"
            )
        self._over[:] = False
        starts = self._all(lambda n: self._members[n].reset(seed=seeds[n], options=options))
        return tuple(text for text, _ in starts), self._joined([info for _, info in starts])

    def step(self, actions: Sequence[str]) -> tuple[tuple[str, ...], Rewards, Flags, Flags, Info]:
        """Take one action in every member, in parallel."""
        if len(actions) != self.num_envs:
            raise InputError(
                f"{len(actions)} actions for {self.num_envs} members", hint="give one per member"
            )

        def step_member(number: int) -> tuple[str, float, bool, bool, Info]:
            if self._over[number]:
                observation, info = self._members[number].reset()
                return observation, 0.0, False, False, info
            return self._members[number].step(actions[number])

        observations, rewards, terminated, truncated, infos = zip(*self._all(step_member), strict=True)
        flags = np.array(terminated, dtype=np.bool_), np.array(truncated, dtype=np.bool_)
        self._over = np.logical_or(*flags)
        return tuple(observations), np.array(rewards, dtype=np.float64), *flags, self._joined(infos)

    def render(self) -> tuple[Any, ...]:
        """Return each member's episode so far if the render mode is `ansi`, else None for each."""
        return tuple(member.render() for member in self._members)

    def close_extras(self, **kwargs: Any) -> None:
        """Close every episode and release all resources."""
        self._all(lambda n: self._members[n].close())
        self._threads.shutdown()
        self._runner.close()

    @property
    def _numbers(self) -> range:
        return range(self.num_envs)

    def _all[T](self, work: Callable[[int], T]) -> list[T]:
        """Run `work` for every member in parallel; raise the first exception after all have finished."""
        self._runner.start()
        running = [self._threads.submit(work, number) for number in self._numbers]
        errors = {n: error for n, future in enumerate(running) if (error := future.exception()) is not None}
        if errors:
            (_, first), *others = errors.items()
            for number, error in others:
                first.add_note(f"member {number} also failed: {type(error).__name__}: {error}")
            raise first
        return [future.result() for future in running]

    def _joined(self, infos: Sequence[Info]) -> Info:
        joined: Info = {}
        for number, info in enumerate(infos):
            joined = self._add_info(joined, info, number)
        return joined
