"""OpenTelemetry traces: a job, its stages, and in RUN every model call and tool call.

Attribute names follow https://opentelemetry.io/docs/specs/semconv/gen-ai/ if it has a fitting name. Spans
contain no prompt, output or task text, since traces are sent to other systems than results are.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from prorl_envs import __version__
from prorl_envs.model.types import Sampled
from prorl_envs.rollout.api.types import Failure, JobState, Stage
from prorl_envs.tools.types import ToolCall, ToolResult

_propagator = TraceContextTextMapPropagator()
_tracer = trace.get_tracer("prorl_envs", __version__)

#: Job of the current asyncio task, for log lines; "" outside of a job.
current_job: ContextVar[str] = ContextVar("current_job", default="")


@contextmanager
def _job_named(job: str) -> Iterator[None]:
    """Set `current_job` while the block runs."""
    reset = current_job.set(job)
    try:
        yield
    finally:
        current_job.reset(reset)


def begin_job(job: str, environment: str, task: str) -> Span:
    """Start the span of a job at its admission; `end_job` closes the span."""
    attributes = {"prorl.job": job, "prorl.environment": environment, "prorl.task": task}
    return _tracer.start_span("rollout", context=Context(), attributes=attributes)


def end_job(span: Span, state: JobState, reward: float | None, attempts: int) -> None:
    """Close the span of a finished job."""
    span.set_attribute("prorl.state", state)
    span.set_attribute("prorl.attempts", attempts)
    if reward is not None:
        span.set_attribute("prorl.reward", reward)
    if state is JobState.FAILED:
        span.set_status(Status(StatusCode.ERROR))
    span.end()


@contextmanager
def in_stage(job: str, span: Span, stage: Stage, attempt: int) -> Iterator[Span]:
    """Open the span of a stage while the stage runs in this task."""
    with _job_named(job), trace.use_span(span), _tracer.start_as_current_span(stage) as stage_span:
        stage_span.set_attributes({"prorl.job": job, "prorl.attempt": attempt})
        yield stage_span


def carried() -> dict[str, str]:
    """Return the current span as W3C trace headers, for work that continues on another machine."""
    headers: dict[str, str] = {}
    _propagator.inject(headers)
    return headers


@contextmanager
def continued(job: str, headers: dict[str, str]) -> Iterator[None]:
    """Use the span of another machine, from `carried`, as parent. Tasks created in the block inherit it."""
    span = trace.get_current_span(_propagator.extract(headers, context=Context()))
    with _job_named(job), trace.use_span(span):
        yield


def note_failure(span: Span, failure: Failure) -> None:
    """Mark the span of a stage as failed."""
    span.set_attribute("error.type", failure.kind)
    span.set_status(Status(StatusCode.ERROR))


@contextmanager
def model_call(prompt_tokens: int) -> Iterator[Span]:
    """Open a span while a model server samples one turn."""
    with _tracer.start_as_current_span("model_call") as span:
        span.set_attribute("gen_ai.operation.name", "text_completion")
        span.set_attribute("gen_ai.usage.input_tokens", prompt_tokens)
        yield span


def note_sampled(span: Span, sampled: Sampled) -> None:
    """Add the outcome of a model call to its span."""
    span.set_attribute("gen_ai.usage.output_tokens", len(sampled.ids))
    span.set_attribute("gen_ai.response.finish_reasons", [sampled.finish_reason])
    span.set_attribute("server.address", sampled.server)
    span.set_attribute("prorl.weight_version", sampled.weight_version)


@contextmanager
def tool_call(call: ToolCall, known: bool) -> Iterator[Span]:
    """Open a span while a tool runs. An unknown tool name, invented by the model, is not recorded."""
    with _tracer.start_as_current_span("tool_call") as span:
        span.set_attribute("gen_ai.operation.name", "execute_tool")
        span.set_attribute("gen_ai.tool.name", call.name if known else "unknown")
        yield span


def note_tool(span: Span, result: ToolResult) -> None:
    """Add the outcome of a tool call to its span."""
    span.set_attribute("prorl.tool_ok", result.ok)
