"""An agentic task: written once, served as a gymnasium environment, a NeMo Gym resources server and
through the rollout service. The contract of the ProRL Agent paper's task handlers (arXiv 2603.18815),
with tools as its own step so that an agent loop can live anywhere.

    env = BashEnvironment(node)
    prompt = await env.init(task)          # start the sandbox, prepare the workspace
    result = await env.call(ToolCall(...)) # any number of times
    env.listen(messages)                   # what was said, for a grader that judges that
    grade  = await env.eval()              # a grader the agent could not tamper with
    await env.close()                      # nothing is left
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field

from prorl_envs.env.node import Node
from prorl_envs.tools.types import JsonObject, ToolCall, ToolResult, ToolSpec

#: A chat message in OpenAI shape: {"role": ..., "content": ..., ["tool_calls"], ["tool_call_id"]}.
type Message = dict[str, Any]


class ReferenceCall(BaseModel):
    """One tool call of a reference solution."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tool: str
    arguments: dict[str, Any]


class Task(BaseModel):
    """One task of a family; subclasses add fields. Unknown fields are refused.

    Args:
        id: unique in its data file.
        instruction: what the agent is asked to do.
        reference: tool calls that solve the task, for validation and for the scripted model server.
            Never shown to the agent, never in the sandbox.
        reference_answer: what the reference says after its calls, where the grader judges what is said.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str = Field(min_length=1, max_length=200)
    instruction: str = Field(min_length=1)
    reference: tuple[ReferenceCall, ...] = ()
    reference_answer: str = ""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What an episode starts with: the first messages and the tools on offer."""

    messages: Sequence[Message]
    tools: Sequence[ToolSpec]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grade:
    """A grader's verdict. It exists only if the grader ran to its end.

    Args:
        reward: the scalar a trainer sees; in [0, 1] for every built-in family.
        components: named parts of the reward.
        evidence: what the grader saw (checks with their output, tests with their status); JSON.
    """

    reward: float
    components: Mapping[str, float] = field(default_factory=dict)
    evidence: JsonObject = field(default_factory=dict)


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
    #: What of the family can be set, where anything can; `options` are the values in force.
    options_type: ClassVar[type[BaseModel] | None] = None

    def __init__(self, node: Node) -> None:
        self.node = node

    @property
    def sandbox_id(self) -> str | None:
        """The id of the agent's sandbox on this machine, where it has one now. For operators."""
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
        """Why this machine cannot run `task` (a missing interpreter, say), or "" where it can. May block."""
        return ""

    @classmethod  # noqa: B027 - most families need nothing
    async def provision(cls, node: Node, task: TaskT, progress: Callable[[str], None]) -> None:
        """Do beforehand what the first episode of `task` on a machine has to: build, pull, check. Where that
        is done already, nothing is.

        Args:
            node: the machine.
            progress: told in a few words what is being done; not called where there is nothing to do.

        Raises:
            SandboxError, ToolError, EnvironmentFault: it cannot be done.
        """

    @property
    @abstractmethod
    def tools(self) -> Sequence[ToolSpec]:
        """The tools on offer; fixed per family, or for a family whose tasks bring their own, those of the
        task that was initialised."""

    def prompt(self, task: TaskT) -> Prompt:
        """What `init` returns for `task`, without starting anything, so that other frameworks' data files
        can be rendered from it. A family overrides this where the agent is told more."""
        return Prompt(messages=[{"role": "user", "content": task.instruction}], tools=self.tools)

    @abstractmethod
    async def init(self, task: TaskT) -> Prompt:
        """Start the sandbox and prepare the workspace.

        Raises:
            SandboxError, ToolError, EnvironmentFault.
        """

    @abstractmethod
    async def call(self, call: ToolCall, *, timeout_s: float | None = None) -> ToolResult:
        """Run one tool call. What the model got wrong is a result with `ok=False`, never an exception.

        Args:
            call: the model's call; arguments are validated here.
            timeout_s: seconds this call may take; None takes the family's default.

        Raises:
            SandboxError, ToolError: our infrastructure failed.
        """

    def listen(self, messages: Sequence[Message]) -> None:  # noqa: B027 - most families need not know
        """The conversation up to now, told once, before `eval`. For a family whose grader judges what was
        said; the others grade what was done, and take no notice.

        Args:
            messages: the prompt's messages first, then in the model's own words what it said and called and
                what it was shown. Hostile, and not to be changed.
        """

    def expect_eval(self) -> None:  # noqa: B027 - most graders need nothing of their own
        """`eval` follows, perhaps after a wait. What its grader needs may be started meanwhile; nothing of it
        may reach the agent, and `close` leaves nothing of it."""

    @abstractmethod
    async def eval(self) -> Grade:
        """Grade the episode where the agent could not tamper with the grader.

        Raises:
            GraderError: the grader itself failed; there is no reward.
        """

    @abstractmethod
    async def close(self) -> None:
        """Leave nothing behind. Idempotent; safe after a failed init and under cancellation."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()
