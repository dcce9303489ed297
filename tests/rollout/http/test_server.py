"""Server and client over real TCP, and signals to the server's process."""

import asyncio
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from prorl_envs.config import RetentionSettings, ServerSettings, ServiceSettings
from prorl_envs.errors import InputError
from prorl_envs.model.tokens.rendering import TemplateRenderer
from prorl_envs.rollout.api.errors import (
    Conflict,
    CursorExpired,
    NotFound,
    ServerFault,
    Unauthorized,
    Unavailable,
)
from prorl_envs.rollout.api.types import GroupRequest, JobState, Result
from prorl_envs.rollout.client.client import RolloutClient
from prorl_envs.rollout.http.server import serving
from prorl_envs.rollout.service.service import RolloutService
from tests.support.clock import FakeClock
from tests.support.toy import ToyModel, ToyWorld, empty_node

pytestmark = pytest.mark.anyio

TOKEN = "a-token-of-some-length"


def new_service(renderer: TemplateRenderer, world: ToyWorld) -> RolloutService:
    model = ToyModel(renderer, lambda *_: [{"tool": "finish", "arguments": {}}])
    return RolloutService(empty_node(), {"toy": world.family()}, renderer, model)


def group(name: str, **fields: Any) -> GroupRequest:
    task = {"id": name, "instruction": "do", "faults": fields.pop("faults", {})}
    return GroupRequest(id=name, environment="toy", task=task, **fields)


async def test_a_batch_is_followed_until_it_is_complete(renderer: TemplateRenderer) -> None:
    world = ToyWorld()
    async with serving(new_service(renderer, world)) as url, RolloutClient(url) as client:
        await client.submit([group("other/1")])
        views = await client.submit([group(f"g/{i}", samples=4) for i in range(5)])
        assert [view.id for view in views] == [f"g/{i}" for i in range(5)]
        results = [result async for result in client.follow([view.id for view in views])]
        assert len({result.job_id for result in results}) == 20
        assert all(result.group_id != "other/1" for result in results)
        statistics = (await client.group("g/3")).statistics
        assert statistics is not None
        assert statistics.mean == 1.0
        assert await client.result("g/3/0") in results
        assert (await client.job("g/3/0")).reward == 1.0
        assert (await client.status()).finished["done"] == 21
        assert [environment.name for environment in await client.environments()] == ["toy"]
        assert await client.model_servers() == []
    assert world.open == 0


async def test_results_continue_after_a_cursor(renderer: TemplateRenderer) -> None:
    async with serving(new_service(renderer, ToyWorld())) as url, RolloutClient(url) as client:
        await client.submit([group("g", samples=6)])
        seen, after = list[Result](), 0
        while len(seen) < 6:
            page = await client.page(after, wait_s=20, limit=3)
            seen += page.results
            after = page.next
        assert sorted(result.sample for result in seen) == list(range(6))


async def test_following_expired_results_is_an_error_not_a_wait(renderer: TemplateRenderer) -> None:
    clock = FakeClock()
    model = ToyModel(renderer, lambda *_: "done")
    service = RolloutService(
        empty_node(),
        {"toy": ToyWorld().family()},
        renderer,
        model,
        ServiceSettings(retention=RetentionSettings(max_results=1)),
        clock=clock,
    )
    async with serving(service) as url, RolloutClient(url) as client:
        await client.submit([group("g", samples=3)])
        while (await client.status()).unfinished:
            pass
        following = client.follow(["g"])
        assert (await anext(following)).cursor == 3
        more = asyncio.ensure_future(anext(following))
        await clock.wait_for_sleepers()
        clock.advance(20)
        with pytest.raises(NotFound, match="no longer kept"):
            await more


async def test_cancelling_over_http(renderer: TemplateRenderer) -> None:
    world = ToyWorld()
    async with serving(new_service(renderer, world)) as url, RolloutClient(url) as client:
        await client.submit([group("g", samples=3, faults={"call": "hang"})])
        await world.until(lambda: world.inside["call"] == 3)
        assert (await client.cancel_job("g/1")).state is JobState.CANCELLED
        assert (await client.cancel_group("g")).complete
        await world.until(lambda: world.open == 0)


