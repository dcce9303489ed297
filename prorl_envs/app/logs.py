"""Log output of a service (text or JSON lines) and export of traces to a collector."""

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
from prorl_envs.extras import install_extras
from prorl_envs.rollout.agent.tracing import current_job

#: Each of these variables enables traces: https://opentelemetry.io/docs/specs/otel/protocol/exporter/
ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


def set_up_logging(settings: LogSettings) -> None:
    """Log to standard error, in the configured format."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if settings.format == "json" else TextLines())
    logging.basicConfig(level=settings.level.upper(), handlers=[handler], force=True)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs a line for each request


class TextLines(logging.Formatter):
    """Formatter of text lines, which name the job if there is one. Continuation lines are indented."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, followed by the traceback if there is one."""
        job = current_job.get()
        message = printable(record.getMessage()).replace("\n", "\n    ")
        time = datetime.fromtimestamp(record.created).strftime("%H:%M:%S")
        line = f"{time} {record.levelname.lower():8} {f'[{job}] ' if job else ''}{message}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonLines(logging.Formatter):
    """Formatter of JSON lines: one object per record, with its job and trace."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
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
    """Send traces to the collector that OpenTelemetry's environment variables name; flush them on exit.

    Does nothing if no variable of `ENDPOINTS` is set.

    Raises:
        InputError: a variable is set, but the SDK is not installed.
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
            "an OTEL_EXPORTER_OTLP variable is set, but OpenTelemetry's SDK is not installed",
            hint=install_extras("otel"),
        ) from error
    resource = Resource.create({"service.name": "prorl-envs", "service.version": __version__})
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
    try:
        yield
    finally:
        provider.shutdown()
