"""NeMo Gym agent server: `/run` runs a rollout in the rollout service.

NeMo Gym and its trainers request a rollout of a row from this agent and get the graded episode, with the
token ids, masks and log-probabilities of the service's ledger. The service's model servers sample the turns,
not those of NeMo Gym.
"""

# mypy: allow-subclassing-any, no-warn-return-any, disable-error-code="import-not-found,import-untyped"
# NeMo Gym is an optional extra and ships no types.

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import ClassVar
from uuid import uuid4

from fastapi import FastAPI, Request
from nemo_gym.base_resources_server import BaseRunRequest
from nemo_gym.base_responses_api_agent import BaseResponsesAPIAgentConfig, SimpleResponsesAPIAgent
from nemo_gym.config_types import AggregateMetrics, AggregateMetricsRequest
from nemo_gym.openai_utils import NeMoGymResponse
from pydantic import ConfigDict, Field, PrivateAttr, ValidationError

from prorl_envs.env.base import Grade
from prorl_envs.errors import InputError, ProrlError
from prorl_envs.model.types import Sampling
from prorl_envs.nemo.failures import as_error
from prorl_envs.nemo.process import die_with_parent, live_within
from prorl_envs.nemo.responses import output_items, usage
from prorl_envs.nemo.rows import task_row
from prorl_envs.nemo.server import answer_error
from prorl_envs.nemo.wire import FailureMode, VerifyResponse, graded, masked, masks
from prorl_envs.rollout.api.errors import Unavailable
from prorl_envs.rollout.api.types import AgentLimits, GroupRequest, Result, job_id
from prorl_envs.rollout.client.client import RolloutClient
from prorl_envs.rollout.client.result_router import ResultRouter
from prorl_envs.tools.types import JsonObject

logger = logging.getLogger(__name__)

#: Bearer token of the rollout service: an environment variable, so that it is in no YAML file or log.
TOKEN = "PRORL_SERVER__TOKEN"
#: Seconds within which a running service answers.
AWAY_S = 30.0


class RolloutAgentConfig(BaseResponsesAPIAgentConfig):
    """The agent's block in the YAML file.

    Args:
        service: base URL of the rollout service. Its bearer token is read from `$PRORL_SERVER__TOKEN`.
        environment: the service's environment to which the tasks of the rows belong.
        limits: limits of the agent loop, as in the service's API.
        failures: response of `/run` if there is no reward, as for the resources servers.
        timeout_s: seconds after which a rollout is cancelled, including its time in the service's queue.
    """

    service: str
    environment: str
    limits: AgentLimits = AgentLimits()
    failures: FailureMode = "auto"
    timeout_s: float = Field(default=86_400.0, gt=0)


class RunRequest(BaseRunRequest):
    """A whole NeMo Gym row. The agent reads its task and its sampling parameters."""

    model_config = ConfigDict(extra="allow")