async def test_errors_are_raised_as_their_types(renderer: TemplateRenderer) -> None:
    settings = ServerSettings(port=0, token=SecretStr(TOKEN))
    async with serving(new_service(renderer, ToyWorld()), settings) as url:
        async with RolloutClient(url, token=TOKEN) as client:
            await client.submit([group("g")])
            with pytest.raises(NotFound, match="none"):
                await client.group("none")
            with pytest.raises(NotFound):
                await client.job("a/../g/0")
            with pytest.raises(Conflict) as caught:
                await client.submit([group("g", samples=2)])
            assert caught.value.hint
            with pytest.raises(InputError, match="toy task"):
                await client.submit([group("h", faults={"x": "unknown"})])
            with pytest.raises(Conflict, match="fixed"):
                await client.add_model_server("http://127.0.0.1:1")
        async with RolloutClient(url) as stranger:
            with pytest.raises(Unauthorized):
                await stranger.status()


async def test_a_stop_cancels_running_jobs_and_closes_every_sandbox(renderer: TemplateRenderer) -> None:
    world = ToyWorld()
    async with serving(new_service(renderer, world)) as url, RolloutClient(url) as client:
        await client.submit([group("g", samples=40, faults={"call": "hang"})])
        await world.until(lambda: world.inside["call"] == 32)
        reading = asyncio.create_task(client.page(0, wait_s=60))
    assert world.open == 0
    await asyncio.wait([reading])
    with pytest.raises(Unavailable):
        async with RolloutClient(url, attempts=1) as late:
            await late.status()
    assert not reading.cancelled()
    reading.exception()


async def test_a_port_in_use_is_named(renderer: TemplateRenderer) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=str(port)):
            async with serving(new_service(renderer, ToyWorld()), ServerSettings(port=port)):
                pass


async def test_the_client_retries_while_the_service_is_down() -> None:
    answers: Iterator[httpx.Response | httpx.TransportError] = iter(
        [
            httpx.ConnectError("refused"),
            httpx.Response(503, json={"error": {"type": "unavailable", "message": "later", "hint": ""}}),
            httpx.Response(200, json={"results": [], "next": 7}),
        ]
    )

    def answer(request: httpx.Request) -> httpx.Response:
        given = next(answers)
        if isinstance(given, Exception):
            raise given
        return given

    clock = FakeClock()
    async with RolloutClient(
        "http://127.0.0.1", transport=httpx.MockTransport(answer), clock=clock, pause_s=1
    ) as client:
        asking = asyncio.create_task(client.page(7))
        for pause in (1, 2):
            await clock.wait_for_sleepers()
            clock.advance(pause)
        assert (await asking).next == 7


@pytest.mark.parametrize(
    ("response", "error"),
    [
        (httpx.Response(500, text="oops"), ServerFault),
        (httpx.Response(418, json={"error": {"type": "os.system", "message": "x"}}), ServerFault),
        (httpx.Response(410, json={"error": {"type": "cursor_expired", "message": "x"}}), CursorExpired),
        (httpx.Response(200, text="<html>"), ServerFault),
        (httpx.Response(200, json={"results": "no"}), ServerFault),
    ],
)
async def test_the_client_raises_its_own_errors_for_any_answer(
    response: httpx.Response, error: type[Exception]
) -> None:
    transport = httpx.MockTransport(lambda _: response)
    async with RolloutClient("http://127.0.0.1", transport=transport) as client:
        with pytest.raises(error):
            await client.page()


PROGRAM = """
import asyncio, sys
from prorl_envs.config import ServerSettings, ServiceSettings
from prorl_envs.rollout.http.server import serve_until_signal
from prorl_envs.rollout.service.service import RolloutService
from prorl_envs.rollout.service.service import RolloutService
from prorl_envs.testing.tokenizer import builtin_renderer
from tests.support.toy import ToyModel, ToyWorld, empty_node

async def main():
    world, renderer = ToyWorld(), builtin_renderer()
    model = ToyModel(renderer, lambda *_: [{"tool": "finish", "arguments": {}}])
    settings = ServiceSettings(drain_s=3600)
    service = RolloutService(empty_node(), {"toy": world.family()}, renderer, model, settings)
    await serve_until_signal(service, ServerSettings(port=0), ready=lambda url: print(url, flush=True))
    print("open", world.open, service.status().finished, flush=True)

asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_drains_and_a_second_one_stops_at_once(number: signal.Signals, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-W", "error", str(program), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        url = (await process.stdout.readline()).decode().strip()
        async with RolloutClient(url) as client:
            await client.submit([group("g", samples=2, faults={"call": "hang"})])
            while (await client.status()).pools["run"].active < 2:
                pass
            process.send_signal(number)
            while (await client.status()).state != "draining":
                pass
            process.send_signal(number)
            assert await process.stdout.readline() == b"open 0 {'done': 0, 'failed': 0, 'cancelled': 2}\n"
        assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
