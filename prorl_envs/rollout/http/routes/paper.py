"""Routes of the ProRL Agent paper (arXiv 2603.18815), so that clients of its server work here.

Requests and responses have the form of NVIDIA-NeMo/ProRL-Agent-Server ("the reference"): see
`scripts/start_server.py` for the routes, and `openhands/nvidia/utils.py` for the result. Three differences
are intended. `/stop` cancels rollouts of `/process` only. A cancelled rollout is not a server error.
`input_ids` of a message is always null, since it would repeat the whole context for each answer. Instead,
`token_ids` has the tokens of one message, and all of them concatenated are the trajectory.
"""

import math
import uuid
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from itertools import accumulate
from typing import Annotated, Any

from fastapi import BackgroundTasks, FastAPI
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request

from prorl_envs.errors import FailureKind, InputError, ProrlError
from prorl_envs.model.types import Sampling, ServerHealth
from prorl_envs.rollout.api.errors import WIRE_ERRORS, Unavailable, to_wire
from prorl_envs.rollout.api.types import ID_PART, AgentLimits, GroupRequest, Result, StopReason, job_id
from prorl_envs.rollout.api.views import ErrorBody, ModelServerRequest
from prorl_envs.rollout.service.service import RolloutService
from prorl_envs.rollout.service.state import ServiceState
from prorl_envs.strict_json import json_problem

#: Environment of an instance without `data_source`, as in the reference.
DEFAULT_SOURCE = "swebench"
#: Environment by `data_source`. A final `*` matches any ending. "The reference" is the paper's server.
SOURCES: Mapping[str, str] = {
    # names that the reference registers, and data sets of Eurus, DAPO and verl that its scripts read
    "deepscaler*": "math",
    "numina_*": "math",
    "aime*": "math",
    "math_dapo*": "math",
    "openai/gsm8k": "math",
    "lighteval/MATH": "math",
    "DigitalLearningGmbH/MATH-lighteval": "math",
    "HuggingFaceH4/MATH-500": "math",
    # all names that the reference registers
    "deepcoder*": "code",
    "apps": "code",
    "codecontests": "code",
    "codeforces": "code",
    "taco": "code",
    # the reference registers only swebench, which is our name too; these are names of its data sets
    "swe-bench*": "swebench",
    "SWE-bench/*": "swebench",
    "princeton-nlp/SWE-bench*": "swebench",
    "swegym": "swebench",
    "swe-gym": "swebench",
    "SWE-Gym/*": "swebench",
    "NovaSky-AI/SkyRL-v0*": "swebench",
    "r2egym": "swebench",
    "r2e-gym": "swebench",
    "R2E-Gym/*": "swebench",
}
#: Seconds between two checks of a job that a request waits for.
_CHECK_S = 60.0

_Name = Annotated[str, Field(min_length=1, max_length=180, pattern=rf"^{ID_PART}(?:/{ID_PART})*$")]


class ProcessRequest(BaseModel):
    """Request for one rollout.

    Args:
        instance: a data row. `data_source` names the environment, see `SOURCES`; the response repeats
            `trajectory_id`.
        sampling_params: only `temperature`, `top_p`, `max_tokens` or `max_output_tokens`, `seed` and
            `max_iterations` are used. Other parameters, such as an API key, are ignored and not stored.
        job_id: the caller's id of the rollout. A second request with this id gets the same rollout.
    """

    instance: dict[str, Any]
    sampling_params: dict[str, Any] = Field(default_factory=dict)
    job_id: _Name | None = None


class CancelRequest(BaseModel):
    """Request to cancel a rollout, by its `job_id`."""

    job_id: _Name


class LlmServerRequest(BaseModel):
    """Request with the base URL of a model server, with or without `/v1`."""

    address: str = Field(max_length=2000)


class PaperAnswer(BaseModel):
    """Response that names the completed action."""

    model_config = ConfigDict(extra="allow")

    status: str


class PaperErrorBody(BaseModel):
    """Body of an error response of the ProRL Agent paper's routes."""

    detail: str


class PaperError(Exception):
    """Error that the paper's routes answer with.

    Args:
        status: HTTP status.
        detail: description of the problem.
        retry_after_s: seconds after which the request may be repeated; 0 if it should not be repeated.
    """

    def __init__(self, status: int, detail: str, retry_after_s: int = 0) -> None:
        super().__init__(detail)
        self.status, self.detail, self.retry_after_s = status, detail, retry_after_s


