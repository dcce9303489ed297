"""Service in its own process, for tests that kill the service."""

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import prorl_envs
from tests.support.leaks import OpenResources

#: `prorl-envs serve --llm MODEL --port PORT --store FILE`, with the built-in tokenizer.
SERVE = """
import asyncio, sys
from pathlib import Path
from prorl_envs.app.compose import Model
from prorl_envs.cli.commands.serve import serve
from prorl_envs.config import ServerSettings, ServiceSettings, Settings
from prorl_envs.testing.tokenizer import builtin_renderer

model, port, store, cache = sys.argv[1:]
settings = Settings(
    service=ServiceSettings(init=2, run=4, eval=2, drain_s=0, store=Path(store)),
    server=ServerSettings(port=int(port)),
    cache_dir=Path(cache),
)

async def connect(earlier):
    return Model(servers=[model], renderer=builtin_renderer())

asyncio.run(serve(settings, connect))
"""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def service(model: str, port: int, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a service in its own process. The caller stops the service; the end of the block waits for its
    exit."""
    arguments = [model, str(port), str(folder / "store.db"), str(folder / "cache")]
    environ = {**os.environ, "PYTHONPATH": str(Path(prorl_envs.__file__).parents[1])}
    with (
        (folder / "service.log").open("ab") as log,
        subprocess.Popen([sys.executable, "-c", SERVE, *arguments], env=environ, stderr=log) as process,
    ):
        try:
            yield process
        except BaseException:
            process.kill()
            raise


async def sandboxes_gone(run_dir: Path, before: Collection[object]) -> None:
    """Wait until all processes that are not in `before` have ended. The test's own timeout limits the
    wait."""
    while OpenResources.now(run_dir).processes.keys() - before:  # noqa: ASYNC110 - other processes have no event
        await asyncio.sleep(0.02)
