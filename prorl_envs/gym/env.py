"""`gymnasium.Env` for any environment family."""

import asyncio
import copy
import logging
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
from gymnasium.error import ResetNeeded

from prorl_envs.catalog import Catalog
from prorl_envs.config import load_settings
from prorl_envs.env.base import Environment, Prompt, Task
from prorl_envs.env.conversation import MessageLog
from prorl_envs.env.harness.family import harness_of
from prorl_envs.env.node import Node
from prorl_envs.env.runner import Runner
from prorl_envs.env.sandboxed import EpisodeCheckpoint, SandboxedEnvironment
from prorl_envs.errors import InputError, RolloutFailure, StageTimeout, UnsupportedMachine, causes_of
from prorl_envs.gym.actions import ActionError, parse_action
from prorl_envs.gym.spaces import UnicodeText
from prorl_envs.tools.types import ToolResult

log = logging.getLogger(__name__)

#: Maximum characters of an action, and of an observation.
MAX_TEXT = 2**20

type Info = dict[str, Any]
type Step = tuple[str, float, bool, bool, Info]


#: Fields of a `TaskEnv` that belong to the episode.
_EPISODE_FIELDS = ("_task_id", "_turn", "_transcript", "_conversation")


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """State of an episode, from `TaskEnv.snapshot`."""

    checkpoint: EpisodeCheckpoint
    state: Mapping[str, Any]
    runner: Runner

    def close(self) -> None:
        """Free its files and memory. Idempotent; restored episodes go on."""
        self.runner.run(lambda node: self.checkpoint.close())


async def _node(node: Node) -> Node:
    return node


