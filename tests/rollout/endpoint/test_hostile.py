"""Clients that attack the endpoint on raw sockets; all other clients still get answers."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from prorl_envs.rollout.api.types import AgentLimits
from prorl_envs.rollout.endpoint.session import EndpointLimits
from tests.rollout.endpoint.conftest import check_rows, doorstep, scripted_endpoint, toy_endpoint

pytestmark = pytest.mark.anyio

BODY = {"model": "m", "messages": [{"role": "user", "content": "x"}]}


def request(key: str, body: Any = BODY, *, path: str = "/v1/chat/completions") -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n"
    head += f"content-length: {len(data)}\r\n\r\n"
    return head.encode() + data


async def ask(port: int, key: str, body: Any = BODY) -> httpx.Response:
    async with httpx.AsyncClient(timeout=30) as client:
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        return await client.post(url, json=body, headers={"x-api-key": key})


async def test_connections_are_bounded_and_idle_ones_make_room() -> None:
    async with toy_endpoint(lambda *_: "Hello.") as served, doorstep(served, connections=8) as step:
        flood = [await asyncio.open_connection("127.0.0.1", step.port) for _ in range(40)]
        try:
            assert (await ask(step.port, served.key)).status_code == 200
            for reader, _ in flood[: 40 - 8]:
                assert await reader.read() == b"", "more than 8 connections are open"
        finally:
            for _, writer in flood:
                writer.close()
        assert (await ask(step.port, served.key)).status_code == 200


async def test_garbage_is_refused_and_harms_no_other_client() -> None:
    async with toy_endpoint(lambda *_: "Hello.") as served, doorstep(served) as step:
        for data in (b"\0" * 70_000, b"GET / HTTP/9\r\n\r\n", b"POST / HTTP/1.1\r\nx: " + b"y" * 100_000):
            reader, writer = await asyncio.open_connection("127.0.0.1", step.port)
            writer.write(data)
            said = await reader.read(100)
            assert not said or b" 400 " in said
            writer.close()
        assert (await ask(step.port, served.key)).status_code == 200


async def test_incomplete_requests_and_connections_leak_nothing() -> None:
    async with scripted_endpoint({}, server={"latency_s": 30.0}) as (served, server):
        async with doorstep(served) as step:
            _, half = await asyncio.open_connection("127.0.0.1", step.port)
            half.write(request(served.key)[:-5])
            half.write_eof()
            _, whole = await asyncio.open_connection("127.0.0.1", step.port)
            whole.write(request(served.key, {**BODY, "stream": True}))
            await server.until(lambda counts: counts.running == 1)
            whole.write_eof()  # as in other HTTP servers, a client that closed its sending side is gone
            whole.transport.abort()
            half.transport.abort()
            await asyncio.wait_for(server.until(lambda counts: counts.aborted == 1), 30)
        assert served.session.calls == 0 and served.rows == []


async def test_the_end_of_a_rollout_stops_its_generations() -> None:
    opening = scripted_endpoint({}, server={"latency_s": 30.0})
    async with opening as (served, server), doorstep(served) as step:
        asking = [asyncio.create_task(ask(step.port, served.key)) for _ in range(3)]
        await server.until(lambda counts: counts.running == 3)
        await served.session.aclose()
        assert {answer.status_code for answer in await asyncio.gather(*asking)} == {403}
        await asyncio.wait_for(server.until(lambda counts: counts.aborted == 3), 30)
        assert (await ask(step.port, served.key)).status_code == 403


async def test_one_rollout_cannot_write_into_another() -> None:
    one, two = toy_endpoint(lambda *_: "one"), toy_endpoint(lambda *_: "two")
    async with one as first, two as second:
        for key in (second.key, "", first.key[:-1], first.key + "x", "sk-prorl-é"):
            async with httpx.AsyncClient(base_url=first.url) as client:
                answer = await client.post(
                    "/v1/messages", json=BODY, headers=[(b"x-api-key", key.encode("latin-1"))]
                )
            assert answer.status_code == 401
            assert answer.json()["error"]["type"] == "authentication_error"
        assert first.rows == [] and second.rows == []


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"[" * 200_000, 400),
        (b'{"messages": ' + b"[" * 5000 + b"]" * 5000 + b"}", 400),
        (b"\xff\xfe", 400),
        (b"x" * 200_000, 413),
        (json.dumps({"messages": [{"role": "user", "content": "a" * 90_000}]}).encode(), 400),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', 200),
    ],
)
async def test_oversized_bodies_are_refused(data: bytes, status: int) -> None:
    bounds, limits = EndpointLimits(body_bytes=150_000), AgentLimits(max_tokens=1000)
    async with toy_endpoint(lambda *_: "Hello.", bounds=bounds, limits=limits) as served:
        if len(data) > 150_000 and status == 400:
            data = data[:100_000]
        async with httpx.AsyncClient(base_url=served.url) as client:
            headers = {"authorization": f"Bearer {served.key}"}
            answer = await client.post("/v1/chat/completions", content=data, headers=headers)
        assert answer.status_code == status, answer.text
        assert len(served.rows) == (status == 200)


async def test_concurrent_calls_are_bounded() -> None:
    bounds = EndpointLimits(parallel=2, waiting=3)
    async with scripted_endpoint({}, server={"latency_s": 0.3}, bounds=bounds) as (served, server):
        async with doorstep(served, connections=16) as step:
            answers = await asyncio.gather(*(ask(step.port, served.key) for _ in range(10)))
        codes = [answer.status_code for answer in answers]
        assert codes.count(200) == 5 and codes.count(429) == 5
        check_rows(served.rows)
        assert sum(len(row.turns) for row in served.rows) == server.counts.requests == 5


async def test_a_client_that_sends_only_garbage_is_disconnected() -> None:
    async with toy_endpoint(lambda *_: "Hello.", bounds=EndpointLimits(refused=20)) as served:
        async with httpx.AsyncClient(base_url=served.url, headers={"x-api-key": served.key}) as client:
            codes = [(await client.post("/v1/messages", json={})).status_code for _ in range(25)]
        assert codes == [400] * 20 + [403] * 5


async def test_the_calls_of_a_rollout_are_counted() -> None:
    async with toy_endpoint(lambda *_: "Hello.", limits=AgentLimits(max_turns=2)) as served:
        async with httpx.AsyncClient(base_url=served.url, headers={"x-api-key": served.key}) as client:
            answers = [await client.post("/v1/chat/completions", json=BODY) for _ in range(4)]
        assert [answer.status_code for answer in answers] == [200, 200, 403, 403]
        assert served.session.limit == "turn_limit"
