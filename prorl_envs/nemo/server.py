"""NeMo Gym resources server for any environment family.

One class serves all families; the `environment` key of the YAML block selects one. Two kinds of agent drive
it:

- `simple_agent`: `/seed_session`, `/verify`, and any other path for the tool of that name;
- `gymnasium_agent`: `/reset` and `/step`, with gymnasium's five values.

`routes.py` prevents a model from using a route by calling a tool of that name.
"""

# mypy: allow-subclassing-any, no-warn-return-any, disable-error-code="import-not-found,import-untyped"
# NeMo Gym is an optional extra and ships no types.

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, ClassVar
from uuid import uuid4

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from nemo_gym.base_resources_server import SimpleResourcesServer
from nemo_gym.config_types import AggregateMetrics, AggregateMetricsRequest
from nemo_gym.openai_utils import NeMoGymResponse
from nemo_gym.server_utils import SESSION_ID_KEY
from pydantic import PrivateAttr

from prorl_envs.app.compose import node
from prorl_envs.catalog import Catalog
from prorl_envs.config import Settings, load_settings
from prorl_envs.env.base import Environment
from prorl_envs.env.node import Node
from prorl_envs.env.runner import Runner
from prorl_envs.errors import InputError, ProrlError, RolloutFailure
from prorl_envs.nemo.failures import TOOL_UNAVAILABLE, error_body, http_status
from prorl_envs.nemo.process import die_with_parent, live_within
from prorl_envs.nemo.routes import CLOSE, separate_tool_calls
from prorl_envs.nemo.rows import task_row, unstarted
from prorl_envs.nemo.sessions import MAX_ARGUMENT_BYTES, SessionLimits, Sessions, parse_arguments
from prorl_envs.nemo.wire import (
    KNOWS_SESSIONS,
    CloseRequest,
    CloseResponse,
    EnvironmentServerConfig,
    ResetResponse,
    SeededResponse,
    SeedRequest,
    SeedResponse,
    StepRequest,
    StepResponse,
    VerifyRequest,
    VerifyResponse,
    details,
    graded,
    masked,
)
from prorl_envs.tools.types import JsonObject, ToolCall

logger = logging.getLogger(__name__)

#: Header of the response if a tool could not execute the call, for example because of a wrong argument.
REFUSED_HEADER = "x-prorl-refused"


