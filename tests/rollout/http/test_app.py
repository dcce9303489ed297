"""The HTTP interface: every answer is typed, limits hold, and requests without the token are refused."""

import asyncio
import gzip
import json
import sqlite3
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import SecretStr, ValidationError

from prorl_envs.config import ServerSettings
from prorl_envs.errors import InputError
from prorl_envs.model.routing.pool import ModelPool
from prorl_envs.model.tokens.rendering import TemplateRenderer
from prorl_envs.rollout.api.errors import WIRE_ERRORS, Unavailable
from prorl_envs.rollout.api.types import Result
from prorl_envs.rollout.http.app import create_app
from prorl_envs.rollout.service.service import RolloutService
from tests.rollout.batches.batch_bench import PacedModel
from tests.support.toy import ToyModel, ToyWorld, empty_node

pytestmark = pytest.mark.anyio

TOKEN = "a-token-of-some-length"
TYPES = {wire.name for wire in WIRE_ERRORS}


def http(service: RolloutService, **changes: Any) -> httpx.AsyncClient:
    """Client that calls the application directly, so that a bug raises here."""
    app = create_app(service, ServerSettings(**changes))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1")


@pytest.fixture
async def client(bench: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with http(bench.service, max_body_bytes=20_000, max_wait_s=1, max_page=50) as client:
        yield client


def body(name: str = "g", **fields: Any) -> dict[str, Any]:
    return {"id": name, "environment": "toy", "task": {"id": "t", "instruction": "do"}, **fields}


def error_of(response: httpx.Response) -> dict[str, str]:
    error: dict[str, str] = response.json()["error"]
    assert set(response.json()) == {"error"}
    assert set(error) == {"type", "message", "hint"}
    assert error["type"] in TYPES
    assert error["message"]
    return error


async def test_one_group_or_a_list_of_them(client: httpx.AsyncClient) -> None:
    one = await client.post("/v1/groups", json=body("a"))
    many = await client.post("/v1/groups", json=[body("a"), body("b", samples=2)])
    assert [group["id"] for group in one.json()["groups"]] == ["a"]
    assert [len(group["jobs"]) for group in many.json()["groups"]] == [1, 2]


@pytest.mark.parametrize(
    "bad", ["a/../b", "a/./b", "a//b", "a/", "a/..", "..", ".", "", "a/b/../../..", "a\n", "a/b\n"]
)
async def test_ids_that_paths_would_normalise_are_refused(client: httpx.AsyncClient, bad: str) -> None:
    for route, request_body in (
        ("groups", body(bad)),
        ("episodes", body(bad)),
        ("batches", {"id": bad, "groups": 1, "environment": "toy", "tasks": []}),
    ):
        response = await client.post(f"/v1/{route}", json=request_body)
        assert (response.status_code, error_of(response)["type"]) == (422, "invalid_request")
        assert "id" in error_of(response)["message"]
    await client.post("/start")
    for route in ("process", "cancel"):
        response = await client.post(f"/{route}", json={"job_id": bad, "instance": {"data_source": "toy"}})
        assert response.status_code == 422


async def test_ids_with_slashes_and_dots_are_kept(client: httpx.AsyncClient) -> None:
    name = "run-1/step.2/.../..x/.y/a:b"
    await client.post("/v1/groups", json=body(name))
    assert (await client.get(f"/v1/groups/{name}")).json()["id"] == name
    assert (await client.get(f"/v1/jobs/{name}/0")).json()["id"] == f"{name}/0"
    assert (await client.delete(f"/v1/jobs/{name}/0")).status_code == 200
    assert (await client.get("/v1/groups/run-1%2Fstep.2%2F...%2F..x%2F.y%2Fa:b")).json()["complete"]
    assert (await client.delete(f"/v1/groups/{name}")).status_code == 200
    result = Result.model_validate_json((await client.get(f"/v1/jobs/{name}/0/result")).content)
    assert result.group_id == name


async def test_results_by_cursor(client: httpx.AsyncClient, bench: Any) -> None:
    assert (await client.get("/v1/results")).json() == {"results": [], "next": 0}
    await client.post("/v1/groups", json=body(samples=5))
    await bench.finished(5)
    first = (await client.get("/v1/results", params={"limit": 2})).json()
    rest = (await client.get("/v1/results", params={"after": first["next"], "wait_s": 1})).json()
    assert [len(first["results"]), len(rest["results"])] == [2, 3]
    assert [r["cursor"] for r in first["results"] + rest["results"]] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("request_body", "status", "kind", "says"),
    [
        (body(samples=0), 422, "invalid_request", "samples"),
        (body(surprise=1), 422, "invalid_request", "surprise"),
        (body("../x"), 422, "invalid_request", "id"),
        (body("/x"), 422, "invalid_request", "id"),
        (body(environment="os:system"), 422, "invalid_request", "os:system"),
        (body(task={"id": "t"}), 422, "invalid_request", "toy task"),
        (body(limits={"run_s": -1}), 422, "invalid_request", "run_s"),
        (body(sampling={"seed": 2**64}), 422, "invalid_request", "seed"),
        ([], 422, "invalid_request", "list"),
        ([body("same"), body("same", samples=2)], 409, "conflict", "same"),
        ("text", 422, "invalid_request", "body"),
        (None, 422, "invalid_request", "body"),
    ],
)
async def test_a_bad_submission_is_refused_with_the_reason(
    client: httpx.AsyncClient, request_body: Any, status: int, kind: str, says: str
) -> None:
    response = await client.post("/v1/groups", json=request_body)
    error = error_of(response)
    assert (response.status_code, error["type"]) == (status, kind)
    assert says in error["message"]


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff\xfe", b"[" * 15_000, b'{"id": 1e999}'])
async def test_invalid_json_is_a_typed_error(client: httpx.AsyncClient, raw: bytes) -> None:
    response = await client.post("/v1/groups", content=raw, headers={"content-type": "application/json"})
    assert error_of(response)["type"] == "invalid_request"


async def test_json_that_could_not_be_returned_is_refused(client: httpx.AsyncClient) -> None:
    for metadata in ('{"x": NaN}', '{"x": "\\ud800"}', '{"\\udfff": 1}'):
        raw = json.dumps(body()).replace('"task"', f'"metadata": {metadata}, "task"')
        response = await client.post("/v1/groups", content=raw, headers={"content-type": "application/json"})
        assert "metadata" in error_of(response)["message"]


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("GET", "/v1/groups/none", 404, "not_found"),
        ("DELETE", "/v1/groups/none", 404, "not_found"),
        ("GET", "/v1/jobs/none/0", 404, "not_found"),
        ("GET", "/v1/jobs/none/0/result", 404, "not_found"),
        ("GET", "/v1/groups/%FF%00", 404, "not_found"),
        ("GET", "/v2/anything", 404, "not_found"),
        ("GET", "/v1/status/", 404, "not_found"),
        ("PUT", "/v1/groups", 405, "method_not_allowed"),
        ("GET", "/v1/results?limit=51", 422, "invalid_request"),
        ("GET", "/v1/results?wait_s=nan", 422, "invalid_request"),
        ("GET", "/v1/results?after=-1", 422, "invalid_request"),
        ("POST", "/v1/model_servers", 422, "invalid_request"),
    ],
)
async def test_every_error_is_typed(
    client: httpx.AsyncClient, method: str, path: str, status: int, kind: str
) -> None:
    response = await client.request(method, path)
    assert (response.status_code, error_of(response)["type"]) == (status, kind)


