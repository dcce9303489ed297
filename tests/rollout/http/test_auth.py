"""Several tenants, and routes for the operator only."""

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute
from pydantic import SecretStr

from prorl_envs.config import ServerSettings, TenantSettings, load_settings
from prorl_envs.errors import InputError
from prorl_envs.rollout.api.dashboard import LimitsRequest
from prorl_envs.rollout.api.errors import Forbidden, NotFound, QueueFull, Unauthorized
from prorl_envs.rollout.api.interactive import EpisodeRequest
from prorl_envs.rollout.api.types import JobState, Selection, StartingTurns
from prorl_envs.rollout.client.client import RolloutClient
from prorl_envs.rollout.http.app import create_app
from prorl_envs.rollout.http.auth import TENANT_ROUTES
from tests.support.clock import FakeClock

pytestmark = pytest.mark.anyio

OPERATOR, ALICE, BOB = "operator-token-123", "token-of-alice-123", "token-of-bob-12345"
SETTINGS = ServerSettings(
    token=SecretStr(OPERATOR),
    tenants={
        "alice": TenantSettings(token=SecretStr(ALICE), jobs=3),
        "bob": TenantSettings(token=SecretStr(BOB)),
    },
)

type Connect = Callable[[str], RolloutClient]


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


async def test_a_tenant_sees_and_cancels_only_its_own_jobs(bench: Any, connect: Connect) -> None:
    alice, bob, operator = connect(ALICE), connect(BOB), connect(OPERATOR)
    await alice.submit([bench.group("alice/a")])
    await bob.submit([bench.group("bob/a")])
    await operator.submit([bench.group("free")])
    await bench.finished(3)
    assert [r.group_id for r in (await alice.page()).results] == ["alice/a"]
    assert [r.group_id async for r in bob.follow(["bob/a"])] == ["bob/a"]
    assert len((await operator.page()).results) == 3
    for foreign in ("bob/a", "free", "alice", "alic/e", "nobody/x"):
        for asking in (alice.group(foreign), alice.cancel_group(foreign), alice.job(f"{foreign}/0")):
            with pytest.raises(NotFound):
                await asking
        with pytest.raises(NotFound):
            await alice.result(f"{foreign}/0")
        with pytest.raises(Forbidden, match="not yours"):
            await alice.submit([bench.group("alice/b"), bench.group(foreign)])
        with pytest.raises((Forbidden, NotFound)):
            start = StartingTurns(job_id=f"{foreign}/0", turns=1)
            await alice.submit([bench.group("alice/b").model_copy(update={"start": start})])
        with pytest.raises(Forbidden):
            await alice.start_episode(
                EpisodeRequest(id=foreign, environment="toy", task={"id": "t", "instruction": "do"})
            )
    with pytest.raises(NotFound):
        await alice.group("alice/b")
    assert (await operator.group("alice/a")).complete


async def test_a_tenant_watches_and_repeats_only_its_own_jobs(bench: Any, connect: Connect) -> None:
    alice, operator = connect(ALICE), connect(OPERATOR)
    await operator.submit([bench.group("free")])
    await alice.submit([bench.group("alice/a")])
    await bench.finished(2)
    transport = httpx.ASGITransport(create_app(bench.service, SETTINGS))
    async with httpx.AsyncClient(transport=transport, base_url="http://h") as http:
        said = await http.get("/v1/summaries", headers={"Authorization": f"Bearer {ALICE}"})
        assert [one["job_id"] for one in said.json()["summaries"]] == ["alice/a/0"]
        found = await http.get("/v1/search?text=Do", headers={"Authorization": f"Bearer {ALICE}"})
        assert found.json()["jobs"] == ["alice/a/0"]
        for what in ("tokens", "partial"):
            answer = await http.get(f"/v1/jobs/free/0/{what}", headers={"Authorization": f"Bearer {ALICE}"})
            assert answer.status_code == 404
    with pytest.raises(NotFound):
        await alice.retry_job("free/0")
    assert (await alice.retry_job("alice/a/0")).id == "alice/a:retry-0"
    assert (await alice.retry_job("alice/a/0")).id == "alice/a:retry-0", "asked twice, it is done once"
    bench.world.gates["call"] = asyncio.Event()
    await alice.submit([bench.group("alice/b")])
    await operator.submit([bench.group("other", 2)])
    await bench.world.until(lambda: bench.world.inside["call"] == 3)
    assert [job.id for job in (await alice.jobs()).jobs] == ["alice/b/0"]
    assert (await alice.jobs()).total == 1 and (await operator.jobs()).total == 3
    bench.world.gates["call"].set()


async def test_control_routes_are_for_operators_only(connect: Connect) -> None:
    alice = connect(ALICE)
    assert (await alice.status()).state == "serving"
    assert await alice.environments()
    for steering in (
        alice.pause(),
        alice.resume(),
        alice.drain(),
        alice.model_servers(),
        alice.add_model_server("http://127.0.0.1:1"),
        alice.dashboard(),
        alice.set_limits(LimitsRequest(run=1)),
        alice.nodes(),
    ):
        with pytest.raises(Forbidden, match="operator"):
            await steering
    await connect(OPERATOR).pause()


