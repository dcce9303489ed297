"""NeMo Gym environment server (0.7 and later): `/run` runs an episode in the rollout service.

It answers an episode request with a result or a failure, and a flat row of a dataset with the fields of the
result or with `_ng_failure_*` fields. The limits of admission, episodes and cleanup are the framework's.
"""

# mypy: allow-subclassing-any, no-warn-return-any, disable-error-code="import-not-found,import-untyped"
# NeMo Gym is an optional extra and ships no types.

from typing import ClassVar
from uuid import uuid4

from fastapi import FastAPI
from nemo_gym.base_environment_server import (
    BaseEnvironmentServer,
    BaseEnvironmentServerConfig,
    CleanupContext,
    HandledEpisodeError,
)
from nemo_gym.config_types import AgentServerRef, AggregateMetrics, AggregateMetricsRequest
from nemo_gym.openai_utils import NeMoGymResponse
from nemo_gym.reward_profile import compute_aggregate_metrics
from nemo_gym.single_agent_turn_types import (
    SingleAgentTurnFailure,
    SingleAgentTurnRequest,
    SingleAgentTurnResponse,
    SingleAgentTurnResult,
)
from nemo_gym.task_materialization import materialize_task
from pydantic import PrivateAttr

from prorl_envs.errors import FailureKind, InputError, ProrlError, RolloutFailure
from prorl_envs.nemo.failures import as_error, failure_kind, may_succeed_later
from prorl_envs.nemo.process import live_within
from prorl_envs.nemo.rollouts import RolloutSettings, RowRollouts, attempt_id, response, verdict
from prorl_envs.nemo.server import answer_error
from prorl_envs.rollout.api.errors import QueueFull
from prorl_envs.rollout.api.types import Stage
from prorl_envs.rollout.client.trajectory_checks import NotContiguous
from prorl_envs.tools.types import JsonObject

#: Names of our stages in NeMo Gym.
_STAGES = {Stage.INIT: "seed", Stage.RUN: "agent", Stage.EVAL: "verification"}


class RolloutEnvironmentConfig(BaseEnvironmentServerConfig, RolloutSettings):
    """The server's block in the YAML file, besides `RolloutSettings` and the limits of the framework.

    Args:
        agent_server: the agent that flat rows name, and to which NeMo Gym attributes the results. This server
            does not call it.
    """

    agent_server: AgentServerRef | None = None


class RolloutEnvironmentServer(BaseEnvironmentServer[SingleAgentTurnRequest, SingleAgentTurnResponse]):
    """Environment server that delegates episodes to the service named in its configuration."""

    ray_enabled: ClassVar[bool] = False
    config: RolloutEnvironmentConfig
    request_model = SingleAgentTurnRequest
    response_model = SingleAgentTurnResponse
    _rollouts: RowRollouts = PrivateAttr()

    def setup_webserver(self) -> FastAPI:
        app = FastAPI()
        app.post("/run")(self.run_any)
        app.post("/aggregate_metrics")(self.aggregate_metrics)
        app.add_exception_handler(ProrlError, answer_error)
        self._rollouts = RowRollouts(self.config)
        live_within(app, self._rollouts.serving)
        return app

    async def run_any(self, body: JsonObject) -> JsonObject:
        """Run an episode, and answer in the form of the request: an episode request, or a flat row.

        Raises:
            InputError: it is neither.
        """
        is_row = "episode_id" not in body
        try:
            request = SingleAgentTurnRequest.model_validate(self._episode(body) if is_row else body)
        except ValueError as error:
            raise InputError(str(error)) from error
        answer = await self.run_request(request)
        if not is_row:
            return answer.model_dump(mode="json")
        if answer.result is not None:
            return answer.result.model_dump(mode="json", exclude={"ng_agent_observations"})
        return {
            "_ng_failure_class": "environment_server_failed",
            "_ng_failure_terminal": answer.failure.terminal,
            "_ng_failure_message": answer.failure.failure_reason,
            "_ng_failure_stage": answer.failure.stage,
            "failure_kind": answer.failure.failure_kind,
        }

    async def run(self, request: SingleAgentTurnRequest, cleanup: CleanupContext) -> SingleAgentTurnResponse:
        """Run one episode. If it is cancelled, `cleanup` waits until the service knows that."""
        task = request.task.task_input
        params = task.responses_create_params
        row = {"task_data": task.task_data, "responses_create_params": params.model_dump(mode="json")}
        timeout_s = self.config.default_episode_timeout_seconds
        cleanup.register_cleanup("rollout", self._rollouts.connection.settle)
        try:
            result = await self._rollouts.result(row, request.episode_id.capture_key, timeout_s=timeout_s)
        except ProrlError as error:
            refused = isinstance(error, QueueFull) or not may_succeed_later(error)
            raise _failed(error, "admission" if refused else None) from error
        answer: NeMoGymResponse | None = None
        failure: ProrlError | None = as_error(result.failure) if result.failure else None
        try:
            answer = response(result, params.model)
        except NotContiguous as error:
            failure = failure or error
        if failure is not None:
            raise _failed(failure, _STAGES[result.failure.stage] if result.failure else "agent", answer)
        graded = {"responses_create_params": params, "response": answer, **verdict(result)}
        ids = {"episode_id": request.episode_id, "task_id": request.task.task_id}
        return SingleAgentTurnResponse(**ids, result=SingleAgentTurnResult(**graded))

    async def aggregate_metrics(self, body: AggregateMetricsRequest) -> AggregateMetrics:
        """Aggregate metrics over the results."""
        return compute_aggregate_metrics(body.verify_responses)

    def _episode(self, row: JsonObject) -> JsonObject:
        """Return the episode request for a flat row. A row without ids gets a random one."""
        rollout_id = attempt_id(row | {"_ng_attempt_index": 0}) or uuid4().hex
        return {
            "episode_id": {"rollout_id": rollout_id, "attempt": row.get("_ng_attempt_index") or 0},
            "task": materialize_task(row, taskset=self.config.name, task_index=0),
        }


def _failed(
    error: ProrlError, stage: str | None, partial: NeMoGymResponse | None = None
) -> HandledEpisodeError:
    """Return the error that the framework answers as a failure of the episode, with the answers before it."""
    cancelled = isinstance(error, RolloutFailure) and error.kind is FailureKind.CANCELLED
    return HandledEpisodeError(
        SingleAgentTurnFailure(
            failure_reason=str(error)[:2000],
            terminal=not (may_succeed_later(error) or cancelled),  # a cancellation says nothing of the task
            failure_kind=failure_kind(error),
            stage=stage,
            partial_response=partial if partial and partial.output else None,
        )
    )
