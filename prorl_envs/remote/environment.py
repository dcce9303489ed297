"""NeMo Gym resources server as an environment: INIT seeds it, RUN calls its tools, EVAL requests its verdict.

The protocol is that of NeMo Gym's `simple_agent`: `POST /seed_session` with the row, `POST /<tool>` with the
arguments of a call, `POST /verify` with the row and the model's response. Cookies identify the episode. If
the server takes the typed seeds of NeMo Gym 0.7, the episode has an id, and ends with `POST /close_session`.
This module depends only on the protocol, and imports nothing from NeMo Gym.
"""

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar
from uuid import uuid4

from prorl_envs.clock import Clock, SystemClock
from prorl_envs.env.base import Environment, Grade, Message, Prompt, Task
from prorl_envs.env.node import Node
from prorl_envs.env.responses import output_items
from prorl_envs.env.sandboxed import Phase
from prorl_envs.errors import EnvironmentFault, GraderError, InputError, ToolError
from prorl_envs.remote.http import HttpReply, RemoteConnection, RemoteUnavailable, Unanswered
from prorl_envs.remote.servers import ResourcesServer
from prorl_envs.remote.task import NemoTask, read_row
from prorl_envs.remote.verdict import VerifierUnavailable, read_verdict
from prorl_envs.tools.types import JsonObject, ToolCall, ToolResult, ToolSpec

#: Maximum size in bytes of the response to a seed or verify request, which repeats the conversation.
MAX_ANSWER_BYTES = 64 * 2**20
#: Timeout in seconds of the questions that do not decide about an episode.
ASIDE_S = 10.0
#: Pauses in seconds before the retries of a seed request.
SEED_PAUSES_S = (0.2, 1.0, 3.0)


