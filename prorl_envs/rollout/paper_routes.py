"""The routes of the ProRL Agent paper (arXiv 2603.18815), so that clients of its server work here.

Shapes as NVIDIA-NeMo/ProRL-Agent-Server has them: `scripts/start_server.py` for the routes,
`openhands/nvidia/utils.py` for the result. On purpose, three things differ. `/stop` ends what came over
`/process` and nothing else. Cancelling is no server error. And `input_ids` of a message is always null, since
every answer would carry the whole context again: `token_ids` are a message's own, and all of them one after
the other are the trajectory.
"""

import uuid
from collections.abc import Iterator
from itertools import accumulate
from typing import Annotated, Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request

from prorl_envs.errors import FailureKind, InputError, ProrlError
from prorl_envs.policy.types import Sampling
from prorl_envs.rollout.errors import Unavailable, to_wire
from prorl_envs.rollout.service import RolloutService, ServiceState
from prorl_envs.rollout.types import AgentLimits, GroupRequest, Result, StopReason, job_id, json_problem
from prorl_envs.rollout.views import ModelServerRequest

#: The environment of an instance that names none, as there.
DEFAULT_SOURCE = "swebench"
#: Seconds between two looks at a job that is waited for.
_LOOK_S = 60.0

_Name = Annotated[str, Field(min_length=1, max_length=180, pattern=r"^[A-Za-z0-9._:/\-]+$")]


class ProcessRequest(BaseModel):
    """One rollout.

    Args:
        instance: a data row; `data_source` names the environment, `trajectory_id` comes back.
        sampling_params: `temperature`, `top_p`, `max_tokens` or `max_output_tokens`, `seed` and
            `max_iterations` count. The rest is the service's own, and an API key is not kept.
        job_id: the caller's; the same again is the same rollout.
    """

    instance: dict[str, Any]
    sampling_params: dict[str, Any] = Field(default_factory=dict)
    job_id: _Name | None = None


class CancelRequest(BaseModel):
    """The `job_id` of a rollout."""

    job_id: _Name


class LlmServerRequest(BaseModel):
    """The base URL of a model server, `/v1` included or not."""

    address: str = Field(max_length=2000)


class Answer(BaseModel):
    """What was done."""

    model_config = ConfigDict(extra="allow")

    status: str


class PaperError(Exception):
    """An answer in this dialect: a status and a sentence.

    Args:
        status: of HTTP.
        detail: what is wrong.
        retry_after_s: seconds, where the same may be asked again.
    """

    def __init__(self, status: int, detail: str, retry_after_s: int = 0) -> None:
        super().__init__(detail)
        self.status, self.detail, self.retry_after_s = status, detail, retry_after_s


def add_paper_routes(app: FastAPI, service: RolloutService) -> None:
    """Add the routes."""
    paper, servers = _Paper(service), service.model_servers

    @app.exception_handler(PaperError)
    async def on_error(_: Request, error: PaperError) -> JSONResponse:
        headers = {"Retry-After": str(error.retry_after_s)} if error.retry_after_s else {}
        return JSONResponse({"detail": error.detail}, error.status, headers)

    @app.post("/start", tags=["paper"])
    async def paper_start() -> Answer:
        """Take rollouts."""
        paper.start()
        return Answer(status="started")

    @app.post("/stop", tags=["paper"])
    async def paper_stop() -> Answer:
        """Take no more rollouts, and end those that run."""
        await paper.stop()
        return Answer(status="stopped")

    @app.get("/status", tags=["paper"])
    async def paper_status() -> Answer:
        """Rollouts by stage."""
        return Answer(status="running", **paper.status())

    @app.post("/process", tags=["paper"], response_model=dict[str, Any])
    async def paper_process(body: ProcessRequest) -> dict[str, Any]:
        """Do one rollout and answer with what came of it."""
        return await paper.process(body)

    @app.post("/cancel", tags=["paper"])
    async def paper_cancel(body: CancelRequest) -> Answer:
        """End a rollout."""
        await paper.cancel(body.job_id)
        return Answer(status=f"cancelled {body.job_id}")

    @app.post("/add_llm_server", tags=["paper"])
    async def paper_add_llm_server(body: LlmServerRequest) -> Answer:
        """Offer a further model server."""
        with _dialect():
            await servers.add(ModelServerRequest.model_construct(url=body.address))
        return Answer(status=f"added {body.address}")

    @app.post("/clear_llm_server", tags=["paper"])
    async def paper_clear_llm_server() -> Answer:
        """Take all model servers away."""
        with _dialect():
            for server in servers.all().servers:
                if not server.draining:
                    await servers.remove(server.url, wait_s=0.0)
        return Answer(status="cleared")


