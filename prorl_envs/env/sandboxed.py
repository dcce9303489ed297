"""Base class of all families that work in one sandbox. A subclass defines only its specifics: the task model,
the preparation of the workspace, the available tools, and the grading."""

from abc import abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar

from prorl_envs.env.base import Environment, Grade, Message, Prompt, Task
from prorl_envs.env.node import Node
from prorl_envs.env.rows import validate_row
from prorl_envs.errors import EnvironmentFault, UnsupportedMachine
from prorl_envs.images.digest import place_of
from prorl_envs.sandbox.base import Checkpoint, SandboxSpec
from prorl_envs.tools.client.python import PythonEngine
from prorl_envs.tools.pool.sandbox_session import SandboxSession
from prorl_envs.tools.protocol.tree import is_utf8
from prorl_envs.tools.types import ToolCall, ToolResult, ToolSpec

#: Maximum characters of an answer in a finish call; longer answers are refused, not cut.
MAX_ANSWER_CHARS = 20_000
#: Characters kept of an answer without a tool call, from its end.
MAX_WORDS = 200_000
#: Timeout of a script that examines the sandbox, in seconds, and maximum bytes of its output.
_EXAMINE_S = 60.0
_EXAMINE_BYTES = 8 << 20

#: Fields of an environment that a checkpoint does not have.
_RESOURCES = ("node", "_session", "_exits")


class Phase(StrEnum):
    """Phase of an episode, in order. Tools run in READY; `eval` in READY and FINISHED."""

    NEW = "new"
    STARTING = "starting"
    READY = "ready"
    FINISHED = "finished"
    GRADED = "graded"
    CLOSED = "closed"


@asynccontextmanager
async def sandbox_session(
    node: Node, spec: SandboxSpec, *, python: PythonEngine = PythonEngine.NONE
) -> AsyncIterator[SandboxSession]:
    """Start a sandbox with tools; both are closed at the end of the block.

    Args:
        node: the node on which it starts.
        spec: specification of the sandbox.
        python: engine of its Python session.

    Raises:
        SandboxError, ToolError.
    """
    session = await node.open_session(spec, python=python)
    try:
        yield session
    finally:
        await session.aclose()


@dataclass(frozen=True, slots=True, eq=False)
class EpisodeCheckpoint:
    """State of an episode between two calls, from which any number of environments can go on.

    Args:
        state: fields of the environment.
        spec: spec of its sandbox.
        sandbox: its sandbox and the sessions there.
    """

    state: Mapping[str, Any]
    spec: SandboxSpec
    sandbox: Checkpoint

    @property
    def lost(self) -> tuple[str, ...]:
        """Names of what the restored sandboxes do not have, such as background processes."""
        return self.sandbox.lost

    async def close(self) -> None:
        """Free its files and memory. Idempotent; environments that were restored from it go on."""
        await self.sandbox.close()