async def test_a_body_over_the_limit_announced_or_not(client: httpx.AsyncClient) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b" " * 1000

    announced = await client.post("/v1/groups", json=body(metadata={"x": "y" * 30_000}))
    unannounced = await client.post(
        "/v1/groups", content=chunks(), headers={"content-type": "application/json"}
    )
    for response in (announced, unannounced):
        assert (response.status_code, error_of(response)["type"]) == (413, "too_large")


async def test_the_bodies_of_all_unfinished_requests_are_bounded(client: httpx.AsyncClient) -> None:
    more, started = asyncio.Event(), asyncio.Semaphore(0)

    async def half() -> AsyncIterator[bytes]:
        yield b" " * 19_000
        started.release()
        await more.wait()

    headers = {"content-type": "application/json"}
    halves = [
        asyncio.create_task(client.post("/v1/groups", content=half(), headers=headers)) for _ in range(8)
    ]
    for _ in halves:
        await started.acquire()
    refused = await client.post("/v1/groups", json=body(metadata={"x": "y" * 15_000}))
    assert (refused.status_code, error_of(refused)["type"]) == (429, "full")
    more.set()
    assert [(await one).status_code for one in halves] == [422] * 8
    assert (await client.post("/v1/groups", json=body(metadata={"x": "y" * 15_000}))).status_code == 200


async def test_a_full_queue_says_when_to_retry(make_bench: Any) -> None:
    bench = await make_bench(queue=1)
    async with http(bench.service) as client:
        response = await client.post("/v1/groups", json=body(samples=2))
    assert (response.status_code, error_of(response)["type"]) == (429, "full")
    assert int(response.headers["retry-after"]) > 0


