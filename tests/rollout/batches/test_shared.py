"""Batches of several tenants, batches of a draining service, and their metrics for operators."""

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from prorl_envs.config import ServerSettings, TenantSettings
from prorl_envs.errors import InputError
from prorl_envs.model.tokens.rendering import TemplateRenderer
from prorl_envs.rollout.api.batches import BatchState, BatchTasks
from prorl_envs.rollout.api.errors import Forbidden, NotFound, QueueFull
from prorl_envs.rollout.client.client import RolloutClient
from prorl_envs.rollout.http.app import create_app
from tests.rollout.batches.batch_bench import PacedModel, batch, rows

pytestmark = pytest.mark.anyio

OPERATOR, ALICE, BOB = "operator-token-123", "token-of-alice-123", "token-of-bob-12345"
SETTINGS = ServerSettings(
    token=SecretStr(OPERATOR),
    tenants={
        "alice": TenantSettings(token=SecretStr(ALICE), jobs=5, batches=2),
        "bob": TenantSettings(token=SecretStr(BOB)),
    },
)

type Connect = Callable[[str], RolloutClient]


@pytest.fixture
def model(renderer: TemplateRenderer) -> PacedModel:
    return PacedModel(renderer)


@pytest.fixture
async def bench(make_bench: Callable[..., Any], model: PacedModel) -> Any:
    return await make_bench(model=model)


@pytest.fixture
async def connect(bench: Any) -> AsyncIterator[Connect]:
    transport = httpx.ASGITransport(create_app(bench.service, SETTINGS))
    clients: list[RolloutClient] = []

    def client(token: str) -> RolloutClient:
        clients.append(RolloutClient("http://h", token=token, transport=transport, attempts=1))
        return clients[-1]

    yield client
    for made in clients:
        await made.aclose()


async def test_a_tenant_has_batches_of_its_own(connect: Connect) -> None:
    alice, bob, operator = connect(ALICE), connect(BOB), connect(OPERATOR)
    await alice.submit_batch(batch("alice/step1"))
    await bob.submit_batch(batch("bob/step1"))
    await operator.submit_batch(batch("free"))
    view = await alice.batch("alice/step1", wait_s=60)
    assert view.state is BatchState.COMPLETE
    assert [group.group_id for group in (await alice.batch_groups("alice/step1")).groups] == ["alice/step1/0"]
    assert len([result async for result in alice.batch_results("alice/step1")]) == 2
    assert [view.id for view in await alice.batches()] == ["alice/step1"]
    assert len(await operator.batches()) == 3
    for foreign in ("bob/step1", "free", "alice", "nobody/x"):
        for asking in (
            alice.batch(foreign),
            alice.batch_groups(foreign),
            anext(aiter(alice.batch_results(foreign))),
            alice.cancel_batch(foreign),
            alice.submit_batch(batch("alice/step2", carry_from=foreign)),
        ):
            with pytest.raises(NotFound):
                await asking
        with pytest.raises(Forbidden, match="not yours"):
            await alice.submit_batch(batch(foreign))
    assert (await bob.batch("bob/step1", wait_s=60)).state is BatchState.COMPLETE


async def test_a_tenant_takes_no_more_than_its_share_of_the_queue(connect: Connect) -> None:
    alice = connect(ALICE)
    for wish in ({"priority": 1}, {"weight": 2.0}, {"tenant": "bob"}, {"tenant": "alice/other"}):
        with pytest.raises(Forbidden, match="only the operator may set"):
            await alice.submit_batch(batch("alice/a", **wish))
    assert (await alice.submit_batch(batch("alice/a", tenant="alice"))).id == "alice/a"
    assert (await alice.submit_batch(batch("alice/a"))).id == "alice/a", "the same, in other words"