class EnvironmentServer(SimpleResourcesServer):
    """Server of the family named in its configuration."""

    ray_enabled: ClassVar[bool] = False
    config: EnvironmentServerConfig
    _family: type[Environment[Any]] = PrivateAttr()
    _sessions: Sessions = PrivateAttr()
    # The sessions have an event loop of their own: NeMo Gym's checks send each request from another one.
    _runner: Runner = PrivateAttr()

    @classmethod
    def run_webserver(cls) -> FastAPI | None:
        # NeMo Gym interrupts the shell around this process and kills only that shell a second later.
        die_with_parent()
        app: FastAPI | None = super().run_webserver()
        return app

    def setup_webserver(self) -> FastAPI:
        config = self.config
        settings = load_settings(config.config, os.environ)
        self._family = Catalog.of(settings).family(config.environment)
        if "warm_pool_size" not in settings.sandbox.model_fields_set:  # one per server would take much memory
            sandbox = settings.sandbox.model_copy(update={"warm_pool_size": 0})
            settings = settings.model_copy(update={"sandbox": sandbox})
        self._runner = Runner(partial(self._node, settings))
        limits = SessionLimits(
            open=config.max_sessions,
            idle_s=config.idle_s,
            queue_s=config.queue_s,
            init_s=config.init_s,
            eval_s=config.eval_s,
        )
        self._sessions = Sessions(lambda: self._family(self._runner.node), limits)
        app: FastAPI = super().setup_webserver()
        if not KNOWS_SESSIONS:
            app.post(CLOSE)(self.close_resources_session)
        app.post("/reset")(self.reset)
        app.post("/step")(self.step)
        separate_tool_calls(app, sessions=self._sessions, session_id=_session_id, call_tool=self.call_tool)
        app.add_exception_handler(ProrlError, answer_error)
        live_within(app, self._serving)
        return app

    @asynccontextmanager
    async def _serving(self) -> AsyncIterator[None]:
        await self._run(self._sessions.expire)  # creates the node, so that an error of it ends the start
        try:
            yield
        finally:
            await asyncio.to_thread(self._runner.close)

    @asynccontextmanager
    async def _node(self, settings: Settings) -> AsyncIterator[Node]:
        """Open the node, on which sessions expire until all are closed."""
        async with node(settings) as opened:
            expiring = asyncio.create_task(self._sessions.keep_expiring())
            try:
                yield opened
            finally:
                expiring.cancel()
                await self._sessions.aclose()

    async def _run[T](self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run `work` in the event loop of the sessions."""
        return await self._runner.run_from_loop(lambda _: work())

    async def seed_session(self, request: Request, body: SeedRequest) -> Any:
        """Start the episode. Repeating a seed finds the same episode.

        Returns:
            The id that the request chose, or an empty response: the session's id is in the cookie.

        Raises:
            InputError: the row carries no valid task.
            RolloutFailure: the episode did not start, and failures are configured as errors; or the caller
                chose the session's id, and another attempt may succeed: NeMo Gym then tries again.
        """
        chosen = body.resources_session_id
        if chosen is not None:
            request.session[SESSION_ID_KEY] = chosen
        session_id, row = _session_id(request), task_row(body.model_dump(exclude_unset=True))
        try:
            await self._run(lambda: self._sessions.open(session_id, row))
        except RolloutFailure as failure:
            _log(failure, "seed_session")
            if not self.config.masks or (chosen is not None and failure.retryable):
                raise
            # The agent continues, every tool answers that the episode is over, and `verify` masks the sample.
        return SeedResponse() if chosen is None else SeededResponse(resources_session_id=chosen)

    async def close_resources_session(self, body: CloseRequest) -> CloseResponse:
        """Close a session that a typed seed opened, or may open later. Idempotent."""
        await self._run(lambda: self._sessions.close(body.resources_session_id))
        return CloseResponse(resources_session_id=body.resources_session_id)

    async def call_tool(self, request: Request, tool: str) -> Response:
        """Run a tool call; the body holds its arguments, and the response is the text for the model. The
        environment refuses a tool that it does not have."""
        arguments = await _arguments(request)
        if isinstance(arguments, str):
            return PlainTextResponse(arguments)
        return await self._call(_session_id(request), ToolCall(uuid4().hex, tool, arguments))

    async def _call(self, session_id: str, call: ToolCall) -> Response:
        try:
            result = await self._run(lambda: self._sessions.call(session_id, call))
        except ProrlError as error:
            _log(error, call.name)
            return PlainTextResponse(TOOL_UNAVAILABLE, status_code=http_status(error))
        # Agents of NeMo Gym only pass on the text, but the environment client in `remote/` reads the header.
        return PlainTextResponse(result.text, headers={} if result.ok else {REFUSED_HEADER: "1"})

    async def verify(self, request: Request, body: VerifyRequest) -> VerifyResponse:
        """Grade the episode and close its sandbox. A request without a cookie has no session: it grades
        a stored rollout again (`gym eval reverify`), if the family's verdicts can be repeated.

        Raises:
            RolloutFailure: there is no reward, and failures are configured as errors.
        """
        session_id, output = _session_id(request), _output(body.response)
        row: Mapping[str, Any] = {}
        grading = partial(self._sessions.grade, session_id, output)
        if not request.cookies and self._family.repeatable and not _was_disturbed(output):
            row = task_row(body.model_dump(exclude_unset=True))
            grading = partial(self._sessions.regrade, row, output)
        try:
            verdict = graded(await self._run(grading))
        except RolloutFailure as failure:
            _log(failure, "verify")
            if not self.config.masks:
                raise
            verdict = masked(failure)
        ended = self._sessions.ended(session_id)
        task = {
            "environment": self.config.environment,
            "task_id": ended.task_id if ended else row.get("id", ""),
        }
        recorded = body.model_dump(include={"responses_create_params", "response"})
        return VerifyResponse(**recorded, **task, **verdict)

    async def aggregate_metrics(self, body: AggregateMetricsRequest) -> AggregateMetrics:
        """Aggregate metrics over the samples that have a reward."""
        scored = [answer for answer in body.verify_responses if not answer.get("mask_sample")]
        return await super().aggregate_metrics(body.model_copy(update={"verify_responses": scored}))

    async def reset(self, request: Request, body: SeedRequest) -> ResetResponse:
        """Start the episode for an agent that uses `/step`. The row already holds the first messages.

        Raises:
            InputError: as `seed_session`.
            RolloutFailure: the episode did not start. The protocol has no masked response.
        """
        session_id, row = _session_id(request), task_row(body.model_dump(exclude_unset=True))
        await self._run(lambda: self._sessions.open(session_id, row))
        return ResetResponse(info={"environment": self.config.environment})

    async def step(self, request: Request, body: StepRequest) -> StepResponse:
        """Run the tool calls of one answer. The episode finishes with an answer without a call, with the
        finishing tool, or with the last turn. The reward is then the grade; before, it is 0.

        Raises:
            RolloutFailure: our infrastructure failed; there is no reward.
        """
        session_id = _session_id(request)
        session = self._sessions.get(session_id)
        session.turns += 1
        calls = [item for item in body.response.output if item.type == "function_call"]
        outputs = [
            {"call_id": call.call_id, "output": await self._step_call(session_id, call)} for call in calls
        ]
        terminated = not calls or any(call.name == session.environment.finish_tool for call in calls)
        truncated = not terminated and session.turns >= self.config.max_turns
        info: JsonObject = {"tool_outputs": outputs}
        if not (terminated or truncated):
            return StepResponse(info=info)
        output = _output(body.response)
        grade = await self._run(lambda: self._sessions.grade(session_id, output))
        return StepResponse(
            reward=grade.reward, terminated=terminated, truncated=truncated, info=info | details(grade)
        )

    async def _step_call(self, session_id: str, item: Any) -> str:
        arguments = parse_arguments(item.arguments)
        if isinstance(arguments, str):
            return arguments
        call = ToolCall(item.call_id, item.name, arguments)
        return (await self._run(lambda: self._sessions.call(session_id, call))).text

    def mcp_tools(self, harvested: list[Any], catchall: Any) -> list[Any]:
        """Return the family's tools for MCP, if the block has `expose_tools_over_mcp: true` (0.7)."""
        return [
            catchall.tool(tool.name, tool.parameters, tool.description)
            for tool in unstarted(self._family).tools
        ]

    def mcp_allowed_tools_for_session(self, seed_body: JsonObject) -> list[str]:
        """Return the names of the tools that the task of a seed offers."""
        environment = unstarted(self._family)
        return [tool.name for tool in environment.prompt(environment.load(task_row(seed_body))).tools]

    async def get_reverify_mode(self) -> str:
        """Return whether `gym eval reverify` (0.7) may grade stored rollouts again."""
        return "stateless" if self._family.repeatable else "unsupported"


async def _arguments(request: Request) -> JsonObject | str:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_ARGUMENT_BYTES:
            break
    return parse_arguments(bytes(body))


def _output(response: NeMoGymResponse) -> list[JsonObject]:
    """Return the model's output as JSON items of the Responses API."""
    output: list[JsonObject] = response.model_dump(mode="json")["output"]
    return output


def _was_disturbed(output: Sequence[JsonObject]) -> bool:
    """Return true if a failure ended the recorded episode, so that it has no verdict."""
    return any(item.get("output") == TOOL_UNAVAILABLE for item in output)


def _session_id(request: Request) -> str:
    return str(request.session[SESSION_ID_KEY])


async def answer_error(_: Request, error: Exception) -> JSONResponse:
    """Convert a `ProrlError` to an HTTP response."""
    assert isinstance(error, ProrlError)  # the handler is registered for this class
    return JSONResponse(error_body(error), status_code=http_status(error))


def _log(error: ProrlError, where: str) -> None:
    level = logging.INFO if isinstance(error, InputError) else logging.WARNING
    logger.log(level, "%s: %s: %s", where, type(error).__name__, error)
