"""Logs of a service in the formats for people and for machines, and traces for a collector."""

import asyncio
import json
import logging
import os
import sys

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from prorl_envs.app.logs import JsonLines, TextLines
from prorl_envs.rollout.agent.tracing import begin_job, in_stage
from prorl_envs.rollout.api.types import Stage
from prorl_envs.rollout.http.server import answering


def record(message: str, *args: object) -> logging.LogRecord:
    return logging.LogRecord("prorl_envs.somewhere", logging.WARNING, __file__, 1, message, args, None)


def test_a_line_for_people_is_one_line_and_safe() -> None:
    line = TextLines().format(record("it said %s", "\x1b[2Jfine\n12:00:00 error    forged"))
    first, second = line.split("\n")
    assert first.endswith("warning  it said \\x1b[2Jfine")
    assert second == "    12:00:00 error    forged"


def test_a_line_for_machines_names_the_job() -> None:
    span = begin_job("g/1", "toy", "t")
    with in_stage("g/1", span, Stage.RUN, 1):
        inside = json.loads(JsonLines().format(record("hello\nthere")))
    outside = json.loads(JsonLines().format(record("hello")))
    assert (inside["job"], inside["message"], inside["level"]) == ("g/1", "hello\nthere", "warning")
    assert "job" not in outside


#: Run a job that succeeds and one whose grader fails in a new process: a tracer can be set only once.
JOBS = """
import asyncio
from prorl_envs.app.logs import exporting_traces
from prorl_envs.rollout.service.service import RolloutService
from prorl_envs.rollout.api.types import GroupRequest
from prorl_envs.testing.tokenizer import builtin_renderer
from tests.support.toy import ToyModel, ToyWorld, empty_node

async def main():
    renderer = builtin_renderer()
    say, finish = {"tool": "say", "arguments": {"text": "x"}}, {"tool": "finish", "arguments": {}}
    model = ToyModel(renderer, lambda _, turn: [finish if turn else say])
    service = RolloutService(empty_node(), {"toy": ToyWorld().family()}, renderer, model)
    await service.start()
    for name, faults in (("good", {}), ("bad", {"eval": "grader"})):
        task = {"id": name, "instruction": "a secret instruction", "faults": faults}
        await service.groups.submit([GroupRequest(id=name, environment="toy", task=task)])
    await service.stop(drain_s=60)

with exporting_traces():
    asyncio.run(main())
"""


@pytest.mark.anyio
async def test_a_collector_gets_a_trace_for_each_job() -> None:
    spans: list[Span] = []

    async def collect(request: Request) -> Response:
        sent = ExportTraceServiceRequest.FromString(await request.body())
        spans.extend(span for of in sent.resource_spans for scope in of.scope_spans for span in scope.spans)
        return Response(b"", media_type="application/x-protobuf")

    app = Starlette(routes=[Route("/v1/traces", collect, methods=["POST"])])
    async with answering(app) as url:
        environ = {**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": url}
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", JOBS, env=environ)
        assert await process.wait() == 0
    roots = {attributes(span)["prorl.job"]: span for span in spans if not span.parent_span_id}
    assert set(roots) == {"good/0", "bad/0"}
    assert tree(spans, roots["good/0"]) == {
        "init": {},
        "run": {"model_call": {}, "model_call#2": {}, "tool_call": {}, "tool_call#2": {}},
        "eval": {},
    }
    failed = next(
        span for span in spans if span.parent_span_id == roots["bad/0"].span_id and span.name == "eval"
    )
    assert failed.status.code == roots["bad/0"].status.code == Status.STATUS_CODE_ERROR
    assert attributes(failed)["error.type"] == "grader"
    assert attributes(roots["good/0"])["prorl.state"] == "done"
    assert "secret" not in str(spans)


def attributes(span: Span) -> dict[str, str]:
    return {entry.key: entry.value.string_value for entry in span.attributes}


type Tree = dict[str, Tree]


def tree(spans: list[Span], parent: Span) -> Tree:
    """Return the names of a span's descendants, in order; repeated names are numbered."""
    below: Tree = {}
    for span in sorted(spans, key=lambda span: span.start_time_unix_nano):
        if span.parent_span_id == parent.span_id:
            same = sum(name.split("#")[0] == span.name for name in below)
            below[f"{span.name}#{same + 1}" if same else span.name] = tree(spans, span)
    return below