class _dialect:
    """Raises the service's errors as this dialect has them."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, ProrlError):
            wire = to_wire(error)
            status = 400 if wire.error is InputError else wire.status
            raise PaperError(status, str(error), 5 if status in (429, 503) else 0) from error


class _Paper:
    """The rollouts that came over these routes."""

    def __init__(self, service: RolloutService) -> None:
        self._service = service
        self._running = False
        self._pending: dict[str, int] = {}  # groups that are waited for, and by how many

    def start(self) -> None:
        if self._running:
            raise PaperError(400, "the server runs already")
        self._running = True

    async def stop(self) -> None:
        self._check_running()
        self._running = False
        for group in list(self._pending):
            await self._service.cancel_group(group)

    def status(self) -> dict[str, Any]:
        self._check_running()
        pools = self._service.status().pools
        active = {stage: pool.active for stage, pool in pools.items()}
        return {"pending_jobs": len(self._pending), "running": True, "jobs": len(self._pending), **active}

    async def cancel(self, name: str) -> None:
        self._check_running()
        with _dialect():
            await self._service.cancel_group(_group_id(name))

    async def process(self, body: ProcessRequest) -> dict[str, Any]:
        self._check_running()
        if not self._service.has_model():
            raise PaperError(503, "there is no model server; add one first", 5)
        with _dialect():
            group = self._group(body)
            self._pending[group.id] = self._pending.get(group.id, 0) + 1
            try:
                await self._service.submit([group])
                result = await self._finished(job_id(group.id, 0))
            finally:
                self._pending[group.id] -= 1
                if not self._pending[group.id]:
                    del self._pending[group.id]
        return paper_result(result, body.instance)

    async def _finished(self, job: str) -> Result:
        while not (await self._service.job(job, wait_s=_LOOK_S)).state.final:
            if self._service.state is ServiceState.STOPPED:
                raise Unavailable("the service has stopped")
        return await self._service.store.result(job)

    def _group(self, body: ProcessRequest) -> GroupRequest:
        """The rollout as a group of one.

        Raises:
            InputError: the environment, the row or a sampling parameter is wrong.
        """
        if json_problem(body.instance):
            raise InputError("instance: not JSON: a NaN, an infinity or a lone surrogate is in it")
        row = {
            key: value for key, value in body.instance.items() if key not in ("data_source", "trajectory_id")
        }
        environment = str(body.instance.get("data_source") or DEFAULT_SOURCE)
        params = {key: value for key, value in body.sampling_params.items() if value is not None}
        if "max_output_tokens" in params:
            params.setdefault("max_tokens", params["max_output_tokens"])
        try:
            return GroupRequest(
                id=_group_id(body.job_id or uuid.uuid4().hex),
                environment=environment,
                task=self._service.offer.row_of(environment, row),
                sampling=Sampling.model_validate(_only(params, Sampling)),
                limits=AgentLimits(max_turns=params.get("max_iterations", AgentLimits().max_turns)),
            )
        except ValidationError as error:
            first = error.errors()[0]
            raise InputError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error

    def _check_running(self) -> None:
        if not self._running:
            raise PaperError(503, "the server is not running; start it first", 5)


def paper_result(result: Result, instance: dict[str, Any]) -> dict[str, Any]:
    """A result in the shape of the paper's server.

    Args:
        result: of the job.
        instance: as it was sent.
    """
    failure, timings = result.failure, result.timings
    spent = {"init_time": timings.init_s, "run_time": timings.run_s, "eval_time": timings.eval_s}
    timed_out = failure is not None and failure.kind is FailureKind.TIMEOUT
    critical = None
    if failure is not None:
        special = {FailureKind.TIMEOUT: "timeout", FailureKind.CANCELLED: "cancelled"}
        critical = special.get(failure.kind, failure.stage.value)
    return {
        "instance_id": instance.get("instance_id", result.task_id),
        "trajectory_id": instance.get("trajectory_id"),
        "success": failure is None,
        "error": f"{failure.kind}: {failure.message}" if failure else None,
        "critical_error": critical,
        "filter": result.mask_sample,
        "finish": result.stop_reason is StopReason.FINISHED,
        "end_properly": result.stop_reason in (StopReason.FINISHED, StopReason.NO_TOOL_CALL),
        "resolved": result.reward is not None and result.reward >= 1.0,
        "reward": result.reward,
        "report": result.evidence,
        "git_patch": result.evidence.get("patch"),
        "messages": list(_messages(result)),
        "tools": result.tools,
        "timing": {
            **spent,
            "others_time": timings.queued_s,
            "counted_elapsed": sum(spent.values()),
            "timeout_triggered": timed_out,
        },
    }


def _messages(result: Result) -> Iterator[dict[str, Any]]:
    """The conversation, each message with its tokens. Tokens between two answers belong to no single message:
    the first of those that came between them has them all."""
    ids = [number for row in result.rows for number in row.ids]
    logprobs = [number for row in result.rows for number in row.logprobs]
    starts = accumulate((len(row.ids) for row in result.rows), initial=0)
    rows = zip(result.rows, starts, strict=False)
    spans = [(start + turn.start, start + turn.end) for row, start in rows for turn in row.turns]
    at = answers = 0
    for message in result.messages:
        own: dict[str, Any] = {**message, "input_ids": None, "logprobs": None}
        if calls := message.get("tool_calls"):
            own["tool_calls"] = [call["function"] for call in calls]
        start, end = spans[answers] if answers < len(spans) else (len(ids), len(ids))
        if message["role"] == "assistant" and answers < len(spans):
            own |= {"token_ids": ids[start:end], "logprobs": logprobs[start:end]}
            at, answers = end, answers + 1
        else:
            own["token_ids"], at = ids[at:start], start
        yield own


def _group_id(name: str) -> str:
    return f"process/{name}"


def _only(values: dict[str, Any], model: type[BaseModel]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key in model.model_fields}