def add_paper_routes(app: FastAPI, service: RolloutService, sources: Mapping[str, str]) -> None:
    """Add the routes.

    Args:
        app: the application.
        service: runs the rollouts.
        sources: the operator's own names of data sources (`server.paper_sources`).

    Raises:
        InputError: the service does not have an environment in `sources`.
    """
    for name, environment in sources.items():
        if environment not in service.groups.environments:
            raise InputError(
                f"server.paper_sources: {name!r} stands for {environment!r}, which is not available",
                hint="name one of the service's environments",
            )

    @app.exception_handler(PaperError)
    async def on_error(_: Request, error: PaperError) -> JSONResponse:
        headers = {"Retry-After": str(error.retry_after_s)} if error.retry_after_s else {}
        return JSONResponse({"detail": error.detail}, error.status, headers)

    _add_routes(app, _Paper(service, sources), service)


def _error_responses() -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI error responses of these routes. Errors of the middleware have the service's form,
    all others the form of these routes."""
    described = {400: "invalid, or out of order", **{wire.status: wire.name for wire in WIRE_ERRORS}}
    model = PaperErrorBody | ErrorBody
    return {status: {"model": model, "description": text} for status, text in described.items()}


def _add_routes(app: FastAPI, paper: "_Paper", service: RolloutService) -> None:
    servers = service.model_servers
    described: dict[str, Any] = {"tags": ["paper"], "responses": _error_responses()}

    @app.post("/start", **described)
    async def paper_start() -> PaperAnswer:
        """Start to accept rollouts."""
        paper.start()
        return PaperAnswer(status="started")

    @app.post("/stop", **described)
    async def paper_stop() -> PaperAnswer:
        """Accept no more rollouts, and cancel running ones."""
        await paper.stop()
        return PaperAnswer(status="stopped")

    @app.get("/status", **described)
    async def paper_status() -> PaperAnswer:
        """Return the number of rollouts by stage."""
        return PaperAnswer(status="running", **paper.status())

    @app.post("/process", response_model=dict[str, Any], **described)
    async def paper_process(body: ProcessRequest, background: BackgroundTasks) -> dict[str, Any]:
        """Run one rollout and return its result. The result is marked as read once it is sent."""
        result, answer = await paper.process(body)
        background.add_task(service.feed.mark_read, result)
        return answer

    @app.post("/cancel", **described)
    async def paper_cancel(body: CancelRequest) -> PaperAnswer:
        """Cancel a rollout."""
        await paper.cancel(body.job_id)
        return PaperAnswer(status=f"cancelled {body.job_id}")

    @app.post("/add_llm_server", **described)
    async def paper_add_llm_server(body: LlmServerRequest) -> PaperAnswer:
        """Add a model server."""
        with _paper_errors():
            await servers.add(ModelServerRequest.model_construct(url=body.address))
        return PaperAnswer(status=f"added {body.address}")

    @app.post("/clear_llm_server", **described)
    async def paper_clear_llm_server() -> PaperAnswer:
        """Remove all model servers."""
        with _paper_errors():
            for server in servers.all().servers:
                if server.state is not ServerHealth.DRAINING:
                    await servers.remove(server.url, wait_s=0.0)
        return PaperAnswer(status="cleared")


@contextmanager
def _paper_errors() -> Iterator[None]:
    """Convert the service's errors in the block to `PaperError`."""
    try:
        yield
    except ProrlError as error:
        wire = to_wire(error)
        status = 400 if wire.error is InputError else wire.status
        raise PaperError(status, str(error), 5 if status in (429, 503) else 0) from error