async def test_a_batch_keeps_to_its_tenants_quota(bench: Any, model: PacedModel, connect: Connect) -> None:
    """Five jobs: two groups of two at a time, however many groups the batch would run."""
    alice = connect(ALICE)
    names = [f"alice/a/{index}" for index in range(8)]
    model.hold(*names)
    await alice.submit_batch(batch("alice/a", tasks=8, groups=8))
    await bench.world.until(lambda: bench.world.open == 4)
    assert (await alice.batch("alice/a")).started == 2
    with pytest.raises(QueueFull, match="room for 1 of 2"):
        await alice.submit([bench.group("alice/b", samples=2)])
    for name in names:
        model.release(name)
        assert bench.service.status().unfinished <= 5
    view = await alice.batch("alice/a", wait_s=60)
    assert (view.state, view.informative) == (BatchState.COMPLETE, 8)
    with pytest.raises(InputError, match="at most 5"):
        await alice.submit_batch(batch("alice/large", samples=6))


async def test_a_tenants_batches_are_bounded(bench: Any, model: PacedModel, connect: Connect) -> None:
    alice, bob = connect(ALICE), connect(BOB)
    model.hold("alice/a/0", "alice/b/0")
    await alice.submit_batch(batch("alice/a"))
    await alice.submit_batch(batch("alice/b"))
    with pytest.raises(QueueFull, match="2 batches"):
        await alice.submit_batch(batch("alice/c"))
    await bob.submit_batch(batch("bob/a"))
    await alice.cancel_batch("alice/a")
    await alice.submit_batch(batch("alice/c"))
    model.release_all()


async def test_a_draining_service_starts_no_further_groups_of_a_batch(
    bench: Any, model: PacedModel, caplog: pytest.LogCaptureFixture
) -> None:
    batches = bench.service.batches
    model.hold("a/0")
    await batches.submit(batch("a", groups=3, in_flight=1, tasks=3, stream_open=True))
    await bench.world.until(lambda: bench.world.open > 0)
    with caplog.at_level(logging.ERROR):
        draining = asyncio.create_task(bench.service.drain(wait_s=60))
        await asyncio.sleep(0)
        model.release("a/0")
        await draining
        await batches.extend("a", BatchTasks(first=3, tasks=rows(1, 3)))
        for _ in range(50):
            await asyncio.sleep(0)
    assert (await batches.view("a")).started == 1, "nothing more is begun"
    assert not caplog.records
    bench.service.resume()
    assert (await batches.view("a", wait_s=60)).state is BatchState.COMPLETE


def measured(bench: Any, name: str) -> dict[str, float]:
    """Return a metric's values, by its labels."""
    found = re.findall(rf"^{name}(?:{{(.*?)}})? (\S+)$", bench.service.metrics.text().decode(), re.M)
    return {re.sub(r'\w+="(.*?)"', r"\1", labels): float(value) for labels, value in found}


async def test_metrics_of_batches_for_operators(
    make_bench: Callable[..., Any], renderer: TemplateRenderer
) -> None:
    model = PacedModel(renderer, lambda group, sample: float(sample) if group != "a/0" else 1.0)
    bench = await make_bench(model=model)
    model.hold("a/2")
    await bench.service.batches.submit(
        batch("a", groups=2, in_flight=1, max_speculative_groups=0, tasks=2, stream_open=True)
    )
    await bench.finished(4)
    await bench.idle()
    assert measured(bench, "prorl_batches")["running"] == 1
    assert measured(bench, "prorl_batches_without_tasks") == {"": 1}
    assert measured(bench, "prorl_batch_groups") == {"wanted": 2, "informative": 1, "in_flight": 0}
    decided = {"equal_rewards,uninformative": 1, ",informative": 1}
    assert measured(bench, "prorl_batch_groups_decided_total") == decided
    await bench.service.batches.extend("a", BatchTasks(first=2, tasks=rows(1, 2)))
    model.release("a/2")
    await bench.finished(6)
    assert (await bench.service.batches.view("a", wait_s=60)).state.over
    assert measured(bench, "prorl_batches") == {"running": 0, "complete": 1, "exhausted": 0, "cancelled": 0}
    assert measured(bench, "prorl_batch_groups") == {"wanted": 0, "informative": 0, "in_flight": 0}
