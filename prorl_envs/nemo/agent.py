"""NeMo Gym agent server: `/run` runs a rollout in the rollout service.

NeMo Gym and its trainers request a rollout of a row from this agent and get the graded episode, with the
token ids, masks and log-probabilities of the service's ledger. The service's model servers sample the turns,
not those of NeMo Gym. From NeMo Gym 0.7 on, the environment server in `environment_server.py` does the same.
"""

# mypy: allow-subclassing-any, no-warn-return-any, disable-error-code="import-not-found,import-untyped"
# NeMo Gym is an optional extra and ships no types.

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, ClassVar

from fastapi import FastAPI, Request
from nemo_gym.base_resources_server import BaseRunRequest
from nemo_gym.base_responses_api_agent import BaseResponsesAPIAgentConfig, SimpleResponsesAPIAgent
from nemo_gym.config_types import AggregateMetrics, AggregateMetricsRequest
from nemo_gym.openai_utils import NeMoGymResponse
from pydantic import Field, PrivateAttr

from prorl_envs.errors import Cancelled, InputError, ProrlError
from prorl_envs.nemo.failures import as_error
from prorl_envs.nemo.process import live_within
from prorl_envs.nemo.rollouts import RolloutSettings, RowRollouts, attempt_id, response, verdict
from prorl_envs.nemo.server import answer_error
from prorl_envs.nemo.wire import FailureMode, VerifyResponse, masked, masks
from prorl_envs.tools.types import JsonObject

logger = logging.getLogger(__name__)


class RolloutAgentConfig(BaseResponsesAPIAgentConfig, RolloutSettings):
    """The agent's block in the YAML file, besides `RolloutSettings`.

    Args:
        failures: response of `/run` if there is no reward, as for the resources servers.
        timeout_s: seconds after which a rollout is cancelled, including its time in the service's queue.
    """

    failures: FailureMode = "auto"
    timeout_s: float = Field(default=86_400.0, gt=0)


class RolloutAgent(SimpleResponsesAPIAgent):
    """Agent that delegates rollouts to the service named in its configuration."""

    ray_enabled: ClassVar[bool] = False
    config: RolloutAgentConfig
    _rollouts: RowRollouts = PrivateAttr()

    def setup_webserver(self) -> FastAPI:
        app: FastAPI = super().setup_webserver()
        app.add_exception_handler(ProrlError, answer_error)
        self._rollouts = RowRollouts(self.config)
        live_within(app, self._rollouts.serving)
        return app

    async def responses(self, body: JsonObject) -> NeMoGymResponse:
        """Refuse the request: this agent runs whole rollouts, not single answers.

        Raises:
            InputError: always.
        """
        raise InputError("this agent only runs whole rollouts", hint="post the row to /run")

    async def run(self, request: Request, body: BaseRunRequest) -> VerifyResponse:
        """Run and grade one rollout of a row. If the caller disconnects, it is cancelled, or with a `run_id`
        continues, for a repeated request.

        Raises:
            InputError: the row carries no valid task, or the service refuses it.
            RolloutFailure: there is no reward, and failures are configured as errors.
            NotContiguous: the episode has more than one row of tokens.
            ProrlError: the service stays unreachable or full.
        """
        row = await request.json()  # `body` has only the fields that NeMo Gym declares
        running = self._rollouts.result(row, attempt_id(row), timeout_s=self.config.timeout_s)
        result = await _unless_disconnected(request, running)
        params, found = body.responses_create_params, verdict(result)
        if result.failure is not None:
            failure = as_error(result.failure)
            logger.warning("%s has no reward: %s", result.job_id, failure)
            if not masks(self.config.failures):
                raise failure
            found |= masked(failure)
        answer = response(result, params.model)
        return VerifyResponse(responses_create_params=params, response=answer, **found)

    async def aggregate_metrics(self, body: AggregateMetricsRequest) -> AggregateMetrics:
        """Aggregate metrics over the samples that have a reward."""
        scored = [answer for answer in body.verify_responses if not answer.get("failure_kind")]
        return await super().aggregate_metrics(body.model_copy(update={"verify_responses": scored}))


async def _unless_disconnected[T](request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`, which is cancelled if the caller closes the connection: NeMo Gym 0.4 does
    not cancel it. The body of the request must have been read. Raises Cancelled."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, gone = asyncio.create_task(work), asyncio.create_task(disconnected())
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Cancelled("the caller disconnected")
        return working.result()
    finally:
        working.cancel()
        gone.cancel()
        await asyncio.wait({working, gone})