class _Paper:
    """Jobs that were submitted by the paper's routes: each is a group of one sample."""

    def __init__(self, service: RolloutService, sources: Mapping[str, str]) -> None:
        self._service = service
        self._sources = sources
        self._running = False
        self._pending: dict[str, int] = {}  # groups with waiting requests, and their number

    def start(self) -> None:
        if self._running:
            raise PaperError(400, "the server is running already")
        self._running = True

    async def stop(self) -> None:
        self._check_running()
        self._running = False
        for group in list(self._pending):
            await self._service.groups.cancel(group)

    def status(self) -> dict[str, Any]:
        self._check_running()
        pools = self._service.status().pools
        active = {stage: pool.active for stage, pool in pools.items()}
        return {"pending_jobs": len(self._pending), "running": True, "jobs": len(self._pending), **active}

    async def cancel(self, name: str) -> None:
        self._check_running()
        with _paper_errors():
            await self._service.groups.cancel(_group_id(name))

    async def process(self, body: ProcessRequest) -> tuple[Result, dict[str, Any]]:
        self._check_running()
        if not self._service.model_servers.can_sample():
            raise PaperError(503, "there is no model server; add one first", 5)
        # A row of a merged table has a null or, from pandas, a NaN in the columns of other data sets.
        instance = {key: value for key, value in body.instance.items() if not _is_missing(value)}
        with _paper_errors():
            group = self._group(body, instance)
            self._pending[group.id] = self._pending.get(group.id, 0) + 1
            try:
                await self._service.groups.submit([group])
                result = await self._finished(job_id(group.id, 0))
            finally:
                self._pending[group.id] -= 1
                if not self._pending[group.id]:
                    del self._pending[group.id]
        return result, paper_result(result, instance)

    async def _finished(self, job: str) -> Result:
        while not (await self._service.groups.job(job, wait_s=_CHECK_S)).state.final:
            if self._service.guard.state is ServiceState.STOPPED:
                raise Unavailable("the service has stopped")
        return await self._service.store.result(job)

    def _group(self, body: ProcessRequest, instance: dict[str, Any]) -> GroupRequest:
        """Return the rollout as a group of one sample.

        Args:
            body: the request.
            instance: its data row without empty columns.

        Raises:
            InputError: the environment, the row or a sampling parameter is wrong.
        """
        if json_problem(instance):
            raise InputError("instance: not JSON: it contains a NaN, an infinity or a lone surrogate")
        row = {key: value for key, value in instance.items() if key not in ("data_source", "trajectory_id")}
        source = str(instance.get("data_source") or DEFAULT_SOURCE)
        environment = environment_of(source, self._service.groups.environments, self._sources)
        params = {key: value for key, value in body.sampling_params.items() if value is not None}
        if "max_output_tokens" in params:
            params.setdefault("max_tokens", params["max_output_tokens"])
        try:
            return GroupRequest(
                id=_group_id(body.job_id or uuid.uuid4().hex),
                environment=environment,
                task=self._service.groups.environments.row_of(environment, row),
                sampling=Sampling.model_validate(_known_fields(params, Sampling)),
                limits=AgentLimits(max_turns=params.get("max_iterations", AgentLimits().max_turns)),
            )
        except ValidationError as error:
            first = error.errors()[0]
            raise InputError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error

    def _check_running(self) -> None:
        if not self._running:
            raise PaperError(503, "the server is not running; start it first", 5)


def paper_result(result: Result, instance: dict[str, Any]) -> dict[str, Any]:
    """Return a result in the form of the paper's server.

    Args:
        result: the job's result.
        instance: the data row that was sent, with or without empty columns.
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
    """Yield the messages, each with its tokens. Tokens between two answers cannot be assigned to single
    messages, so the first message between the answers gets all of them."""
    ids = [number for row in result.rows for number in row.ids]
    logprobs = [number for row in result.rows for number in row.logprobs]
    starts = accumulate((len(row.ids) for row in result.rows), initial=0)
    rows = zip(result.rows, starts, strict=False)
    spans = [(start + turn.start, start + turn.end) for row, start in rows for turn in row.turns]
    position = answers = 0
    for message in result.messages:
        shown: dict[str, Any] = {**message, "input_ids": None, "logprobs": None}
        if calls := message.get("tool_calls"):
            shown["tool_calls"] = [call["function"] for call in calls]
        start, end = spans[answers] if answers < len(spans) else (len(ids), len(ids))
        if message["role"] == "assistant" and answers < len(spans):
            shown |= {"token_ids": ids[start:end], "logprobs": logprobs[start:end]}
            position, answers = end, answers + 1
        else:
            shown["token_ids"], position = ids[position:start], start
        yield shown


def _is_missing(value: object) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _group_id(name: str) -> str:
    return f"process/{name}"


def _known_fields(values: dict[str, Any], model: type[BaseModel]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key in model.model_fields}


def environment_of(source: str, offered: Container[str], further: Mapping[str, str]) -> str:
    """Return the environment for a `data_source`.

    A name of one of the service's environments stands for itself. Otherwise `further` is searched, then
    `SOURCES`. In each table an exact name has priority over patterns, and longer patterns over shorter ones.

    Args:
        source: the `data_source` that the client sent.
        offered: names of the service's environments.
        further: the operator's own names, in the form of `SOURCES`.

    Returns:
        The environment, or `source` itself if no name matches.

    Raises:
        InputError: the name stands for an environment that the service does not have.
    """
    if source in offered:
        return source
    for table in (further, SOURCES):
        if name := _match(source, table):
            environment = table[name]
            if environment not in offered:
                raise InputError(
                    f"data_source {source!r} stands for environment {environment!r}, which is not available",
                    hint="add it to the setting environments, or map the name with server.paper_sources",
                )
            return environment
    return source


def _match(source: str, table: Mapping[str, str]) -> str:
    """Return the key of the table that matches best, or "" if no key matches."""
    if source in table:
        return source
    prefixes = (key for key in table if key.endswith("*") and source.startswith(key[:-1]))
    return max(prefixes, key=len, default="")