async def test_a_new_route_is_closed_to_tenants(bench: Any) -> None:
    paths = {route.path for route in create_app(bench.service, SETTINGS).routes}  # type: ignore[attr-defined]
    assert paths >= TENANT_ROUTES, "a route was renamed"
    assert {"/v1/pause", "/v1/model_servers", "/process", "/stop"} <= paths - TENANT_ROUTES


async def test_no_route_runs_its_dependencies_in_a_thread(bench: Any) -> None:
    """Each switch to a thread and back waits until the event loop releases the interpreter."""
    todo = [
        route.dependant for route in create_app(bench.service, SETTINGS).routes if isinstance(route, APIRoute)
    ]
    assert todo
    while todo:
        one = todo.pop()
        todo += one.dependencies
        call = one.call if inspect.isfunction(one.call) else type(one.call).__call__
        assert inspect.iscoroutinefunction(call), f"{one.call} of {one.path}"


async def test_a_lease_can_be_held_only_by_its_tenant_and_the_operator(make_bench: Any) -> None:
    clock = FakeClock()
    bench = await make_bench(clock=clock)
    bench.world.gates["call"] = asyncio.Event()
    transport = httpx.ASGITransport(create_app(bench.service, SETTINGS))

    def client(token: str) -> RolloutClient:
        return RolloutClient("http://h", token=token, transport=transport, attempts=1)

    names = ("alice/own", "alice/operators", "alice/strangers")
    async with client(ALICE) as alice, client(BOB) as bob, client(OPERATOR) as operator:
        leased = [bench.group(name).model_copy(update={"lease_s": 10}) for name in names]
        await operator.submit(leased)
        await bench.world.until(lambda: bench.world.inside["call"] == len(names))
        for second in range(15):
            clock.advance(1)
            for _ in range(5):
                await asyncio.sleep(0)
            if second % 5 == 4:
                await alice.group("alice/own")
                await operator.group("alice/operators")
                with pytest.raises(NotFound):
                    await bob.group("alice/strangers")
                strangers = Selection(groups=frozenset({"alice/strangers"}))
                assert not (await bob.page(only=strangers)).results
        await bench.world.until(lambda: bench.world.inside["call"] == 2)
        states = [(await operator.group(name)).jobs[0].state for name in names]
    assert states == [JobState.RUN, JobState.RUN, JobState.CANCELLED]


async def test_each_tenant_has_its_own_quota(bench: Any, connect: Connect) -> None:
    alice, bob = connect(ALICE), connect(BOB)
    bench.world.gates["call"] = asyncio.Event()
    await alice.submit([bench.group("alice/a", samples=2)])
    await alice.start_episode(
        EpisodeRequest(id="alice/e", environment="toy", task={"id": "t", "instruction": "do"})
    )
    with pytest.raises(QueueFull, match="room for 0 of 1"):
        await alice.submit([bench.group("alice/b")])
    with pytest.raises(QueueFull, match="3 unfinished"):
        await alice.start_episode(
            EpisodeRequest(id="alice/f", environment="toy", task={"id": "t", "instruction": "do"})
        )
    await alice.submit([bench.group("alice/a", samples=2)])  # a repeated id needs no quota
    await bob.submit([bench.group("bob/a", samples=10)])
    await alice.close_episode("alice/e")
    await alice.submit([bench.group("alice/b")])
    bench.world.gates["call"].set()
    await bench.finished(13)
    await bench.gone()
    await alice.submit([bench.group("alice/c", samples=3)])
    await bench.finished(16)


async def test_wrong_tokens_are_refused_and_tokens_are_not_shown(connect: Connect, bench: Any) -> None:
    for stranger in ("", "alice", ALICE[:-1], ALICE + BOB):
        with pytest.raises(Unauthorized):
            await connect(stranger).status()
    assert ALICE not in repr(SETTINGS) + str(SETTINGS.model_dump())
    create_app(bench.service, SETTINGS.model_copy(update={"host": "0.0.0.0", "token": None}))


async def test_tenants_without_an_operator_token_lock_the_service(bench: Any) -> None:
    settings = SETTINGS.model_copy(update={"token": None})
    transport = httpx.ASGITransport(create_app(bench.service, settings))
    async with RolloutClient("http://127.0.0.1", transport=transport, attempts=1) as nobody:
        with pytest.raises(Unauthorized):
            await nobody.status()
    async with RolloutClient("http://127.0.0.1", token=BOB, transport=transport, attempts=1) as bob:
        await bob.submit([bench.group("bob/a")])


def test_tenants_are_read_from_the_environment() -> None:
    settings = load_settings(environ={"PRORL_SERVER__TENANTS": f"{{alice: {{token: {ALICE}, jobs: 5}}}}"})
    assert settings.server.tenants["alice"].jobs == 5
    for wrong in ("{a/b: {token: 0123456789abcdef}}", "{a: {token: short}}", "{a: {}}"):
        with pytest.raises(InputError, match="tenants"):
            load_settings(environ={"PRORL_SERVER__TENANTS": wrong})
    with pytest.raises(InputError) as error:
        load_settings(environ={"PRORL_SERVER__TENANTS": f"{{alice: {{token: {ALICE}"})
    assert ALICE not in str(error.value), "a secret that was mistyped is still one"