async def test_ready_follows_the_service_and_health_the_process(
    client: httpx.AsyncClient, bench: Any
) -> None:
    assert (await client.get("/ready")).status_code == 200
    await bench.service.stop()
    assert (await client.get("/ready")).status_code == 503
    assert (await client.get("/health")).status_code == 200
    refused = await client.post("/v1/groups", json=body())
    assert error_of(refused)["type"] == "unavailable"
    assert "retry-after" in refused.headers


async def test_ready_follows_the_store(client: httpx.AsyncClient, bench: Any) -> None:
    def fail() -> None:
        raise sqlite3.OperationalError("database or disk is full")

    for _ in range(2):
        with pytest.raises(Unavailable, match="disk is full"):
            await bench.service.store._write(fail)
        response = await client.get("/ready")
        assert (response.status_code, error_of(response)["type"]) == (503, "unavailable")
        assert error_of(response)["message"] == "the store cannot be written", "without a token, no details"
        await bench.service.store.put_value("works", "again")
        assert (await client.get("/ready")).status_code == 200


@pytest.mark.parametrize("encoding", ["gzip", "GZIP", "br", "identity, gzip"])
async def test_a_compressed_body_is_refused_with_the_reason(client: httpx.AsyncClient, encoding: str) -> None:
    content = gzip.compress(json.dumps(body()).encode())
    headers = {"content-encoding": encoding, "content-type": "application/json"}
    response = await client.post("/v1/groups", content=content, headers=headers)
    assert (response.status_code, error_of(response)["type"]) == (415, "unsupported_media_type")
    assert encoding in error_of(response)["message"]
    plain = await client.post("/v1/groups", json=body(), headers={"content-encoding": "identity"})
    assert plain.status_code == 200


async def test_no_id_is_reported_unknown_before_the_store_is_read(
    make_bench: Any, renderer: TemplateRenderer
) -> None:
    """A reader of a killed service sends requests to the restarted service immediately."""
    store = (await make_bench()).service.store
    service = RolloutService(
        empty_node(), {"toy": ToyWorld().family()}, renderer, PacedModel(renderer), store=store
    )
    async with http(service) as client:
        for path in ("/v1/batches/b", "/v1/batches", "/v1/groups/g", "/v1/jobs/g/0", "/v1/episodes/e"):
            refused = await client.get(path)
            assert error_of(refused)["type"] == "unavailable", path
            assert refused.headers["retry-after"] == "1"
        assert (await client.delete("/v1/batches/b")).status_code == 503
        assert (await client.get("/ready")).status_code == 503
        for path in ("/health", "/metrics", "/v1/status"):
            assert (await client.get(path)).status_code == 200
        await service.start()
        assert (await client.get("/v1/batches/b")).status_code == 404
        await service.stop()


