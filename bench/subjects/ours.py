"""Our own sandboxes and tools.

bash            a persistent shell in a sandbox
process         a new `bash -c` per command in the same sandbox
sif IMAGE       a persistent shell in a sandbox with the system of a SIF; IMAGE stays mounted between
sandboxes pool            a persistent shell in a sandbox of a warm pool
apptainer       a persistent shell in a sandbox inside Apptainer
apptainer-sif IMAGE   as `apptainer`, with the system of a SIF
ipython         a Python session forked from a template
kernel          a Jupyter kernel in the sandbox
"""

import asyncio
import importlib.metadata
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from bench.subjects.protocol import Session, bash_task, cell_task, serve
from prorl_envs.sandbox.base import SandboxSpec
from prorl_envs.sandbox.drivers.apptainer import ApptainerDriver
from prorl_envs.sandbox.drivers.bubblewrap import BubblewrapDriver, BubblewrapSandbox
from prorl_envs.sandbox.filesystem.python_runtime import python_runtime
from prorl_envs.tools.client.python import PythonEngine
from prorl_envs.tools.client.toolbox import Toolbox
from prorl_envs.tools.pool.sandbox_session import SandboxSession
from prorl_envs.tools.pool.warm_pool import WarmPool

TIMEOUT_S = 60.0
ENGINES = {"ipython": PythonEngine.FORKED, "kernel": PythonEngine.KERNEL}


class Box:
    """One sandbox with its tools."""

    def __init__(self, sandbox: BubblewrapSandbox, tools: Toolbox, kind: str) -> None:
        self.sandbox = sandbox
        self._tools = tools
        self._kind = kind

    async def act(self, text: str) -> str:
        if self._kind in ENGINES:
            return (await self._tools.python(text, timeout_s=TIMEOUT_S)).text
        if self._kind == "process":
            return (await self._tools.run(["bash", "-c", text], timeout_s=TIMEOUT_S)).output.decode()
        return (await self._tools.bash(text, timeout_s=TIMEOUT_S)).text

    async def close(self) -> None:
        await self._tools.aclose()
        await self.sandbox.close()


class Pooled:
    """Session in a sandbox of the warm pool. `close` waits until the pool has a new sandbox, so that its
    start does not overlap the next measurement."""

    def __init__(self, pool: WarmPool, session: SandboxSession) -> None:
        self._pool = pool
        self._session = session

    async def act(self, text: str) -> str:
        return (await self._session.tools.bash(text, timeout_s=TIMEOUT_S)).text

    async def close(self) -> None:
        await self._session.aclose()
        await fill(self._pool)


async def fill(pool: WarmPool) -> None:
    """Make the pool start sandboxes in advance, by concurrent requests, until one is ready."""
    await pool.settled()
    while not pool.ready:
        sessions = await asyncio.gather(*(pool.take(SandboxSpec()) for _ in range(3)))
        await asyncio.gather(*(session.aclose() for session in sessions))
        await pool.settled()


class Ours:
    blocking = False

    def __init__(self, kind: str, image: Path | None = None) -> None:
        self._kind = kind
        self.task = cell_task if kind in ENGINES else bash_task
        self._spec = SandboxSpec(image=image)
        self._boxes: list[Box] = []
        self._driver: BubblewrapDriver | None = None
        self._pool: WarmPool | None = None

    async def prepare(self) -> str:
        if self._kind in ENGINES:
            mounts, masks, env = python_runtime()
            self._spec = SandboxSpec(mounts=mounts, masks=masks, env=env)
        self._driver = ApptainerDriver() if self._kind.startswith("apptainer") else BubblewrapDriver()
        await self._driver.warm("base", *(["ipython"] if self._kind == "ipython" else []))
        if self._kind == "pool":
            self._pool = WarmPool(self._driver, limit=4)
            await fill(self._pool)
        return f"prorl-envs {importlib.metadata.version('prorl-envs')}"

    async def open(self) -> Session:
        assert self._driver is not None
        if self._pool is not None:
            return Pooled(self._pool, await self._pool.take(self._spec))
        sandbox = await self._driver.start(self._spec)
        tools = await Toolbox.open(sandbox, python=ENGINES.get(self._kind, PythonEngine.NONE))
        box = Box(sandbox, tools, self._kind)
        self._boxes.append(box)
        return box

    def pids(self) -> list[int]:
        """Return the sandboxes' bubblewrap processes, tool servers and inner processes, without templates."""
        found: set[int] = set()
        namespaces = set()
        for box in self._boxes:
            if box.sandbox.alive:
                found |= {box.sandbox.pid, *box.sandbox.tool_servers}
                found.add(_parent(box.sandbox.pid))  # bubblewrap's own process
                namespaces.add(os.readlink(f"/proc/{box.sandbox.pid}/ns/pid"))  # noqa: PTH115
        return sorted(found | {pid for pid, namespace in _namespaces() if namespace in namespaces})

    async def close(self) -> None:
        if self._pool is not None:
            await self._pool.aclose()
        if self._driver is not None:
            await self._driver.aclose()


def _parent(pid: int) -> int:
    """Return the parent of a process."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1])


def _namespaces() -> Iterator[tuple[int, str]]:
    """Yield each readable process with its pid namespace."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                yield int(entry.name), str((entry / "ns/pid").readlink())
            except OSError:  # the process has exited, or belongs to another user
                continue


if __name__ == "__main__":
    serve(Ours(sys.argv[1], *(Path(path) for path in sys.argv[2:])))
