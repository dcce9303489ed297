"""Metrics for operators: every documented metric exists and is correct."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from prorl_envs.config import ServerSettings
from prorl_envs.model.routing.pool import ModelPool
from prorl_envs.model.tokens.rendering import TemplateRenderer
from prorl_envs.rollout.http.app import create_app
from prorl_envs.rollout.monitoring.metrics import CONTENT_TYPE
from tests.support.toy import ToyModel

pytestmark = pytest.mark.anyio

DOCS = Path(__file__).parents[3] / "docs"
SUFFIXES = ("_total", "_sum", "_count", "_bucket")


@pytest.fixture
async def client(bench: Any) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(bench.service, ServerSettings())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
        yield client


type Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


async def scrape(client: httpx.AsyncClient) -> Samples:
    answer = await client.get("/metrics")
    assert answer.headers["content-type"] == CONTENT_TYPE
    families = text_string_to_metric_families(answer.text)
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, tuple(sorted(labels.items()))]


async def test_results_are_counted_by_outcome(bench: Any, client: httpx.AsyncClient) -> None:
    await bench.submit(bench.group("good", samples=2, reward=0.75))
    await bench.submit(bench.group("bad", faults={"eval": "grader"}))
    results = await bench.finished(3)
    await bench.gone()
    seen = await scrape(client)
    assert value(seen, "prorl_results_total", environment="toy", state="done") == 2
    assert value(seen, "prorl_results_total", environment="toy", state="failed") == 1
    failed = next(result for result in results if result.failure)
    assert value(seen, "prorl_failures_total", environment="toy", kind=failed.failure.kind, stage="eval") == 1
    assert value(seen, "prorl_reward_sum", environment="toy") == 1.5
    assert value(seen, "prorl_reward_count", environment="toy") == 2
    turns = sum(len(result.trajectory.turns) for result in results)
    assert value(seen, "prorl_job_turns_sum", environment="toy") == turns
    origins = ("sampled", "observed")
    name = "prorl_trajectory_tokens_total"
    tokens = [value(seen, name, environment="toy", origin=origin) for origin in origins]
    assert tokens[0] == sum(sum(result.trajectory.loss_mask) for result in results) > 0
    assert sum(tokens) == sum(len(result.trajectory.ids) for result in results)
    assert value(seen, "prorl_drift_tokens_total") == 0


async def test_unread_results_are_counted(make_bench: Any) -> None:
    bench = await make_bench(retention={"max_results": 2})
    await bench.submit(bench.group("g", samples=3))
    await bench.gone()
    tokens = bench.service.store.unread.tokens
    app = create_app(bench.service, ServerSettings())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
        seen = await scrape(client)
        assert value(seen, "prorl_unread_results") == 2
        assert value(seen, "prorl_unread_tokens") == tokens > 0
        assert value(seen, "prorl_unread_results_dropped_total") == 1
        await client.post("/v1/results/acknowledge", json={})
        await bench.service.store.put_value("flush", "")  # acknowledgements are written with the next write
        seen = await scrape(client)
    assert value(seen, "prorl_unread_results") == value(seen, "prorl_unread_tokens") == 0


async def test_gauges_show_the_current_state(bench: Any, client: httpx.AsyncClient) -> None:
    bench.world.gates["eval"] = asyncio.Event()
    await bench.submit(bench.group("held"))
    await bench.world.until(lambda: bench.world.inside["eval"] == 1)
    seen = await scrape(client)
    assert value(seen, "prorl_pool_active", stage="eval") == 1
    assert value(seen, "prorl_unfinished_jobs") == value(seen, "prorl_jobs_with_sandbox") == 1
    assert value(seen, "prorl_service_state", state="serving") == 1
    bench.world.gates["eval"].set()


def documented() -> set[str]:
    rows = re.findall(r"^\| (`prorl_.*?) \|", (DOCS / "operating.md").read_text(), re.M)
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def base(name: str) -> str:
    for suffix in ("_created", *SUFFIXES[1:]):
        name = name.removesuffix(suffix)
    return name


async def test_every_metric_is_documented_and_every_panel_shows_one(
    make_bench: Any, renderer: TemplateRenderer
) -> None:
    pool = ModelPool(lambda url: ToyModel(renderer, lambda *_: url))
    bench = await make_bench(model=pool)
    text = bench.service.metrics.text().decode()
    await pool.aclose()
    families = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE prorl_")}
    families = {name for name in families if not name.endswith("_created")}
    assert families == documented()
    dashboard = json.loads((DOCS / "operating" / "grafana.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    shown = {base(name) for expression in expressions for name in re.findall(r"\bprorl_\w+", expression)}
    assert shown <= families
    assert len(expressions) >= 20
