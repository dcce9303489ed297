"""Services and model servers in their own processes, to be killed."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import prorl_envs

#: `prorl-envs serve --llm MODEL --port PORT --store STORE`, with the built-in tokenizer and small pools.
SERVE = """
import asyncio, sys
from prorl_envs.app.compose import Model
from prorl_envs.cli.commands.serve import serve as serving
from prorl_envs.config import SandboxSection, ServerSettings, ServiceSettings, Settings
from prorl_envs.testing.tokenizer import builtin_renderer

def serve(model, port, store, cache):
    settings = Settings(
        service=ServiceSettings(init=2, run=4, eval=2, drain_s=0, store=store),
        server=ServerSettings(port=int(port)),
        cache_dir=cache,
        sandbox=SandboxSection(warm_pool_size=0),
    )

    async def connect(earlier):
        return Model(servers=[model], renderer=builtin_renderer())

    asyncio.run(serving(settings, connect))
"""
_NOW = "\nserve(*sys.argv[1:])"
#: Forks a service for each line of arguments, prints its pid, and finally its status.
_NURSERY = """
import json, os
for line in sys.stdin.buffer:
    pid = os.fork()
    if pid == 0:
        os.close(0)
        serve(*json.loads(line))
        os._exit(0)
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""
#: A scripted model server that knows the suite's task.
MODEL = """
import asyncio, sys
from faults.world import BOOK
from tests.support.timed_server import TimedServer

async def main():
    async with TimedServer(BOOK, port=int(sys.argv[1])):
        await asyncio.Event().wait()

asyncio.run(main())
"""
#: Runs a command with its own small disk at a folder, in a private mount namespace: needs no root.
SMALL_DISK = (
    *("unshare", "--user", "--map-root-user", "--mount", "sh", "-c"),
    'mount -t tmpfs -o "size=$2" tmpfs "$1" && shift 2 && exec "$@"',
    "sh",
)


def free_port() -> int:
    """Return a port on which no process listens now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Service:
    """Service in its own process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def kill(self) -> None:
        """Kill it at once, as `kill -9`."""
        self._send(signal.SIGKILL)

    def terminate(self) -> None:
        """Ask it to shut down."""
        self._send(signal.SIGTERM)

    def _send(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)


class Nursery:
    """Starter of services, one at a time, forked from a process with all imports, which saves CPU time.

    Args:
        folder: for their log, caches and stores.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._log = (folder / "service.log").open("ab")
        self._process = subprocess.Popen(
            [sys.executable, "-c", SERVE + _NURSERY],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=_environ(folder),
        )

    @contextmanager
    def service(self, model: str, port: int) -> Iterator[Service]:
        """Run a service for the duration of the block; kill it if the block raises.

        Args:
            model: URL of its model server; `port`: its own.
        """
        assert self._process.stdin is not None
        arguments = [model, str(port), str(self._folder / "store.db"), str(self._folder / "cache")]
        self._process.stdin.write(json.dumps(arguments).encode() + b"\n")
        self._process.stdin.flush()
        service = Service(self._answer())
        try:
            yield service
        except BaseException:
            service.kill()
            raise
        finally:
            service.returncode = self._answer()

    def _answer(self) -> int:
        assert self._process.stdout is not None
        return int(self._process.stdout.readline())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._process.communicate()
        self._log.close()


@contextmanager
def service_on_a_small_disk(
    model: str, port: int, folder: Path, disk: Path, size: str
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a service whose store is on a small disk at the folder `disk`, in a private mount namespace."""
    arguments = [SERVE + _NOW, model, str(port), str(disk / "store.db"), str(folder / "cache")]
    command = [*SMALL_DISK, str(disk), size, sys.executable, "-c", *arguments]
    with process(command, folder / "service.log") as started:
        yield started


@contextmanager
def model_server(port: int, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a model server in its own process for the duration of the block."""
    with process([sys.executable, "-c", MODEL, str(port)], log) as started:
        yield started


@contextmanager
def process(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process; kill it if the block raises, else wait for it."""
    environ = _environ(log.parent)
    with log.open("ab") as output, subprocess.Popen(command, env=environ, stderr=output) as started:
        try:
            yield started
        except BaseException:
            started.kill()
            raise


def _environ(run_dir: Path) -> dict[str, str]:
    root = Path(prorl_envs.__file__).parents[1]
    return {**os.environ, "PYTHONPATH": str(root), "PRORL_RUN_DIR": str(run_dir)}