class NemoEnvironment(Environment[NemoTask]):
    """Episode on a resources server. Subclasses set the server."""

    task_type: ClassVar[type[Task]] = NemoTask
    server: ClassVar[ResourcesServer]
    clock: ClassVar[Clock] = SystemClock()

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        self._phase = Phase.NEW
        self._task: NemoTask | None = None
        self._connection: RemoteConnection | None = None
        self._session: JsonObject = {}  # ids of a typed session
        self._transcript: Sequence[Message] = ()
        self._observations: list[str] = []

    @classmethod
    def load(cls, row: Mapping[str, Any]) -> NemoTask:
        return read_row(row)

    @property
    def tools(self) -> Sequence[ToolSpec]:
        return self._task.specs if self._task else ()

    def prompt(self, task: NemoTask) -> Prompt:
        return task.prompt()

    async def init(self, task: NemoTask) -> Prompt:
        self._check_phase("init", Phase.NEW)
        self._phase = Phase.STARTING
        self._connection = self.server.connection(self.clock)
        await self._seed(self._connection, task)
        self._task, self._phase = task, Phase.READY
        return task.prompt()

    async def call(self, call: ToolCall, *, timeout_s: float | None = None) -> ToolResult:
        self._check_phase("call", Phase.READY, Phase.FINISHED)
        if self._phase is Phase.FINISHED:
            return ToolResult(text="The episode is finished: no further calls are taken.", ok=False)
        result = await self._call(call, self.server.call_s if timeout_s is None else timeout_s)
        self._observations.append(result.text)
        if result.ok and call.name == self.finish_tool:
            self._phase = Phase.FINISHED
        return result

    def on_transcript(self, messages: Sequence[Message]) -> None:
        self._transcript = messages

    async def eval(self) -> Grade:
        self._check_phase("eval", Phase.READY, Phase.FINISHED)
        self._phase = Phase.GRADED
        task, connection = self._task, self._connection
        if task is None or connection is None:
            raise EnvironmentFault("eval: the episode has no task")
        body = task.row | {"response": self._response(task)}
        try:
            reply = await connection.post(
                "/verify", body, seconds=self.server.verify_s, max_bytes=MAX_ANSWER_BYTES
            )
        except Unanswered as error:
            raise VerifierUnavailable(f"the server returned no verdict: {error}") from error
        except TimeoutError as error:
            raise GraderError(f"the server returned no verdict in {self.server.verify_s:g} s") from error
        return read_verdict(reply, task.row)

    async def close(self) -> None:
        self._phase = Phase.CLOSED
        connection, self._connection = self._connection, None
        if connection is not None:
            if self._session:
                await _aside(connection, "POST", "/close_session", self._session)
            await connection.aclose()

    async def _seed(self, connection: RemoteConnection, task: NemoTask) -> None:
        """Start the session. Retries are safe: each finds the same typed session, or else starts a new one,
        and an earlier one is unused."""
        problem = ""
        for pause in (*SEED_PAUSES_S, None):
            try:
                body = await self._seed_body(connection, task)
                reply = await connection.post(
                    "/seed_session", body, seconds=self.server.seed_s, max_bytes=MAX_ANSWER_BYTES
                )
            except Unanswered as error:
                problem = str(error)
            except TimeoutError as error:
                message = f"the server did not open the session in {self.server.seed_s:g} s"
                raise RemoteUnavailable(message) from error
            else:
                if not reply.unavailable:
                    return _check_seed(reply)
                problem = reply.excerpt()
            if pause is not None:
                connection.forget()
                await self.clock.sleep(pause)
        raise RemoteUnavailable(f"the session cannot be opened: {problem}", hint="is the server running?")

    async def _seed_body(self, connection: RemoteConnection, task: NemoTask) -> JsonObject:
        if not await self._takes_typed_seeds(connection):
            return task.row
        if not self._session:
            episode = uuid4().hex
            self._session = {"resources_session_id": episode, "episode_id": {"rollout_id": episode}}
        data = {key: value for key, value in task.row.items() if key != "responses_create_params"}
        return self._session | {"task_id": {"taskset": self.name, "task_id": task.id}, "task_data": data}

    async def _takes_typed_seeds(self, connection: RemoteConnection) -> bool:
        """Return whether the server's description of its routes has a seed with a session's id. Asks until
        the server answers, with an error if it does not describe itself."""
        if self.server.typed is None:
            reply = await _aside(connection, "GET", "/openapi.json", {})
            if reply is None or reply.unavailable:
                raise Unanswered(reply.excerpt() if reply else "GET /openapi.json got no answer")
            text = reply.text if reply.status < 400 else ""
            self.server.typed = '"resources_session_id"' in text and '"task_data"' in text
        return self.server.typed

    async def _call(self, call: ToolCall, seconds: float) -> ToolResult:
        names = [tool.name for tool in self.tools]
        if call.name not in names:  # the model must not choose other routes of the server
            known = f"The tools are: {', '.join(names)}." if names else "There are no tools."
            return ToolResult(text=f"There is no tool {call.name[:100]!r}. {known}", ok=False)
        if self._connection is None:
            raise EnvironmentFault("call: the episode has no connection")
        started = self.clock.monotonic()
        try:
            reply = await self._connection.post(
                f"/{call.name}", call.arguments, seconds=seconds, max_bytes=self.server.tool_bytes
            )
        except Unanswered as error:
            raise ToolError(f"{call.name}: {error}", hint="see the server's log") from error
        except TimeoutError:
            text = f"[the call was ended after {seconds:g} s]"
            return ToolResult(text=text, ok=False, data={"timed_out": True}, duration_s=seconds)
        if reply.unavailable or (reply.status == 500 and self.server.fail_on_500):
            raise ToolError(f"{call.name}: {reply.excerpt()}", hint="see the server's log")
        return _tool_result(reply, self.clock.monotonic() - started)

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
            "output": output_items(self._transcript[len(task.messages) :], self._observations),
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": tools,
        }

    def _check_phase(self, action: str, *phases: Phase) -> None:
        if self._phase not in phases:
            raise EnvironmentFault(
                f"{action}: the episode is {self._phase}", hint="init once, call, eval once, close"
            )


async def _aside(connection: RemoteConnection, method: str, path: str, body: JsonObject) -> HttpReply | None:
    """Send a request whose failure does not matter; return the answer, if there is one."""
    with contextlib.suppress(Unanswered, TimeoutError):
        return await connection.request(method, path, body, seconds=ASIDE_S, max_bytes=MAX_ANSWER_BYTES)
    return None


def _check_seed(reply: HttpReply) -> None:
    if reply.status >= 400:
        raise EnvironmentFault(
            f"the server refuses the row: {reply.excerpt()}",
            hint="does the row belong to this server? Is the URL that of a resources server?",
        )


def _tool_result(reply: HttpReply, seconds: float) -> ToolResult:
    """Return the tool result for the model. As in NeMo Gym's agents, it has the body of an error response."""
    text = reply.text
    if reply.cut:
        text += f"\n[only the first {len(reply.body)} bytes of the answer are shown]"
    ok = reply.status < 400 and not reply.refused
    return ToolResult(text=text, ok=ok, data={"status": reply.status}, duration_s=seconds)


def nemo_family(name: str, server: ResourcesServer) -> type[NemoEnvironment]:
    """Return the environment class of a collection whose episodes run on `server`.

    Raises:
        InputError: the name is empty.
    """
    if not name:
        raise InputError("a collection needs a name")
    fields = {"name": name, "server": server, "finish_tool": server.finish_tool}
    return type("NemoEnvironment", (NemoEnvironment,), fields)
