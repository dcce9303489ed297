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
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, ClassVar
from uuid import uuid4

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from nemo_gym.base_resources_server import SimpleResourcesServer
from nemo_gym.config_types import AggregateMetrics, AggregateMetricsRequest
from nemo_gym.openai_utils import NeMoGymResponse
from nemo_gym.server_utils import SESSION_ID_KEY
from pydantic import PrivateAttr

from prorl_envs.catalog import Catalog
from prorl_envs.config import load_settings
from prorl_envs.env.node import Node
from prorl_envs.errors import InputError, ProrlError, RolloutFailure
from prorl_envs.nemo.failures import TOOL_UNAVAILABLE, error_body, http_status
from prorl_envs.nemo.process import die_with_parent, live_within
from prorl_envs.nemo.routes import separate_tool_calls
from prorl_envs.nemo.rows import task_row
from prorl_envs.nemo.sessions import SessionLimits, Sessions
from prorl_envs.nemo.wire import (
    EnvironmentServerConfig,
    ResetResponse,
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
from prorl_envs.strict_json import STRICT_JSON
from prorl_envs.tools.types import JsonObject, ToolCall

logger = logging.getLogger(__name__)

#: Header of the response if a tool could not execute the call, for example because of a wrong argument.
REFUSED_HEADER = "x-prorl-refused"
#: Maximum bytes of one tool call's arguments.
MAX_ARGUMENT_BYTES = 8 * 2**20


class EnvironmentServer(SimpleResourcesServer):
    """Server of the family named in its configuration."""

    ray_enabled: ClassVar[bool] = False
    config: EnvironmentServerConfig
    _sessions: Sessions = PrivateAttr()

    @classmethod
    def run_webserver(cls) -> FastAPI | None:
        # NeMo Gym interrupts the shell around this process and kills only that shell a second later.
        die_with_parent()
        app: FastAPI | None = super().run_webserver()
        return app

    def setup_webserver(self) -> FastAPI:
        app: FastAPI = super().setup_webserver()
        app.post("/reset")(self.reset)
        app.post("/step")(self.step)
        separate_tool_calls(
            app, sessions=lambda: self._sessions, session_id=_session_id, call_tool=self.call_tool
        )
        app.add_exception_handler(ProrlError, answer_error)
        live_within(app, self._serving)
        return app

    @asynccontextmanager
    async def _serving(self) -> AsyncIterator[None]:
        config = self.config
        limits = SessionLimits(
            open=config.max_sessions, idle_s=config.idle_s, init_s=config.init_s, eval_s=config.eval_s
        )
        family = Catalog.of(load_settings(config.config)).family(config.environment)
        async with Node.local() as node:  # configured by environment variables: NeMo Gym passes no arguments
            self._sessions = Sessions(lambda: family(node), limits)
            async with asyncio.TaskGroup() as group:
                expiring = group.create_task(self._sessions.keep_expiring())
                try:
                    yield
                finally:
                    expiring.cancel()
                    await self._sessions.aclose()

    async def seed_session(self, request: Request, body: SeedRequest) -> SeedResponse:
        """Start the episode.

        Raises:
            InputError: the row carries no valid task.
            RolloutFailure: the episode did not start, and failures are configured as errors.
        """
        try:
            await self._sessions.open(_session_id(request), task_row(body.model_dump()))
        except RolloutFailure as failure:
            _log(failure, "seed_session")
            if not self.config.masks:
                raise
            # The agent continues, every tool answers that the episode is over, and `verify` masks the sample.
        return SeedResponse()

    async def call_tool(self, request: Request, tool: str) -> Response:
        """Run a tool call; the body holds its arguments, and the response is the text for the model. The
        environment refuses a tool that it does not have."""
        arguments = await _arguments(request)
        if isinstance(arguments, str):
            return PlainTextResponse(arguments)
        return await self._call(_session_id(request), ToolCall(uuid4().hex, tool, arguments))

    async def _call(self, session_id: str, call: ToolCall) -> Response:
        try:
            result = await self._sessions.call(session_id, call)
        except ProrlError as error:
            _log(error, call.name)
            return PlainTextResponse(TOOL_UNAVAILABLE, status_code=http_status(error))
        # Agents of NeMo Gym only pass on the text, but the environment client in `remote/` reads the header.
        return PlainTextResponse(result.text, headers={} if result.ok else {REFUSED_HEADER: "1"})

    async def verify(self, request: Request, body: VerifyRequest) -> VerifyResponse:
        """Grade the episode and close its sandbox.

        Raises:
            RolloutFailure: there is no reward, and failures are configured as errors.
        """
        session_id = _session_id(request)
        try:
            grade = await self._sessions.grade(session_id, _output(body.response))
        except RolloutFailure as failure:
            _log(failure, "verify")
            if not self.config.masks:
                raise
            return self._response(session_id, body, masked(failure))
        return self._response(session_id, body, graded(grade))

    def _response(self, session_id: str, body: VerifyRequest, verdict: JsonObject) -> VerifyResponse:
        ended = self._sessions.ended(session_id)
        task = {"environment": self.config.environment, "task_id": ended.task_id if ended else ""}
        request = body.model_dump(include={"responses_create_params", "response"})
        return VerifyResponse(**request, **task, **verdict)

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
        row = task_row(body.model_dump())
        await self._sessions.open(_session_id(request), row)
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
        grade = await self._sessions.grade(session_id, _output(body.response))
        return StepResponse(
            reward=grade.reward, terminated=terminated, truncated=truncated, info=info | details(grade)
        )

    async def _step_call(self, session_id: str, item: Any) -> str:
        arguments = parse_arguments(item.arguments)
        if isinstance(arguments, str):
            return arguments
        return (await self._sessions.call(session_id, ToolCall(item.call_id, item.name, arguments))).text


def parse_arguments(text: str | bytes) -> JsonObject | str:
    """Parse the arguments of a tool call; return an error message for the model if they are invalid."""
    if len(text) > MAX_ARGUMENT_BYTES:
        return f"The arguments are longer than {MAX_ARGUMENT_BYTES} bytes."
    try:
        arguments = STRICT_JSON.decode((text if isinstance(text, str) else text.decode()) or "{}")
    except (ValueError, RecursionError) as error:
        return f"The arguments are not valid JSON: {error}"
    if not isinstance(arguments, dict):
        return f"The arguments must be a JSON object, not a {type(arguments).__name__}."
    return arguments


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


def _session_id(request: Request) -> str:
    return str(request.session[SESSION_ID_KEY])


async def answer_error(_: Request, error: Exception) -> JSONResponse:
    """Convert a `ProrlError` to an HTTP response."""
    assert isinstance(error, ProrlError)  # the handler is registered for this class
    return JSONResponse(error_body(error), status_code=http_status(error))


def _log(error: ProrlError, where: str) -> None:
    level = logging.INFO if isinstance(error, InputError) else logging.WARNING
    logger.log(level, "%s: %s: %s", where, type(error).__name__, error)
