"""CPU time of a model server's caller: our client and general ones, in one run.

python -m bench.http_clients

Every client sends the same request to the same server, which answers at once, and reads the whole answer.
aiohttp and niquests have rows if they are installed.
"""

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import httpcore
import httpx

from bench.__main__ import machine
from prorl_envs.app.run_loop import run
from prorl_envs.model.http.client import ModelHttpClient

PATH = "/v1/completions"
HEADERS = {"content-type": "application/json"}
SESSION = {"x-session-id": "s"}


class Ours:
    def __init__(self, url: str) -> None:
        self._link = ModelHttpClient(url)

    async def post(self, body: bytes) -> bytes:
        return await self._link.request("POST", PATH, body, SESSION)

    async def aclose(self) -> None:
        await self._link.aclose()


class Httpx:
    """One client per connection: within a client, each request would scan the pool's connections."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._idle: list[httpx.AsyncClient] = []

    async def post(self, body: bytes) -> bytes:
        client = self._idle.pop() if self._idle else httpx.AsyncClient(headers=HEADERS, trust_env=False)
        answer = await client.post(self._url + PATH, content=body, headers=SESSION)
        self._idle.append(client)
        return answer.content

    async def aclose(self) -> None:
        for client in self._idle:
            await client.aclose()


class Httpcore:
    """One connection each, as above."""

    def __init__(self, url: str) -> None:
        self._url = httpcore.URL(url + PATH)
        self._idle: list[httpcore.AsyncHTTPConnection] = []

    async def post(self, body: bytes) -> bytes:
        origin = self._url.origin
        connection = self._idle.pop() if self._idle else httpcore.AsyncHTTPConnection(origin)
        headers = {**HEADERS, **SESSION, "host": self._url.host.decode(), "content-length": str(len(body))}
        answer = await connection.request("POST", self._url, headers=list(headers.items()), content=body)
        self._idle.append(connection)
        return answer.content

    async def aclose(self) -> None:
        for connection in self._idle:
            await connection.aclose()


class Aiohttp:
    def __init__(self, url: str) -> None:
        aiohttp = import_module("aiohttp")
        connector = aiohttp.TCPConnector(limit=0)
        self._url = url + PATH
        self._session = aiohttp.ClientSession(connector=connector, headers=HEADERS, auto_decompress=False)

    async def post(self, body: bytes) -> bytes:
        async with self._session.post(self._url, data=body, headers=SESSION) as answer:
            content: bytes = await answer.read()
            return content

    async def aclose(self) -> None:
        await self._session.close()


class Niquests:
    def __init__(self, url: str) -> None:
        niquests = import_module("niquests")
        self._url = url + PATH
        self._session = niquests.AsyncSession(disable_http2=True, disable_http3=True)

    async def post(self, body: bytes) -> bytes:
        content: bytes = (await self._session.post(self._url, data=body, headers=HEADERS | SESSION)).content
        return content

    async def aclose(self) -> None:
        await self._session.close()


CLIENTS: dict[str, Callable[[str], Any]] = {
    "ours": Ours,
    "aiohttp": Aiohttp,
    "httpcore": Httpcore,
    "niquests": Niquests,
    "httpx": Httpx,
}


def request(tokens: int) -> bytes:
    chance = random.Random(tokens)
    ids = ",".join(str(chance.randrange(150_000)) for _ in range(tokens))
    return f'{{"model":"m","prompt":[{ids}],"max_tokens":100}}'.encode()


async def cost(post: Callable[[bytes], Awaitable[bytes]], body: bytes, at_once: int, calls: int) -> float:
    """Return the CPU time of one call, in ms."""
    began = time.process_time()
    for _ in range(calls):
        for answer in await asyncio.gather(*(post(body) for _ in range(at_once))):
            assert len(answer) > len(body) // 2, answer
    return (time.process_time() - began) * 1e3 / calls / at_once


async def bench(options: argparse.Namespace) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.turns", "--serve"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        url = (await process.stdout.readline()).decode().strip()
        clients = {name: make(url) for name, make in CLIENTS.items() if name == "ours" or find_spec(name)}
        print(f"\nCPU of a call, in ms\n\n| history, tokens | at once | {' | '.join(clients)} |")
        print("|---" * (2 + len(clients)) + "|")
        for tokens, at_once, calls in ((1000, 1, 100), (1000, 64, 4), (32_000, 1, 20), (128_000, 1, 8)):
            body = request(tokens)
            costs: dict[str, list[float]] = {name: [] for name in clients}
            for number in range(options.rounds + 1):
                for name, client in clients.items():
                    costs[name].append(await cost(client.post, body, at_once, calls if number else 1))
            cells = " | ".join(f"{statistics.median(of[1:]):.2f}" for of in costs.values())
            print(f"| {tokens:,} | {at_once} | {cells} |", flush=True)
        for client in clients.values():
            await client.aclose()
    finally:
        process.stdin.close()
        await process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.http_clients", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    print(machine())
    run(bench(options))


if __name__ == "__main__":
    main()