class TaskEnv(gymnasium.Env[str, str]):
    """Gymnasium environment of one family's tasks; each episode is one task.

        env = gymnasium.make("prorl_envs.gym:prorl/Bash-v0", render_mode="ansi")
        observation, info = env.reset(seed=7)
        done = False
        while not done:
            action = my_model(observation, info)  # '{"name": "bash", "arguments": {"command": "ls"}}'
            observation, reward, terminated, truncated, info = env.step(action)
            done = terminated or truncated
        env.close()

    An action is a text: a tool call in JSON (the observation for a malformed call describes its error), or an
    answer without a call. Observations are texts: first the messages of the prompt, then the result of each
    call.

    - The episode **terminates** with the finish tool or, as in the rollout service, with an answer that calls
      no tool; the reward is then the grade. Earlier rewards are 0.
    - It is **truncated** after `max_turns` actions, and graded as well.
    - If a sandbox or a grader fails, the episode is truncated with reward 0, `info["error"]` describes the
      failure and `info["mask_sample"]` is true: such a sample carries no information about the policy. The
      step raises no exception, so one dead sandbox does not stop a vector of environments. A failed `reset`
      reports the error in the same way, and the next step truncates. `info["error"]["causes"]` lists the
      exceptions behind a failure. `env.unwrapped.failure` (`envs.get_attr("failure")`) is the exception
      itself; its traceback is logged.

    `info` holds `task_id` and `turn`; after `reset` also `messages` and `tools` in OpenAI format; after a
    step `tool_ok`, false if there was no call; after the last step `grade` with `components` and `evidence`.

    With `AsyncVectorEnv` pass `shared_memory=False`: texts have no fixed size.

    Args:
        environment: name of the family, or of an environment in `config`.
        tasks: path of a JSONL data file, or rows; None takes those of the family's example tasks that this
            machine can run.
        max_turns: actions after which the episode is truncated.
        render_mode: None, or `ansi`: `render` returns the episode so far as text.
        config: YAML file of settings with `environments`.
        runner: thread and node to use. Environments may share it; the caller closes it. None creates one.
        step_timeout_s: seconds that one step (grading included) or the start of an episode may take; then the
            episode fails as above. None: only the limits of the tools and graders apply.

    Raises:
        InputError: there is no such family, or the data is wrong.
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi"], "render_fps": 1}  # noqa: RUF012 - as in the base class

    def __init__(
        self,
        environment: str,
        *,
        tasks: str | Path | Sequence[Mapping[str, Any]] | None = None,
        max_turns: int = 30,
        render_mode: str | None = None,
        config: str | Path | None = None,
        runner: Runner | None = None,
        step_timeout_s: float | None = None,
    ) -> None:
        if render_mode not in (None, *self.metadata["render_modes"]):
            raise InputError(f"render_mode {render_mode!r} is not known", hint="use ansi or None")
        if step_timeout_s is not None and step_timeout_s <= 0:
            raise InputError(f"step_timeout_s is {step_timeout_s:g}", hint="give more than 0, or None")
        if max_turns < 1:
            raise InputError(f"max_turns is {max_turns}", hint="give at least 1")
        self.render_mode = render_mode
        self.action_space = UnicodeText(MAX_TEXT)
        self.observation_space = UnicodeText(MAX_TEXT)
        self._catalog = Catalog.of(load_settings(Path(config) if config else None))
        self._family = self._catalog.family(environment)
        if (harness := harness_of(self._family)) is not None:
            raise InputError(
                f"{environment}: the harness {harness.name} solves its tasks, and takes no actions",
                hint="use an environment without a harness, or run this one with: prorl-envs run",
            )
        self._tasks = {task.id: task for task in self._load(environment, tasks)}
        self._max_turns = max_turns
        self._step_timeout_s = step_timeout_s
        self._runner = runner or Runner()
        self._owns_runner = runner is None
        self._episode: Environment[Any] | None = None
        self._running = False
        #: Failure of the current or last episode, with its causes chained; None if nothing failed.
        self.failure: RolloutFailure | None = None
        self._task_id = ""
        self._turn = 0
        self._transcript: list[str] = []
        self._conversation = MessageLog(Prompt((), ()))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        """Start an episode.

        Args:
            seed: seed of the generator that chooses tasks; None keeps its state.
            options: `{"task": ...}` chooses the task: an id of the data, or a whole row.

        Raises:
            InputError: unknown options, or a wrong task.
            UnsupportedMachine: this machine cannot start a sandbox that the family can use.
        """
        super().reset(seed=seed)
        task = self._choose(options or {})
        self._end_episode()
        self._task_id, self._turn, self.failure, self._running = task.id, 0, None, True
        self._transcript = []
        try:
            prompt = self._runner.run(lambda node: self._bounded(self._init(node, task)))
        except UnsupportedMachine:
            self._running = False
            raise
        except RolloutFailure as failure:
            self._record_failure(failure)
            return self._show("The environment could not be started."), self._info(**_error_info(failure))
        observation = self._show(_prompt_text(prompt))
        messages = copy.deepcopy(list(prompt.messages))
        return observation, self._info(messages=messages, tools=[t.to_openai() for t in prompt.tools])

    def step(self, action: str) -> Step:
        """Take one action.

        Raises:
            gymnasium.error.ResetNeeded: there is no episode, or it is over.
        """
        if not self._running:
            raise ResetNeeded("call reset before step, and after the end of an episode")
        self._turn += 1
        self._transcript.append(f"> {action}")
        if self.failure is not None:
            return self._fail(self.failure)
        try:
            return self._runner.run(lambda node: self._bounded(self._act(action)))
        except RolloutFailure as failure:
            self._record_failure(failure)
            return self._fail(failure)

    def snapshot(self) -> Snapshot:
        """Save the episode: files, shells, Python's variables, conversation. It goes on; close the snapshot.

            saved = env.unwrapped.snapshot()
            env.step(action)
            env.unwrapped.restore(saved)  # also in another environment of the same family and runner

        Raises:
            gymnasium.error.ResetNeeded: there is no episode, or it is over.
            UnsupportedMachine: the family, or the driver here, takes no checkpoints.
        """
        if not self._running or self.failure is not None:
            raise ResetNeeded("call reset before snapshot; there is none of an episode that is over")
        episode = self._episode
        assert isinstance(episode, SandboxedEnvironment)
        checkpoint = self._runner.run(lambda node: self._bounded(episode.checkpoint()))
        state = {name: copy.deepcopy(getattr(self, name)) for name in _EPISODE_FIELDS}
        return Snapshot(checkpoint, state, self._runner)

    def restore(self, snapshot: Snapshot) -> Info:
        """Go on from a snapshot; return `info`, with `lost`: what the sandbox does not have.

        Raises:
            RolloutFailure: the sandbox could not be restored; there is no episode then.
        """
        self._end_episode()
        episode = self._family(self._runner.run(_node))
        assert isinstance(episode, SandboxedEnvironment)
        self._episode, self.failure = episode, None
        self._runner.run(lambda node: self._bounded(episode.restore(snapshot.checkpoint)))
        for name, value in snapshot.state.items():
            setattr(self, name, copy.deepcopy(value))
        self._running = True
        return self._info(lost=list(snapshot.checkpoint.lost))

    def render(self) -> str | None:
        """Return the episode so far if the render mode is `ansi`, else None."""
        return "\n".join(self._transcript) if self.render_mode == "ansi" else None

    def close(self) -> None:
        """Close the episode and release all resources. Idempotent."""
        self._end_episode()
        if self._owns_runner:
            self._runner.close()

    def _load(
        self, environment: str, tasks: str | Path | Sequence[Mapping[str, Any]] | None
    ) -> Sequence[Task]:
        if tasks is None:
            examples = self._catalog.tasks(environment, None)
            loaded = [task for task in examples if not self._family.unavailable(task)]
        elif isinstance(tasks, str | Path):
            loaded = self._catalog.tasks(environment, Path(tasks))
        else:
            loaded = [self._family.load(row) for row in tasks]
        if not loaded:
            raise InputError(f"no tasks for {environment}", hint="give a data file with at least one row")
        return loaded

    def _choose(self, options: Mapping[str, Any]) -> Task:
        if unknown := set(options) - {"task"}:
            raise InputError(f"unknown options: {', '.join(sorted(unknown))}", hint="the only option is task")
        chosen = options.get("task")
        if isinstance(chosen, Mapping):
            task: Task = self._family.load(chosen)
            return task
        ids = list(self._tasks)
        if chosen is None:
            chosen = ids[int(self.np_random.integers(len(ids)))]
        if chosen not in self._tasks:
            raise InputError(
                f"no task has the id {chosen!r}", hint=f"there are {len(ids)}, such as {ids[0]!r}"
            )
        return self._tasks[chosen]

    async def _bounded[T](self, work: Coroutine[Any, Any, T]) -> T:
        try:
            async with asyncio.timeout(self._step_timeout_s) as deadline:
                return await work
        except TimeoutError:
            if not deadline.expired():
                raise
            raise StageTimeout(
                f"the step took longer than {self._step_timeout_s:g} s", hint="step_timeout_s is the limit"
            ) from None

    async def _init(self, node: Node, task: Task) -> Prompt:
        self._episode = self._family(node)
        prompt = await self._episode.init(task)
        self._conversation = MessageLog(prompt)
        return prompt

    async def _act(self, action: str) -> Step:
        episode = self._episode
        assert episode is not None
        result, finished = await self._run_action(episode, action)
        observation, info = self._show(result.text), self._info(tool_ok=result.ok)
        if not finished and self._turn < self._max_turns:
            return observation, 0.0, False, False, info
        episode.on_transcript(self._conversation.messages)
        grade = await episode.eval()
        await episode.close()
        self._running = False
        info["grade"] = {"components": dict(grade.components), "evidence": copy.deepcopy(grade.evidence)}
        return observation, float(grade.reward), finished, not finished, info

    async def _run_action(self, episode: Environment[Any], action: str) -> tuple[ToolResult, bool]:
        """Run an action. Return its result, and whether it finishes the episode."""
        try:
            call = parse_action(action, f"call-{self._turn}")
        except ActionError as error:
            return ToolResult(text=str(error), ok=False), False
        if call is None:
            self._conversation.said(action)
            return ToolResult(text="An answer without a tool call ends the episode.", ok=False), True
        result = await episode.call(call)
        self._conversation.called(call, result)
        return result, call.name == episode.finish_tool and result.ok

    def _record_failure(self, failure: RolloutFailure) -> None:
        self.failure = failure
        log.warning(
            "task %s, turn %d: the environment failed: %s",
            self._task_id,
            self._turn,
            failure,
            exc_info=failure,
        )

    def _fail(self, failure: RolloutFailure) -> Step:
        info = self._info(**_error_info(failure))
        try:
            self._end_episode()
        except RolloutFailure as second:
            info["error"]["message"] += f"; then closing failed: {second.message}"
        observation = self._show("The environment failed. This episode is over.")
        return observation, 0.0, False, True, info

    def _end_episode(self) -> None:
        episode, self._episode = self._episode, None
        self._running = False
        if episode is not None:
            self._runner.run(lambda node: episode.close())

    def _info(self, **more: Any) -> Info:
        return {"task_id": self._task_id, "turn": self._turn, **more}

    def _show(self, text: str) -> str:
        text = text.encode(errors="replace").decode()[:MAX_TEXT]
        self._transcript.append(text)
        return text


def _prompt_text(prompt: Prompt) -> str:
    return "\n\n".join(str(message["content"]) for message in prompt.messages)


def _error_info(failure: RolloutFailure) -> Info:
    error = {
        "kind": failure.kind.value,
        "message": failure.message,
        "hint": failure.hint,
        "retryable": failure.retryable,
        "causes": causes_of(failure),
    }
    return {"error": error, "mask_sample": True}
