"""Services and model servers in processes of their own, to be killed."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import prorl_envs

#: `prorl-envs serve --llm MODEL --port PORT --store STORE`, with the built-in tokenizer and small pools.
SERVE = """
import asyncio, sys
from prorl_envs.cli.compose import Model
from prorl_envs.cli.serving import serve
from prorl_envs.config import ServerSettings, ServiceSettings, Settings
from prorl_envs.testing.tokenizer import builtin_renderer

model, port, store, cache = sys.argv[1:]
settings = Settings(
    service=ServiceSettings(init=2, run=4, eval=2, drain_s=0, store=store),
    server=ServerSettings(port=int(port)),
    cache_dir=cache,
    warm=0,
)
asyncio.run(serve(settings, Model(servers=[model], renderer=builtin_renderer())))
"""
#: A scripted model server that knows the suite's task.
MODEL = """
import asyncio, sys
from faults.world import BOOK
from prorl_envs.testing.server import ScriptedServer

async def main():
    async with ScriptedServer(BOOK, port=int(sys.argv[1])):
        await asyncio.Event().wait()

asyncio.run(main())
"""
#: Runs a command with a small disk of its own at a folder, seen by nobody else: no root is needed.
SMALL_DISK = (
    *("unshare", "--user", "--map-root-user", "--mount", "sh", "-c"),
    'mount -t tmpfs -o "size=$2" tmpfs "$1" && shift 2 && exec "$@"',
    "sh",
)


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def service(
    model: str, port: int, folder: Path, *, store: str | None = None, before: Sequence[str] = ()
) -> Iterator[subprocess.Popen[bytes]]:
    """A service in a process of its own, until the block ends it; it is killed where an error ends the block.

    Args:
        model: URL of its model server; `port`: its own.
        folder: for its log, and its store where `store` names no other.
        before: a command to run it with.
    """
    where = store or str(folder / "store.db")
    arguments = [SERVE, model, str(port), where, str(folder / "cache")]
    with process([*before, sys.executable, "-c", *arguments], folder / "service.log") as started:
        yield started


@contextmanager
def model_server(port: int, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A model server in a process of its own, until the block ends it."""
    with process([sys.executable, "-c", MODEL, str(port)], log) as started:
        yield started


@contextmanager
def process(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process; it is killed where an error ends the block, else waited for."""
    root = Path(prorl_envs.__file__).parents[1]
    environ = {**os.environ, "PYTHONPATH": str(root), "PRORL_RUN_DIR": str(log.parent)}
    with log.open("ab") as output, subprocess.Popen(command, env=environ, stderr=output) as started:
        try:
            yield started
        except BaseException:
            started.kill()
            raise