class RolloutAgent(SimpleResponsesAPIAgent):
    """Agent that delegates rollouts to the service named in its configuration."""

    ray_enabled: ClassVar[bool] = False
    config: RolloutAgentConfig
    _client: RolloutClient = PrivateAttr()
    _results: ResultRouter = PrivateAttr()

    @classmethod
    def run_webserver(cls) -> FastAPI | None:
        die_with_parent()
        app: FastAPI | None = super().run_webserver()
        return app

    def setup_webserver(self) -> FastAPI:
        app: FastAPI = super().setup_webserver()
        app.add_exception_handler(ProrlError, answer_error)
        live_within(app, self._serving)
        return app

    @asynccontextmanager
    async def _serving(self) -> AsyncIterator[None]:
        async with RolloutClient(self.config.service, token=os.environ.get(TOKEN)) as self._client:
            self._results = ResultRouter(self._client)
            reading = asyncio.create_task(self._results.keep_reading())
            try:
                yield
            finally:
                reading.cancel()
                await asyncio.wait([reading])

    async def responses(self, body: JsonObject) -> NeMoGymResponse:
        """Refuse the request: this agent runs whole rollouts, not single answers.

        Raises:
            InputError: always.
        """
        raise InputError("this agent only runs whole rollouts", hint="post the row to /run")

    async def run(self, request: Request, body: RunRequest) -> VerifyResponse:
        """Run and grade one rollout of a row. It is cancelled if the caller disconnects.

        Raises:
            InputError: the row carries no valid task, or the service refuses it.
            RolloutFailure: there is no reward, and failures are configured as errors.
            NotContiguous: the episode has more than one row of tokens.
            ProrlError: the service stays unreachable or full.
        """
        group = self._group(body.model_dump())
        await self._ready()
        result = asyncio.create_task(self._results.result(job_id(group.id, 0)))
        disconnected = asyncio.create_task(_disconnected(request))
        try:
            await self._client.submit([group])
            await asyncio.wait(
                {result, disconnected}, timeout=self.config.timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if not result.done():
                await self._give_up(group.id)
                await asyncio.wait({result}, timeout=AWAY_S)
            if not result.done():
                raise self._unreachable()
            return self._response(body, result.result())
        finally:
            result.cancel()
            disconnected.cancel()
            await asyncio.wait({result, disconnected})

    async def aggregate_metrics(self, body: AggregateMetricsRequest) -> AggregateMetrics:
        """Aggregate metrics over the samples that have a reward."""
        scored = [answer for answer in body.verify_responses if not answer.get("failure_kind")]
        return await super().aggregate_metrics(body.model_copy(update={"verify_responses": scored}))

    def _group(self, row: JsonObject) -> GroupRequest:
        """Return the request to the service.

        Raises:
            InputError: the row is invalid.
        """
        params = row["responses_create_params"]
        names = {"temperature": "temperature", "top_p": "top_p", "max_output_tokens": "max_tokens"}
        sampling = {name: params[key] for key, name in names.items() if params.get(key) is not None}
        try:
            return GroupRequest(
                id=f"nemo-{uuid4().hex}",
                environment=self.config.environment,
                task=dict(task_row(row)),
                sampling=Sampling(**sampling),
                limits=self.config.limits,
            )
        except ValidationError as error:
            first = error.errors()[0]
            raise InputError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error

    async def _ready(self) -> None:
        try:
            async with asyncio.timeout(AWAY_S):
                await self._results.ready()
        except TimeoutError:
            raise self._unreachable() from None

    def _unreachable(self) -> Unavailable:
        where = self.config.service
        return Unavailable(f"the rollout service at {where} does not answer", hint="is it running there?")

    async def _give_up(self, group_id: str) -> None:
        """Cancel the group after the caller disconnected or the timeout expired. The result is then a
        cancelled job."""
        with contextlib.suppress(ProrlError):
            await self._client.cancel_group(group_id)

    def _response(self, body: RunRequest, result: Result) -> VerifyResponse:
        if result.failure is not None:
            failure = as_error(result.failure)
            logger.warning("%s has no reward: %s", result.job_id, failure)
            if not masks(self.config.failures):
                raise failure
            verdict = masked(failure)
        else:
            assert result.reward is not None  # a result has either a reward or a failure
            verdict = graded(
                Grade(reward=result.reward, components=result.components, evidence=result.evidence)
            )
            verdict["mask_sample"] = result.mask_sample
        params = body.responses_create_params
        response = {
            "id": f"resp-{result.job_id}",
            "created_at": int(time.time()),
            "model": params.model or "policy",
            "object": "response",
            "output": output_items(result),
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [_flat(tool) for tool in result.tools],
            "usage": usage(result.trajectory),
        }
        return VerifyResponse(
            responses_create_params=params,
            response=NeMoGymResponse.model_validate(response),
            environment=result.environment,
            task_id=result.task_id,
            **verdict,
        )


def _flat(tool: JsonObject) -> JsonObject:
    """Convert a tool of the Chat Completions API to the Responses API's flat format."""
    return {"type": "function", "strict": False, **tool["function"]}


async def _disconnected(request: Request) -> None:
    """Return when the caller has closed the connection. The body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
