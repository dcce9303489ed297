"""Slow, endless and half-open clients of a sandbox's listener: each loses only its own connection."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from prorl_envs.listener.connection import HEAD_BYTES
from prorl_envs.rollout.endpoint.session import EndpointLimits
from tests.rollout.endpoint.conftest import check_rows, doorstep, scripted_endpoint, toy_endpoint
from tests.rollout.endpoint.test_hostile import BODY, ask, request

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def end(reader: asyncio.StreamReader) -> bytes:
    """Return all bytes received until the connection closes."""
    said = b""
    try:
        async with asyncio.timeout(30):
            while data := await reader.read(65536):
                said += data
    except ConnectionError:
        pass
    return said


@pytest.mark.parametrize("before", [b"", b"first"])
async def test_a_head_sent_byte_by_byte_is_disconnected(before: bytes) -> None:
    """The limit also holds between two requests, and a byte does not restart it."""
    async with toy_endpoint(lambda *_: "Hello.") as served, doorstep(served, idle_s=0.3) as step:
        async with connected(step.port) as (reader, writer):
            if before:
                writer.write(request(served.key))
                assert b" 200 " in await reader.readline()
            ended = asyncio.create_task(end(reader))
            for byte in request(served.key)[:-80]:
                if ended.done():
                    break
                writer.write(bytes([byte]))
                await asyncio.sleep(0.02)
            assert ended.done(), "it was not waited for"
        assert (await ask(step.port, served.key)).status_code == 200


async def test_a_missing_body_is_refused() -> None:
    bounds = EndpointLimits(body_s=0.2)
    async with (
        toy_endpoint(lambda *_: "Hello.", bounds=bounds) as served,
        doorstep(served, idle_s=0.3) as step,
    ):
        async with connected(step.port) as (reader, writer):
            writer.write(request(served.key)[:-5])
            said = await end(reader)
            assert b" 400 " in said and b"did not arrive in time" in said
        assert served.session.refused == 1 and served.rows == []
        assert (await ask(step.port, served.key)).status_code == 200


@pytest.mark.parametrize(
    "head",
    [
        b"GET /" + b"a" * 2 * HEAD_BYTES,
        b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 200,
        b"GET / HTTP/1.1\r\nx: " + b"y" * 2 * HEAD_BYTES,
        b"POST /v1/messages HTTP/1.1\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n",
        b"POST /v1/messages HTTP/1.1\r\ncontent-length: 3\r\ncontent-length: 4\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01" + b"\0" * 500,
    ],
)
async def test_oversized_and_ambiguous_heads_are_refused(head: bytes) -> None:
    async with toy_endpoint(lambda *_: "Hello.") as served, doorstep(served) as step:
        async with connected(step.port) as (reader, writer):
            for at in range(0, len(head), 50_000):
                writer.write(head[at : at + 50_000])
                await asyncio.sleep(0)
            said = await end(reader)
            assert not said or said.startswith(b"HTTP/1.1 400 ")
        assert (await ask(step.port, served.key)).status_code == 200


async def test_a_protocol_upgrade_is_ignored_or_refused() -> None:
    upgrade = request("KEY").replace(b"host: x", b"host: x\r\nconnection: upgrade\r\nupgrade: h2c")
    async with toy_endpoint(lambda *_: "Hello.") as served, doorstep(served, idle_s=0.5) as step:
        async with connected(step.port) as (reader, writer):
            writer.write(upgrade.replace(b"KEY", served.key.encode()))
            said = await end(reader)
            assert not said or b" 200 " in said or b" 400 " in said
        assert (await ask(step.port, served.key)).status_code == 200
        check_rows(served.rows)


async def test_consecutive_requests_are_answered_one_by_one() -> None:
    async with toy_endpoint(lambda *_: "Hello.") as served, doorstep(served) as step:
        async with connected(step.port) as (reader, writer):
            writer.write(request(served.key) * 5)
            for _ in range(5):
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
                assert json.loads(await reader.readexactly(length))["choices"]
        assert len(served.rows) == 5
        check_rows(served.rows)


async def test_a_body_in_a_thousand_chunks_is_one_request() -> None:
    data = json.dumps(BODY | {"x": "y" * 2000}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nx-api-key: KEY\r\ntransfer-encoding: chunked\r\n\r\n"
    async with (
        toy_endpoint(lambda *_: "Hello.") as served,
        doorstep(served) as step,
        connected(step.port) as (reader, writer),
    ):
        writer.write(head.replace("KEY", served.key).encode())
        for byte in data:
            writer.write(b"1\r\n" + bytes([byte]) + b"\r\n")
        writer.write(b"0\r\n\r\n")
        assert b" 200 " in await reader.readline()


async def test_a_giant_body_is_refused_before_it_is_read() -> None:
    bounds = EndpointLimits(body_bytes=100_000)
    async with (
        toy_endpoint(lambda *_: "Hello.", bounds=bounds) as served,
        doorstep(served, idle_s=0.3) as step,
    ):
        async with connected(step.port) as (reader, writer):
            head = (
                f"POST /v1/messages HTTP/1.1\r\nx-api-key: {served.key}\r\ncontent-length: {10**12}\r\n\r\n"
            )
            writer.write(head.encode() + b"x" * 200_000)
            assert b" 413 " in await reader.readline()
            ended = asyncio.create_task(end(reader))
            while not ended.done():
                writer.write(b"x" * 1000)
                await asyncio.sleep(0.01)
        assert (await ask(step.port, served.key)).status_code == 200


async def test_an_unread_stream_stops_only_its_own_generation() -> None:
    """The client requests a long answer, does not read it, and disconnects."""
    tape: Any = {"x": [[{"tool": "ls", "arguments": {}, "content": "word " * 3000}]]}
    opening = scripted_endpoint(tape, server={"tokens_per_s": 500.0})
    async with opening as (served, server), doorstep(served) as step:
        async with connected(step.port) as (_, writer):
            writer.write(request(served.key, {**BODY, "stream": True}))
            await asyncio.wait_for(server.until(lambda counts: counts.running == 1), 30)
            assert (await ask(step.port, served.key, {"messages": []})).status_code == 400, "others are heard"
        await asyncio.wait_for(server.until(lambda counts: counts.running == 0), 30)


async def test_a_client_that_connects_during_close_is_disconnected() -> None:
    async with toy_endpoint(lambda *_: "Hello.") as served, doorstep(served) as step:
        await asyncio.sleep(0.01)  # the listener waits for clients
        with socket.create_connection(("127.0.0.1", step.port)) as client:
            await asyncio.sleep(0)  # the loop is about to accept this one
            await step.aclose()
            client.settimeout(10)
            with contextlib.suppress(ConnectionResetError):
                assert client.recv(1) == b""
