"""Service over real HTTP in its own thread, with a toy environment and a scripted model."""

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from prorl_envs.config import ServiceSettings
from prorl_envs.model.http.client import ClientLimits
from prorl_envs.model.routing.pool import ModelPool
from prorl_envs.model.servers.detect import Servers
from prorl_envs.rollout.http.server import serving
from prorl_envs.rollout.service.service import RolloutService
from prorl_envs.testing.scripted import Script, ScriptBook
from prorl_envs.testing.tokenizer import builtin_renderer
from tests.support.timed_server import TimedServer
from tests.support.toy import ToyWorld, empty_node


def _finish(reward: float) -> Any:
    say = {"tool": "say", "arguments": {"text": "one"}}
    return [[say], [{"tool": "finish", "arguments": {"reward": reward}}]]


#: Any task "Do ...": a solution of two turns with reward 1, a wrong one with 0. "Know ..." always has 1.
BOOK = ScriptBook({"Do ": Script(_finish(1.0), _finish(0.0)), "Know ": Script(_finish(1.0), _finish(1.0))})


@dataclass
class ToyService:
    """Running service, for use from another thread."""

    world: ToyWorld
    server: TimedServer
    loop: asyncio.AbstractEventLoop
    url: str = ""
    service: RolloutService | None = None
    over: asyncio.Event = field(default_factory=asyncio.Event)

    def wait[T](self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the service's event loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    def close_gate(self, step: str) -> None:
        """Stop all episodes at the start of a step."""

        async def close() -> None:
            self.world.gates[step] = asyncio.Event()

        self.wait(close())

    def open_gate(self, step: str) -> None:
        """Release all episodes that wait at this step, and later ones."""

        async def go() -> None:
            self.world.gates.pop(step).set()

        self.wait(go())

    def until_entered(self, step: str, count: int) -> None:
        """Wait until the step has started `count` times."""
        entered = self.world.entered
        condition = lambda: sum(n for (_, name), n in entered.items() if name == step) >= count  # noqa: E731
        self.wait(self.world.until(condition))

    def until_read(self) -> None:
        """Wait until every result has been read."""
        self.wait(
            self.world.until(lambda: self.service is not None and self.service.store.unread.results == 0)
        )

    def until_empty(self) -> None:
        """Wait until no episode is open."""
        self.wait(self.world.until(lambda: self.world.open == 0))


def task(name: str = "it", **fields: Any) -> dict[str, Any]:
    """Return a task of the toy environment."""
    return {"id": name, "instruction": f"Do {name}."} | fields


def trl_trainer(step: int = 0, samples: int = 2) -> Any:
    """Return the parts of a trainer that TRL's adapter reads. Tests with TRL itself are in `real/`."""
    return SimpleNamespace(
        args=SimpleNamespace(temperature=1.0, top_p=1.0, max_completion_length=256),
        state=SimpleNamespace(global_step=step),
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(is_main_process=True, process_index=0, wait_for_everyone=lambda: None),
        processing_class=SimpleNamespace(eos_token_id=2),
        num_generations=samples,
        num_generations_eval=samples,
    )


@contextmanager
def toy_service(mix: str = "solve=1,wrong=1", **options: Any) -> Iterator[ToyService]:
    """Run a service whose model plays these behaviours.

    Args:
        options: options of the scripted model server.
    """
    ready: threading.Event = threading.Event()
    made: list[ToyService] = []

    async def live() -> None:
        renderer = builtin_renderer()
        async with AsyncExitStack() as stack:
            server = await stack.enter_async_context(TimedServer(BOOK, mix=mix, **options))
            pool = ModelPool(Servers.of(renderer, limits=ClientLimits(attempts=1)).connect)
            stack.push_async_callback(pool.aclose)
            pool.add(server.url)
            toy = ToyService(ToyWorld(), server, asyncio.get_running_loop())
            toy.service = RolloutService(
                empty_node(), {"toy": toy.world.family()}, renderer, pool, ServiceSettings(attempts=1)
            )
            toy.url = await stack.enter_async_context(serving(toy.service))
            made.append(toy)
            ready.set()
            await toy.over.wait()

    thread = threading.Thread(target=lambda: asyncio.run(live()), name="toy-service")
    thread.start()
    try:
        while not ready.wait(0.05):
            assert thread.is_alive(), "the service did not start"
        yield made[0]
    finally:
        if made:
            made[0].loop.call_soon_threadsafe(made[0].over.set)
        thread.join()


@pytest.fixture
def toy() -> Iterator[ToyService]:
    """Service in which half of every group solves its task."""
    with toy_service() as running:
        yield running
