"""Interface of an agentic task: written once, served as a gymnasium environment, as a NeMo Gym resources
server and through the rollout service. It follows the task handlers of the ProRL Agent paper (arXiv
2603.18815). Tool calls are a separate step, so that an agent loop can run anywhere.

    env = BashEnvironment(node)
    prompt = await env.init(task)          # start the sandbox, prepare the workspace
    result = await env.call(ToolCall(...)) # any number of times
    env.on_transcript(messages)            # the transcript, for graders that judge it
    grade  = await env.eval()              # a grader the agent could not tamper with
    await env.close()                      # release everything
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, Field

from prorl_envs.env.columns import WITHOUT_NULLS, RowModel
from prorl_envs.env.node import Node
from prorl_envs.errors import EnvironmentFault, GraderError
from prorl_envs.strict_json import json_problem
from prorl_envs.tools.types import JsonObject, ToolCall, ToolResult, ToolSpec

#: A chat message in OpenAI shape: {"role": ..., "content": ..., ["tool_calls"], ["tool_call_id"]}.
type Message = dict[str, Any]


class ReferenceCall(RowModel):
    """One tool call of a reference solution."""

    tool: str
    arguments: Annotated[dict[str, Any], WITHOUT_NULLS]


class Task(RowModel):
    """One task of a family; subclasses add fields. Unknown fields are refused.

    Args:
        id: unique in its data file.
        instruction: the request to the agent.
        reference: tool calls that solve the task, for validation and for the scripted model server. Never
            shown to the agent, never in the sandbox.
        reference_answer: final answer of the reference after its calls, if the grader judges answers.
    """

    id: str = Field(min_length=1, max_length=200)
    instruction: str = Field(min_length=1)
    reference: tuple[ReferenceCall, ...] = ()
    reference_answer: str = ""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Start of an episode: the first messages and the available tools.

    Raises:
        EnvironmentFault: the prompt cannot be sent as JSON.
    """

    messages: Sequence[Message]
    tools: Sequence[ToolSpec]

    def __post_init__(self) -> None:
        if problem := json_problem([*self.messages, *(tool.to_openai() for tool in self.tools)]):
            raise EnvironmentFault(f"the prompt is not JSON: {problem}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Grade:
    """Verdict of a grader. It exists only if the grader finished.

    Args:
        reward: the scalar a trainer sees; in [0, 1] for every built-in family.
        components: named parts of the reward.
        evidence: the grader's observations (checks with their output, tests with their status); JSON.

    Raises:
        GraderError: the reward or a component is not a finite number, or the evidence is not JSON. An invalid
            reward is the grader's failure, never a 0.
    """

    reward: float
    components: Mapping[str, float] = field(default_factory=dict)
    evidence: JsonObject = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value in {"reward": self.reward, **self.components}.items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not abs(value) <= sys.float_info.max:  # false for NaN, too
                shown = "an integer" if type(value) is int else repr(value)[:50]  # 5,000 digits have no repr
                raise GraderError(f"the grader gave {shown} for {name}, which is not a finite number")
        if not isinstance(self.evidence, dict):
            raise GraderError("the grader's evidence is not a JSON object")
        if problem := json_problem(self.evidence):
            raise GraderError(f"the grader's evidence is not JSON: {problem}")


class Environment[TaskT: Task](ABC):
    """One episode of one task. Single use: init, any number of calls, eval, close.

    Args:
        node: this machine's sandboxes and templates.
    """

    #: Name of the family: the folder under envs/, the collection key, the last part of the NeMo Gym name.
    name: ClassVar[str]
    task_type: ClassVar[type[Task]]
    #: Name of the tool with which the agent declares that it is done.
    finish_tool: ClassVar[str] = "finish"
    #: Model of the family's options, None if it has none; `options` holds the values in force.
    options_type: ClassVar[type[BaseModel] | None] = None
    #: Whether the tasks or the grader rely on paths that only isolated sandboxes have: `/workspace`, mounts.
    needs_isolation: ClassVar[bool] = True
    #: Whether the sandbox and the fields of the environment are the whole state of an episode.
    takes_checkpoints: ClassVar[bool] = False
    #: Whether the recorded tool calls and answers of an episode are enough to repeat its verdict.
    repeatable: ClassVar[bool] = False
    #: Fields of a task, besides the reference, that decide the reward and that the agent must not see.
    hidden_fields: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, node: Node) -> None:
        self.node = node

    @property
    def sandbox_id(self) -> str | None:
        """Id of the agent's sandbox on this machine, None if there is none now. For operators."""
        return None

    @classmethod
    @abstractmethod
    def load(cls, row: Mapping[str, Any]) -> TaskT:
        """Validate one data row.

        Raises:
            InputError: names the field that is wrong.
        """

    @classmethod
    def unavailable(cls, task: TaskT) -> str:
        """Return why this machine cannot run `task` (for example, no interpreter), or "" if it can. May
        block."""
        return ""

    @classmethod
    def parts(cls, task: TaskT) -> tuple[JsonObject, JsonObject]:
        """Split a task into the fields that the agent sees or starts with, and those that are hidden from it;
        neither has the reference. For audits."""
        shown = task.model_dump(mode="json", exclude={"id", "reference", "reference_answer"})
        return shown, {name: shown.pop(name) for name in sorted(cls.hidden_fields)}

    @classmethod
    def image_name(cls, task: TaskT, bases: Mapping[str, Path]) -> str:
        """Return a text that changes with the images of `task`, given those of `images.bases`. For audits."""
        return ""

    @classmethod
    def driver_obstacle(cls, driver: str) -> str:
        """Return why sandboxes of a driver cannot run this family, or "" if they can.

        Args:
            driver: name of the driver, or value of the setting `driver`.
        """
        if cls.needs_isolation and driver == "local":
            return f"{cls.name} tasks need isolated sandboxes, which the driver `local` does not offer"
        return ""

    @classmethod
    def obstacle(cls, task: TaskT, driver: str) -> str:
        """Return why this machine cannot run `task` in sandboxes of a driver, or "" if it can. May block.

        Args:
            driver: as in `driver_obstacle`.
        """
        return cls.driver_obstacle(driver) or cls.unavailable(task)

    @classmethod  # noqa: B027 - most families need nothing
    async def provision(cls, node: Node, task: TaskT, progress: Callable[[str], None]) -> None:
        """Do the one-time work of the first episode of `task` on a machine in advance: build, pull, check.
        Idempotent.

        Args:
            node: the machine.
            progress: called with a short description of each step; not called if there is nothing to do.

        Raises:
            SandboxError, ToolError, EnvironmentFault: the preparation failed.
        """

    @property
    @abstractmethod
    def tools(self) -> Sequence[ToolSpec]:
        """Available tools: fixed per family, or those of the initialised task if tasks bring their own."""

    def prompt(self, task: TaskT) -> Prompt:
        """Return the prompt that `init` returns for `task`, without starting anything. Exports to data files
        of other frameworks use it. A family overrides this method if its prompt holds more than the
        instruction."""
        return Prompt(messages=[{"role": "user", "content": task.instruction}], tools=self.tools)

    @abstractmethod
    async def init(self, task: TaskT) -> Prompt:
        """Start the sandbox and prepare the workspace.

        Raises:
            SandboxError, ToolError, EnvironmentFault.
        """

    @abstractmethod
    async def call(self, call: ToolCall, *, timeout_s: float | None = None) -> ToolResult:
        """Run one tool call. A mistake of the model gives a result with `ok=False`, never an exception.

        Args:
            call: the model's call; arguments are validated here.
            timeout_s: seconds this call may take; None takes the family's default.

        Raises:
            SandboxError, ToolError: our infrastructure failed.
        """

    async def examine(self, script: str, *, stdin: bytes = b"") -> bytes | None:
        """Run a shell script in the agent's sandbox, beside the tools. For audits.

        Returns:
            its output, without errors; None if the episode has no sandbox here.

        Raises:
            SandboxError, ToolError: our infrastructure failed.
        """
        return None

    def on_transcript(self, messages: Sequence[Message]) -> None:  # noqa: B027 - most families need not know
        """Receive the transcript, once, before `eval`. For families whose grader judges the transcript;
        families that grade only the actions ignore it.

        Args:
            messages: the messages of the prompt, then the model's answers and calls verbatim and the tool
                results. Hostile; must not be changed.
        """

    @abstractmethod
    async def eval(self) -> Grade:
        """Grade the episode in a place that the agent could not tamper with.

        Raises:
            GraderError: the grader itself failed; there is no reward.
        """

    @abstractmethod
    async def close(self) -> None:
        """Release all resources. Idempotent; safe after a failed init and under cancellation."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()