class SandboxedEnvironment[TaskT: Task](Environment[TaskT]):
    """Environment with one sandbox and one toolbox."""

    #: First message of every episode of the family.
    system_prompt: ClassVar[str]
    #: The tools that run in the sandbox.
    sandbox_tools: ClassVar[tuple[ToolSpec, ...]]
    #: Tools that run here, outside the sandbox: their resources (the network, a key) never enter the sandbox.
    host_tools: ClassVar[tuple[ToolSpec, ...]] = ()
    #: Tool with which the agent finishes and, if the family wants one, submits an answer.
    finish_spec: ClassVar[ToolSpec]
    #: Engine of the sandbox's Python session.
    python: ClassVar[PythonEngine] = PythonEngine.NONE
    #: Image that replaces the one of `sandbox_spec`, if `with_options` set one.
    image: ClassVar[Path | None] = None
    #: Properties of the sandboxes that `with_options` may change: limits, network, image, python. A family
    #: omits those that its tasks depend on.
    sandbox_options: ClassVar[frozenset[str]] = frozenset({"limits", "network", "python"})
    takes_checkpoints: ClassVar[bool] = True
    #: Timeout of a tool call if the caller gives none, in seconds.
    call_timeout_s: ClassVar[float] = 60.0

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        self._phase = Phase.NEW
        self._task: TaskT | None = None
        self._session: SandboxSession | None = None
        self._exits = AsyncExitStack()
        self._answer: str | None = None
        self._last_words = ""

    @classmethod
    def load(cls, row: Mapping[str, Any]) -> TaskT:
        task = validate_row(cls.task_type, row)
        return task  # type: ignore[return-value]  # task_type is the family's TaskT

    @classmethod
    def image_name(cls, task: TaskT, bases: Mapping[str, Path]) -> str:
        return "" if cls.image is None else place_of(cls.image)

    @property
    def sandbox_id(self) -> str | None:
        return None if self._session is None else self._session.sandbox.id

    @property
    def tools(self) -> Sequence[ToolSpec]:
        return (*self.host_tools, *self.sandbox_tools, self.finish_spec)

    def prompt(self, task: TaskT) -> Prompt:
        messages: list[Message] = [
            {"role": "system", "content": self.system_prompt},
            {"role": "user", "content": task.instruction},
        ]
        return Prompt(messages=messages, tools=self.tools)

    async def init(self, task: TaskT) -> Prompt:
        self._expect("init", Phase.NEW)
        self._phase = Phase.STARTING
        if obstacle := self.driver_obstacle(self.node.driver.name):
            raise UnsupportedMachine(obstacle, hint="`prorl-envs doctor` shows what this machine lacks")
        opening = sandbox_session(self.node, self.sandbox_spec(task), python=self.python)
        self._session = await self._exits.enter_async_context(opening)
        await self.prepare(task, self._session)
        self._task = task
        self._phase = Phase.READY
        return self.prompt(task)

    async def call(self, call: ToolCall, *, timeout_s: float | None = None) -> ToolResult:
        self._expect("call", Phase.READY, Phase.FINISHED)
        if self._phase is Phase.FINISHED:
            return ToolResult(text="The episode is finished: no further calls are taken.", ok=False)
        if call.name == self.finish_spec.name:
            return self._finish(call)
        limit = self.call_timeout_s if timeout_s is None else timeout_s
        if call.name in [tool.name for tool in self.host_tools]:
            return await self.call_host(call, timeout_s=limit)
        names = [tool.name for tool in (*self.host_tools, *self.sandbox_tools)]
        if call.name not in names:
            known = ", ".join([*names, self.finish_spec.name])
            return ToolResult(text=f"There is no tool {call.name[:100]!r}. The tools are: {known}.", ok=False)
        return await self._here("call").tools.call(call, timeout_s=limit)

    async def examine(self, script: str, *, stdin: bytes = b"") -> bytes | None:
        run = self._here("examine").tools.run
        try:
            done = await run(
                ["/bin/sh", "-c", script],
                stdin=stdin,
                timeout_s=_EXAMINE_S,
                output_limit=_EXAMINE_BYTES,
                apart=True,
            )
        except OSError:  # the image has no shell
            return None
        return done.output

    async def checkpoint(self) -> EpisodeCheckpoint:
        """Save the episode between two calls; it goes on. The caller closes the checkpoint.

        Raises:
            UnsupportedMachine: this family, or the driver here, takes no checkpoints.
            SandboxError, ToolError: our infrastructure failed.
        """
        self._expect("checkpoint", Phase.READY, Phase.FINISHED)
        self._check_checkpoints()
        session = self._here("checkpoint")
        state = {name: value for name, value in vars(self).items() if name not in _RESOURCES}
        return EpisodeCheckpoint(state, session.sandbox.spec, await session.tools.checkpoint())

    async def restore(self, checkpoint: EpisodeCheckpoint) -> None:
        """Go on from a checkpoint of this family, in a new sandbox; this environment's own is closed.

        Raises:
            UnsupportedMachine, SandboxError, ToolError: see `checkpoint`.
        """
        self._check_checkpoints()
        await self.close_agent_sandbox()
        vars(self).update(checkpoint.state)
        spec = replace(checkpoint.spec, checkpoint=checkpoint.sandbox)
        opening = sandbox_session(self.node, spec, python=self.python)
        self._session = await self._exits.enter_async_context(opening)

    def _check_checkpoints(self) -> None:
        if not self.takes_checkpoints:
            raise UnsupportedMachine(
                f"episodes of {self.name} take no checkpoints: they have state elsewhere"
            )

    def on_transcript(self, messages: Sequence[Message]) -> None:
        last = messages[-1] if messages else {}
        if self._phase is Phase.READY and last.get("role") == "assistant" and not last.get("tool_calls"):
            self._last_words = str(last.get("content") or "")[-MAX_WORDS:]

    async def eval(self) -> Grade:
        self._expect("eval", Phase.READY, Phase.FINISHED)
        self._phase = Phase.GRADED
        if self._task is None:
            raise EnvironmentFault("eval: the episode has no task")
        return await self.grade(self._task, self._here("eval"))

    async def close(self) -> None:
        self._phase = Phase.CLOSED
        await self.close_agent_sandbox()

    async def close_agent_sandbox(self) -> None:
        """Close the agent's sandbox. A grader calls this method as soon as it has read everything that it
        grades, so that no process of the agent runs during the checks."""
        self._session = None
        await self._exits.aclose()

    def jupyter_connection_file(self) -> Path:
        """Return the connection file that a Jupyter client of this user needs to attach to the kernel.

        Raises:
            InputError: the episode has no Jupyter kernel.
        """
        return self._here("attach").tools.jupyter_connection_file()

    @property
    def answer(self) -> str | None:
        """Answer that the agent submitted with its finish call; None without a finish call."""
        return self._answer

    @property
    def last_words(self) -> str:
        """Text of the answer without a tool call that finished the episode, or ""."""
        return self._last_words

    def sandbox_spec(self, task: TaskT) -> SandboxSpec:
        """Return the spec of the agent's sandbox for `task`."""
        return SandboxSpec()

    async def call_host(self, call: ToolCall, *, timeout_s: float) -> ToolResult:
        """Run a call of one of the `host_tools`; its arguments are hostile.

        Raises:
            ToolError: a resource of the tool failed.
        """
        raise EnvironmentFault(f"{self.name} does not implement its host tool {call.name}")

    @abstractmethod
    async def prepare(self, task: TaskT, session: SandboxSession) -> None:
        """Bring the workspace into the initial state of the task.

        Raises:
            EnvironmentFault: the task cannot be prepared.
        """

    @abstractmethod
    async def grade(self, task: TaskT, session: SandboxSession) -> Grade:
        """Grade the episode; called once. `session` is the agent's own sandbox: treat it as hostile.

        Raises:
            GraderError: there is no verdict.
        """

    def _finish(self, call: ToolCall) -> ToolResult:
        answer = call.arguments.get("answer")
        if answer is None:  # some models write null for "not given"
            answer = ""
        # Some models submit 42 instead of "42". The bound excludes numbers whose text would be too long.
        if isinstance(answer, int | float) and abs(answer) < 2**53:
            answer = str(answer)
        if not isinstance(answer, str) or call.arguments.keys() - {"answer"}:
            return ToolResult(text="finish takes one argument, answer, a text.", ok=False)
        if not is_utf8(answer):
            return ToolResult(text="The answer holds half a surrogate pair, which is no character.", ok=False)
        if len(answer) > MAX_ANSWER_CHARS:
            return ToolResult(text=f"The answer is longer than {MAX_ANSWER_CHARS} characters.", ok=False)
        self._answer = answer
        self._phase = Phase.FINISHED
        return ToolResult(text="Finished.", data={"answer": answer})

    def _here(self, action: str) -> SandboxSession:
        if self._session is None:
            raise EnvironmentFault(f"{action}: the episode has no sandbox")
        return self._session

    def _expect(self, action: str, *phases: Phase) -> None:
        if self._phase not in phases:
            raise EnvironmentFault(
                f"{action}: the episode is {self._phase}", hint="init once, call, eval once, close"
            )
