"""Environment without a sandbox, and model without a server; both misbehave on request.

They implement the real interfaces, and tests of the rollout service can control and observe every event.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field, ValidationError

from prorl_envs.env.base import Environment, Grade, Prompt, Task
from prorl_envs.env.node import Node
from prorl_envs.errors import EnvironmentFault, GraderError, InputError, SandboxError, ToolError
from prorl_envs.model.tokens.rendering import TemplateRenderer
from prorl_envs.model.types import Sampled, Sampling
from prorl_envs.sandbox.base import Sandbox, SandboxSpec
from prorl_envs.testing.scripted import Call, as_message
from prorl_envs.tools.types import ToolCall, ToolResult, ToolSpec


class Fault(StrEnum):
    """Fault in a step of a toy environment. `ONCE_` faults happen on the first attempt only."""

    HANG = "hang"
    CRASH = "crash"
    SANDBOX = "sandbox"
    ONCE_SANDBOX = "once_sandbox"
    TOOL = "tool"
    ENVIRONMENT = "environment"
    GRADER = "grader"
    NAN = "nan"
    NOT_JSON = "not_json"
    SURROGATE = "surrogate"


class ToyTask(Task):
    """Task of a toy environment.

    Args:
        reward: the grader's reward, unless the model finishes with a `reward`.
        faults: faults in `init`, `call`, `eval` or `close`.
    """

    reward: float = 1.0
    faults: dict[str, Fault] = Field(default_factory=dict)


class ToyWorld:
    """Shared state of the toy environments of one test.

    Attributes:
        gates: events by step (`init`, `call`, `eval`, `close`). A step waits while its event is not set; a
            step without an event does not wait.
        log: every (task id, step) in order of entry, while `logging`; `entered` counts them.
        call_timeouts: timeout of each tool call in seconds, in the order of the calls.
        open: environments that started init and did not finish close.
        inside: steps in progress; `most`: their maximum at any time.
    """

    def __init__(self) -> None:
        self.gates: dict[str, asyncio.Event] = {}
        self.logging = True
        self.log: list[tuple[str, str]] = []
        self.entered: Counter[tuple[str, str]] = Counter()
        self.call_timeouts: list[float | None] = []
        self.open = 0
        self.inside: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self._changed = asyncio.Event()

    def family(self) -> type["ToyEnvironment"]:
        """Class of this world's environments."""
        return type("ToyEnvironment", (ToyEnvironment,), {"world": self})

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` holds. It is evaluated when a step starts or ends, and at intervals."""
        while not condition():
            self._changed.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), 0.05)

    def changed(self) -> None:
        """Notify waiters that the state changed."""
        self._changed.set()


class ToyEnvironment(Environment[ToyTask]):
    """Toy environment; see the module."""

    name: ClassVar[str] = "toy"
    task_type: ClassVar[type[Task]] = ToyTask
    world: ClassVar[ToyWorld]

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        self._task: ToyTask | None = None
        self._claimed: float | None = None
        self._open = False

    @classmethod
    def load(cls, row: Mapping[str, Any]) -> ToyTask:
        try:
            return ToyTask.model_validate(row)
        except ValidationError as error:
            raise InputError(f"toy task: {error.errors()[0]['msg']}") from error

    @property
    def tools(self) -> Sequence[ToolSpec]:
        schema = {"type": "object", "properties": {"text": {"type": "string"}}}
        return [ToolSpec("say", "Say it.", schema), ToolSpec("finish", "Be done.", {"type": "object"})]

    async def init(self, task: ToyTask) -> Prompt:
        self._task = task
        self._open = True
        self.world.open += 1
        await self._step("init")
        return self.prompt(task)

    async def call(self, call: ToolCall, *, timeout_s: float | None = None) -> ToolResult:
        self.world.call_timeouts.append(timeout_s)
        fault = await self._step("call")
        if fault is Fault.SURROGATE:
            return ToolResult(text="\ud800 no UTF-8")
        self._claimed = call.arguments.get("reward", self._claimed)
        text = call.arguments.get("text", "")
        return ToolResult(text=str(text), ok=call.name in ("say", "finish") and text != "refuse")

    async def eval(self) -> Grade:
        fault = await self._step("eval")
        assert self._task is not None
        reward = self._task.reward if self._claimed is None else self._claimed
        if fault is Fault.NAN:
            reward = float("nan")
        evidence = {"what": object()} if fault is Fault.NOT_JSON else {"task": self._task.id}
        return Grade(reward=reward, evidence=evidence)

    async def close(self) -> None:
        if not self._open:
            return
        await self._step("close")
        self._open = False
        self.world.open -= 1
        self.world.changed()

    async def _step(self, step: str) -> Fault | None:
        world, task = self.world, self._task
        assert task is not None
        attempt = world.entered[task.id, step]
        world.entered[task.id, step] += 1
        if world.logging:
            world.log.append((task.id, step))
        world.inside[step] += 1
        world.most[step] = max(world.most[step], world.inside[step])
        world.changed()
        try:
            if step in world.gates:
                await world.gates[step].wait()
            return await _fail(task.faults.get(step), attempt)
        finally:
            world.inside[step] -= 1
            world.changed()


async def _fail(fault: Fault | None, attempt: int) -> Fault | None:
    """Apply a fault, or return the fault if the step must apply it."""
    match fault:
        case Fault.HANG:
            await asyncio.Event().wait()
        case Fault.CRASH:
            raise RuntimeError("the environment has a bug")
        case Fault.SANDBOX:
            raise SandboxError("the sandbox ended")
        case Fault.ONCE_SANDBOX if attempt == 0:
            raise SandboxError("the sandbox ended, this once")
        case Fault.TOOL:
            raise ToolError("the tool server is lost")
        case Fault.ENVIRONMENT:
            raise EnvironmentFault("the task cannot be prepared", hint="mend the row")
        case Fault.GRADER:
            raise GraderError("the grader failed")
    return fault


class NoDriver:
    """Driver of a node without sandboxes."""

    name = "none"
    sandboxes: Collection[Sandbox] = ()

    async def start(self, spec: SandboxSpec) -> Sandbox:
        raise SandboxError("this node has no sandboxes")

    async def aclose(self) -> None:
        """Do nothing."""


def empty_node() -> Node:
    """Create a node without sandboxes."""
    return Node(NoDriver(), Path("/nonexistent"))


type Play = Callable[[str, int], Sequence[Call] | str | Exception]


class ToyModel:
    """Model that samples the results of a function, in the test's own process.

    Args:
        renderer: tokenises the results.
        play: maps session and turn (from 0) to the tool calls of that turn, or its text, or an exception to
            raise.
        gate: if given, every answer waits for it.

    Attributes:
        prompts: per session, the prompts it was sent.
        samplings: per session, the requested sampling settings.
    """

    def __init__(self, renderer: TemplateRenderer, play: Play, *, gate: asyncio.Event | None = None) -> None:
        self._renderer = renderer
        self._play = play
        self._gate = gate
        self.prompts: dict[str, list[tuple[int, ...]]] = {}
        self.samplings: dict[str, list[Sampling]] = {}

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str) -> Sampled:
        prompts = self.prompts.setdefault(session, [])
        prompts.append(tuple(prompt_ids))
        self.samplings.setdefault(session, []).append(sampling)
        if self._gate is not None:
            await self._gate.wait()
        said = self._play(session, len(prompts) - 1)
        if isinstance(said, Exception):
            raise said
        message = {"role": "assistant", "content": said} if isinstance(said, str) else as_message(said)
        ids = self._renderer.assistant(message)
        return Sampled(
            ids=tuple(ids[: sampling.max_tokens]),
            logprobs=tuple(-0.01 * (number % 100) for number in ids[: sampling.max_tokens]),
            finish_reason="stop" if len(ids) <= sampling.max_tokens else "length",
            weight_version="7",
            server="in-process",
        )

    async def aclose(self) -> None:
        """Do nothing."""
