"""What a service says of itself: log lines for people or for machines, and traces for a collector."""

import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

from opentelemetry import trace

from prorl_envs import __version__
from prorl_envs.config import LogSettings
from prorl_envs.errors import InputError, printable
from prorl_envs.rollout.tracing import current_job

#: Any of them asks for traces: https://opentelemetry.io/docs/specs/otel/protocol/exporter/
ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


def set_up_logging(settings: LogSettings) -> None:
    """Log to standard error, in the form asked for."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if settings.format == "json" else TextLines())
    logging.basicConfig(level=settings.level.upper(), handlers=[handler], force=True)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line a request is no news


class TextLines(logging.Formatter):
    """A line for people; the job comes first where there is one. What others wrote stays on its line."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, and the traceback below it where there is one."""
        job = current_job.get()
        message = printable(record.getMessage()).replace("\n", "\n    ")
        time = datetime.fromtimestamp(record.created).strftime("%H:%M:%S")
        line = f"{time} {record.levelname.lower():8} {f'[{job}] ' if job else ''}{message}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonLines(logging.Formatter):
    """One JSON object a line, with the job and the trace it belongs to."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if job := current_job.get():
            line["job"] = job
        context = trace.get_current_span().get_span_context()
        if context.is_valid:
            line["trace_id"] = trace.format_trace_id(context.trace_id)
            line["span_id"] = trace.format_span_id(context.span_id)
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


@contextmanager
def exporting_traces() -> Iterator[None]:
    """Send traces to the collector that the environment names, where it names one; the last on leaving.

    The variables are OpenTelemetry's own, `OTEL_EXPORTER_OTLP_ENDPOINT` first of all.

    Raises:
        InputError: it does, and the SDK is not installed.
    """
    if not any(os.environ.get(name) for name in ENDPOINTS):
        yield
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise InputError(
            "traces are asked for, and OpenTelemetry's SDK is not installed",
            hint="pip install 'prorl-envs[otel]'",
        ) from error
    resource = Resource.create({"service.name": "prorl-envs", "service.version": __version__})
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
    try:
        yield
    finally:
        provider.shutdown()
