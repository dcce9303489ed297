"""NeMo Gym environment server (0.7 and later): `/run` runs an episode in the rollout service.

It answers an episode request with exactly one of a result and a failure, and a flat row of a dataset with the
fields of the result, or with `_ng_failure_*` fields. Admission, the time limit of an episode, and the limit
of its cleanup are those of the framework.
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
from nemo_gym.base_resources_server import BaseRunRequest
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
from pydantic import ConfigDict, PrivateAttr, ValidationError

from prorl_envs.errors import FailureKind, InputError, ProrlError, RolloutFailure
from prorl_envs.nemo.failures import as_error, failure_kind, may_succeed_later
from prorl_envs.nemo.process import die_with_parent, live_within
from prorl_envs.nemo.rollouts import RolloutSettings, RowRollouts, attempt_id, response, verdict
from prorl_envs.nemo.server import answer_error
from prorl_envs.rollout.api.errors import NotFound, QueueFull
from prorl_envs.rollout.api.types import Result, Stage
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


class FlatRow(BaseRunRequest):
    """A row of a dataset, as NeMo Gym sends it to servers of agents."""

    model_config = ConfigDict(extra="allow")


class RolloutEnvironmentServer(BaseEnvironmentServer[SingleAgentTurnRequest, SingleAgentTurnResponse]):
    """Environment server that delegates episodes to the service named in its configuration."""

    ray_enabled: ClassVar[bool] = False
    config: RolloutEnvironmentConfig
    request_model = SingleAgentTurnRequest
    response_model = SingleAgentTurnResponse
    _rollouts: RowRollouts = PrivateAttr()

    @classmethod
    def run_webserver(cls) -> FastAPI | None:
        die_with_parent()
        app: FastAPI | None = super().run_webserver()
        return app

    def setup_webserver(self) -> FastAPI:
        app = FastAPI()
        app.post("/run")(self.run_any)
        app.post("/aggregate_metrics")(self.aggregate_metrics)
        app.add_exception_handler(ProrlError, answer_error)
        self._rollouts = RowRollouts(self.config)
        live_within(app, self._rollouts.serving)
        return app

    async def run_any(self, body: SingleAgentTurnRequest | FlatRow) -> JsonObject:
        """Run an episode, and answer in the form of the request.

        Raises:
            InputError: the ids of a flat row are invalid.
        """
        if isinstance(body, SingleAgentTurnRequest):
            answer = await self.run_request(body)
            return answer.model_dump(mode="json")
        answer = await self.run_request(self._episode(body))
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
        row = {**task.task_data, "responses_create_params": params.model_dump(mode="json")}
        cleanup.register_cleanup("rollout", self._rollouts.settle)
        timeout_s = self.config.default_episode_timeout_seconds
        try:
            result = await self._rollouts.result(row, request.episode_id.capture_key, timeout_s=timeout_s)
        except ProrlError as error:
            refused = isinstance(error, InputError | QueueFull) and not isinstance(error, NotFound)
            raise _failed(error, "admission" if refused else None) from error
        if result.failure is not None:
            stage = _STAGES[result.failure.stage]
            raise _failed(as_error(result.failure), stage, _partial(result, params.model))
        try:
            answer = response(result, params.model)
        except NotContiguous as error:
            raise _failed(error, "agent") from error
        found = SingleAgentTurnResult(
            responses_create_params=params,
            response=answer,
            environment=result.environment,
            task_id=result.task_id,
            **verdict(result),
        )
        return SingleAgentTurnResponse(
            episode_id=request.episode_id, task_id=request.task.task_id, result=found
        )

    async def aggregate_metrics(self, body: AggregateMetricsRequest) -> AggregateMetrics:
        """Aggregate metrics over the results."""
        return compute_aggregate_metrics(body.verify_responses)

    def _episode(self, row: FlatRow) -> SingleAgentTurnRequest:
        """Return the episode request for a flat row. A row without ids gets a random one."""
        fields = row.model_dump(mode="json", exclude_unset=True)
        ids = {**fields, "_ng_rollout_id": row.capture_rollout_id, "_ng_attempt_index": None}
        attempt = fields.get("_ng_attempt_index") or 0
        try:
            return SingleAgentTurnRequest.model_validate(
                {
                    "episode_id": {"rollout_id": attempt_id(ids) or uuid4().hex, "attempt": attempt},
                    "task": materialize_task(fields, taskset=self.config.name, task_index=0),
                }
            )
        except ValidationError as error:
            first = error.errors()[0]
            raise InputError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error


def _failed(
    error: ProrlError, stage: str | None, partial: NeMoGymResponse | None = None
) -> HandledEpisodeError:
    """Return the error that the framework answers as a failure of the episode."""
    cancelled = isinstance(error, RolloutFailure) and error.kind is FailureKind.CANCELLED
    return HandledEpisodeError(
        SingleAgentTurnFailure(
            failure_reason=str(error)[:2000],
            # A cancelled or lost rollout says nothing about its task.
            terminal=not (may_succeed_later(error) or cancelled or isinstance(error, NotFound)),
            failure_kind=failure_kind(error),
            stage=stage,
            partial_response=partial,
        )
    )


def _partial(result: Result, model: str | None) -> NeMoGymResponse | None:
    """Return the model's answers before a failure, if they are consistent."""
    try:
        return response(result, model) if result.trajectory else None
    except NotContiguous:
        return None