async def test_every_route_asks_for_the_token(bench: Any) -> None:
    async with http(bench.service, token=SecretStr(TOKEN)) as client:
        wrong = ["", "Bearer", f"Basic {TOKEN}", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", "Bearer é"]
        for path in ("/v1/status", "/v1/results", "/openapi.json", "/nowhere"):
            for header in wrong:
                response = await client.get(path, headers=[(b"authorization", header.encode())])
                assert (response.status_code, error_of(response)["type"]) == (401, "unauthorized")
                assert response.headers["www-authenticate"] == "Bearer"
        for scheme in ("Bearer", "bearer"):
            response = await client.get("/v1/status", headers={"authorization": f"{scheme} {TOKEN}"})
            assert response.status_code == 200
        assert (await client.get("/health")).status_code == 200


async def test_without_a_token_only_requests_to_a_loopback_name_are_served(bench: Any) -> None:
    with pytest.raises(InputError, match="token"):
        create_app(bench.service, ServerSettings(host="0.0.0.0"))
    create_app(bench.service, ServerSettings(host="0.0.0.0", token=SecretStr(TOKEN)))
    async with http(bench.service) as client:
        for host, status in {
            "127.0.0.1:8600": 200,
            "localhost": 200,
            "[::1]:80": 200,
            "evil.test": 401,
            "[::1].evil.test": 401,
            "[::1]evil.test": 401,
            "[::1": 401,
            "127.0.0.1.evil.test": 401,
            "127.0.0.1:80:80": 401,
            "evil.test:127.0.0.1": 401,
            "": 401,
        }.items():
            response = await client.get("/v1/status", headers={"host": host})
            assert response.status_code == status, host


async def test_the_environments_and_their_rows(client: httpx.AsyncClient) -> None:
    [environment] = (await client.get("/v1/environments")).json()["environments"]
    assert environment["name"] == "toy"
    assert "faults" in environment["task_schema"]["properties"]


async def test_model_servers_are_added_and_removed(make_bench: Any, renderer: TemplateRenderer) -> None:
    pool = ModelPool(lambda url: ToyModel(renderer, lambda *_: url))
    bench = await make_bench(model=pool)
    async with http(bench.service) as client:
        added = await client.post("/v1/model_servers", json={"url": "http://127.0.0.1:1/v1"})
        [server] = added.json()["servers"]
        assert (await client.get("/v1/status")).json()["model_servers"] == [server]
        for bad in ("file:///etc/passwd", "http://", "http://user@host", "x" * 3000, "http://a b"):
            response = await client.post("/v1/model_servers", json={"url": bad})
            assert error_of(response)["type"] == "invalid_request"
        gone = await client.delete("/v1/model_servers", params={"url": server["url"]})
        assert gone.json() == {"servers": [], "paused": False}
        again = await client.delete("/v1/model_servers", params={"url": server["url"]})
        assert error_of(again)["type"] == "not_found"
    await pool.aclose()


async def test_a_fixed_model_refuses_further_servers(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/model_servers", json={"url": "http://127.0.0.1:1"})
    assert error_of(response)["type"] == "conflict"


async def test_the_openapi_document_names_every_route_and_error(client: httpx.AsyncClient) -> None:
    document = (await client.get("/openapi.json")).json()
    assert set(document["paths"]) == {
        "/v1/groups",
        "/v1/groups/{group_id}",
        "/v1/jobs",
        "/v1/jobs/{job_id}",
        *(f"/v1/jobs/{{job_id}}/{what}" for what in ("partial", "tokens", "markdown", "request", "retry")),
        *("/v1/dashboard", "/v1/summaries", "/v1/search", "/v1/limits"),
        *(f"/v1/jobs/{{job_id}}/{what}" for what in ("result", "branch", "rewind")),
        "/v1/results",
        "/v1/results/acknowledge",
        "/v1/batches",
        "/v1/batches/{batch_id}",
        "/v1/batches/{batch_id}/groups",
        "/v1/batches/{batch_id}/results",
        "/v1/batches/{batch_id}/tasks",
        "/v1/status",
        "/v1/logins",
        *("/v1/nodes", "/v1/nodes/{name}/drain", "/v1/nodes/{name}/resume"),
        *("/start", "/stop", "/status", "/process", "/cancel", "/add_llm_server", "/clear_llm_server"),
        "/v1/episodes",
        "/v1/episodes/{episode_id}",
        "/v1/episodes/{episode_id}/run",
        "/v1/episodes/{episode_id}/eval",
        "/v1/episodes/{episode_id}/endpoint",
        "/v1/pause",
        "/v1/resume",
        "/v1/drain",
        "/v1/environments",
        "/v1/model_servers",
        "/metrics",
        "/v1/model_servers/pause",
        "/v1/model_servers/resume",
        "/health",
        "/ready",
    }
    for operations in document["paths"].values():
        for operation in operations.values():
            assert operation["description"]
            assert {str(wire.status) for wire in WIRE_ERRORS} <= set(operation["responses"])


async def test_the_openapi_document_of_a_service_with_a_token_names_it(bench: Any) -> None:
    document = create_app(bench.service, ServerSettings(token=SecretStr("x" * 16))).openapi()
    for path, operations in document["paths"].items():
        for operation in operations.values():
            assert path in ("/health", "/ready") or operation["security"] == [{"HTTPBearer": []}], path


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=12,
)
almost = st.fixed_dictionaries(
    {"id": st.just("g") | anything, "environment": st.just("toy") | anything, "task": anything},
    optional=dict.fromkeys(("samples", "sampling", "limits", "metadata", "x"), anything),
)


def test_no_request_body_makes_the_service_fail(renderer: TemplateRenderer) -> None:
    world = ToyWorld()
    model = ToyModel(renderer, lambda *_: "done")
    service = RolloutService(empty_node(), {"toy": world.family()}, renderer, model)
    client = http(service)
    with asyncio.Runner() as runner:

        @settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
        @given(st.one_of(anything, almost, st.lists(almost, max_size=3)))
        def post(content: Any) -> None:
            headers = {"content-type": "application/json"}
            response = runner.run(client.post("/v1/groups", content=json.dumps(content), headers=headers))
            if response.status_code != 200:
                assert error_of(response)["type"] in ("invalid_request", "conflict", "full")

        runner.run(service.start())
        post()
        runner.run(client.aclose())
        runner.run(service.stop())


def test_a_result_of_another_format_is_refused() -> None:
    with pytest.raises(ValidationError, match="version"):
        Result.model_validate_json('{"version": 1, "job_id": "g/0"}')
