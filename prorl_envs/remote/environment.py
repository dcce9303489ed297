"""NeMo Gym resources server as an environment: INIT seeds it, RUN calls its tools, EVAL requests its verdict.

Protocol: NeMo Gym's resources servers, as its `simple_agent` drives them. `POST /seed_session` with the row,
`POST /<tool>` with the arguments of a call, `POST /verify` with the row and the model's response; cookies
join the requests of an episode. This module depends on that protocol only and imports nothing of NeMo Gym.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

from prorl_envs.clock import Clock, SystemClock
from prorl_envs.env.base import Environment, Grade, Message, Prompt, Task
from prorl_envs.env.node import Node
from prorl_envs.env.responses import output_items
from prorl_envs.env.sandboxed import Phase
from prorl_envs.errors import EnvironmentFault, GraderError, InputError, ToolError
from prorl_envs.remote.http import HttpReply, RemoteConnection, RemoteUnavailable, Unanswered
from prorl_envs.remote.task import NemoTask, read_row
from prorl_envs.remote.verdict import VerifierUnavailable, read_verdict
from prorl_envs.tools.types import JsonObject, ToolCall, ToolResult, ToolSpec

#: Most bytes read of the answer to a seed or to a verify request, which repeats the conversation.
MAX_ANSWER_BYTES = 64 * 2**20
#: Pauses in seconds before each retry of a seed request.
SEED_PAUSES_S = (0.2, 1.0, 3.0)


class Server(Protocol):
    """Server that a collection's episodes use, and their bounds.

    Attributes:
        finish_tool: tool whose call finishes an episode; "" if an answer without a call does.
        fail_on_500: a tool route's internal error fails the episode, instead of being shown to the model.
        seed_s, call_s, verify_s: seconds each kind of request may take.
        tool_bytes: bytes of a tool's answer that the model is shown.
    """

    finish_tool: str
    fail_on_500: bool
    seed_s: float
    call_s: float
    verify_s: float
    tool_bytes: int

    async def connection(self, clock: Clock) -> RemoteConnection:
        """Return a connection for one episode. Starts an own server that is not running.

        Raises:
            RolloutFailure: the server does not start.
        """
        ...


class NemoEnvironment(Environment[NemoTask]):
    """One episode on a resources server. A subclass sets the server."""

    task_type: ClassVar[type[Task]] = NemoTask
    server: ClassVar[Server]
    clock: ClassVar[Clock] = SystemClock()

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        self._phase = Phase.NEW
        self._task: NemoTask | None = None
        self._connection: RemoteConnection | None = None
        self._said: Sequence[Message] = ()
        self._observed: list[str] = []

    @classmethod
    def load(cls, row: Mapping[str, Any]) -> NemoTask:
        return read_row(row)

    @property
    def tools(self) -> Sequence[ToolSpec]:
        return self._task.specs if self._task else ()

    def prompt(self, task: NemoTask) -> Prompt:
        return task.prompt()

    async def init(self, task: NemoTask) -> Prompt:
        self._expect("init", Phase.NEW)
        self._phase = Phase.STARTING
        self._connection = await self.server.connection(self.clock)
        await self._seed(self._connection, task)
        self._task, self._phase = task, Phase.READY
        return task.prompt()

    async def call(self, call: ToolCall, *, timeout_s: float | None = None) -> ToolResult:
        self._expect("call", Phase.READY, Phase.FINISHED)
        if self._phase is Phase.FINISHED:
            return ToolResult(text="The episode is finished: no further calls are taken.", ok=False)
        result = await self._call(call, self.server.call_s if timeout_s is None else timeout_s)
        self._observed.append(result.text)
        if result.ok and call.name == self.finish_tool:
            self._phase = Phase.FINISHED
        return result

    def on_transcript(self, messages: Sequence[Message]) -> None:
        self._said = messages

    async def eval(self) -> Grade:
        self._expect("eval", Phase.READY, Phase.FINISHED)
        self._phase = Phase.GRADED
        task, connection = self._task, self._connection
        if task is None or connection is None:
            raise EnvironmentFault("eval: the episode has no task")
        body = task.row | {"response": self._response(task)}
        try:
            reply = await connection.post(
                "/verify", body, seconds=self.server.verify_s, most=MAX_ANSWER_BYTES
            )
        except Unanswered as error:
            raise VerifierUnavailable(f"the server gave no verdict: {error.why}") from error
        except TimeoutError as error:
            raise GraderError(f"the server gave no verdict in {self.server.verify_s:g} s") from error
        return read_verdict(reply, task.row)

    async def close(self) -> None:
        self._phase = Phase.CLOSED
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.aclose()

    async def _seed(self, connection: RemoteConnection, task: NemoTask) -> None:
        """Start the session, with retries on failure: each attempt is a separate session, and nothing was
        done in the earlier ones."""
        problem = ""
        for pause in (*SEED_PAUSES_S, None):
            try:
                reply = await connection.post(
                    "/seed_session", task.row, seconds=self.server.seed_s, most=MAX_ANSWER_BYTES
                )
            except Unanswered as error:
                problem = error.why
            except TimeoutError as error:
                message = f"the server did not open the session in {self.server.seed_s:g} s"
                raise RemoteUnavailable(message) from error
            else:
                if not reply.away:
                    return _check_seed(reply)
                problem = reply.excerpt()
            if pause is not None:
                connection.forget()
                await self.clock.sleep(pause)
        raise RemoteUnavailable(f"the session cannot be opened: {problem}", hint="is the server running?")

    async def _call(self, call: ToolCall, seconds: float) -> ToolResult:
        names = [tool.name for tool in self.tools]
        if call.name not in names:  # never post to a route that the model invented
            known = f"The tools are: {', '.join(names)}." if names else "There are no tools."
            return ToolResult(text=f"There is no tool {call.name[:100]!r}. {known}", ok=False)
        if self._connection is None:
            raise EnvironmentFault("call: the episode has no connection")
        begun = self.clock.monotonic()
        try:
            reply = await self._connection.post(
                f"/{call.name}", call.arguments, seconds=seconds, most=self.server.tool_bytes
            )
        except Unanswered as error:
            raise ToolError(f"{call.name}: {error.why}", hint="the server's log says more") from error
        except TimeoutError:
            text = f"[the call was ended after {seconds:g} s]"
            return ToolResult(text=text, ok=False, data={"timed_out": True}, duration_s=seconds)
        if reply.away or (reply.status == 500 and self.server.fail_on_500):
            raise ToolError(f"{call.name}: {reply.excerpt()}", hint="the server's log says more")
        return _shown(reply, self.clock.monotonic() - begun)

    def _response(self, task: NemoTask) -> JsonObject:
        tools = [
            {"type": "function", "strict": False}
            | {key: tool[key] for key in ("name", "description", "parameters")}
            for tool in task.tools
        ]
        return {
            "id": "resp_prorl",
            "object": "response",
            "created_at": int(time.time()),
            "status": "completed",
            "model": "policy",
            "output": output_items(self._said[len(task.messages) :], self._observed),
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": tools,
        }

    def _expect(self, action: str, *phases: Phase) -> None:
        if self._phase not in phases:
            raise EnvironmentFault(
                f"{action}: the episode is {self._phase}", hint="init once, call, eval once, close"
            )


def _check_seed(reply: HttpReply) -> None:
    if reply.status >= 400:
        raise EnvironmentFault(
            f"the server refuses the row: {reply.excerpt()}",
            hint="is it a row of this server, and the URL that of a resources server?",
        )


def _shown(reply: HttpReply, seconds: float) -> ToolResult:
    """Return the tool result for the model. As with NeMo Gym's agents, it includes the body of an error."""
    text = reply.text
    if reply.cut:
        text += f"\n[only the first {len(reply.body)} bytes of the answer are shown]"
    ok = reply.status < 400 and not reply.refused
    return ToolResult(text=text, ok=ok, data={"status": reply.status}, duration_s=seconds)


def nemo_family(name: str, server: Server) -> type[NemoEnvironment]:
    """Return the environment class of a collection whose episodes run on `server`.

    Raises:
        InputError: the name is empty.
    """
    if not name:
        raise InputError("a collection needs a name")
    fields = {"name": name, "server": server, "finish_tool": server.finish_tool}
    return type("NemoEnvironment", (NemoEnvironment,), fields)
