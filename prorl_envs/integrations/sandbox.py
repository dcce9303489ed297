"""Sandboxes for frameworks. Those of a process share a node, in a thread with its own event loop.

The node opens with the first sandbox. It closes when the last sandbox has stopped and the event loop of the
framework ends, and at the latest with the process.
"""

import asyncio
import os
import tempfile
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from posixpath import join, normpath
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

from prorl_envs.app.compose import node
from prorl_envs.config import load_settings
from prorl_envs.env.node import Node
from prorl_envs.env.runner import Runner
from prorl_envs.errors import expand_user
from prorl_envs.images.threads import in_thread
from prorl_envs.nemo.images import image_source
from prorl_envs.sandbox.base import Network, SandboxSpec
from prorl_envs.sandbox.drivers.base import NodeDriver
from prorl_envs.sandbox.filesystem.layered import is_layered, read_layered
from prorl_envs.tools.pool.sandbox_session import SandboxSession
from prorl_envs.tools.protocol.messages import CONTENT_LIMIT
from prorl_envs.tools.types import Completed

#: Seconds of a command without a timeout, and of a transfer.
FOREVER_S, TRANSFER_S = 1e9, 3600.0
#: Write a file in place, as `open(path, "w")` does; the exit status is the number of the error.
_WRITE = (
    'mkdir -p "${1%/*}/" || exit; [ ! -d "$1" ] || exit 21; [ ! -e "$1" -o -w "$1" ] || exit 13; cat >"$1"'
)


def _node() -> AbstractAsyncContextManager[Node]:
    return node(load_settings(environ=os.environ))


_runner, _lock, _users = Runner(_node), Lock(), 0


def _count(change: int) -> None:
    global _users
    with _lock:
        _users += change
        _runner.start() if _users else _runner.close()


async def _until_loop_ends() -> AsyncGenerator[None]:
    await in_thread(_count, 1)
    try:
        yield  # a loop closes its generators when it ends
    finally:
        await in_thread(_count, -1)


_loops: WeakKeyDictionary[asyncio.AbstractEventLoop, AsyncGenerator[None]] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class FrameworkSandbox:
    """Sandbox whose processes are all root of the image. Its coroutines run by `in_node` or `wait_for`.

    Args:
        session: the sandbox and its tools.
        workdir: directory from which relative paths start.
    """

    session: SandboxSession
    workdir: str

    def path(self, path: str | None) -> str:
        return normpath(join(self.workdir, path or ""))

    async def run(
        self, argv: Sequence[str], *, cwd: str | None = None, timeout_s: float | None = None, **more: Any
    ) -> Completed:
        """Run a fresh process, whose background processes continue; more arguments as `Toolbox.run`."""
        options = {"apart": True, "background": True, "output_limit": 16 << 20, **more}
        place, limit_s = self.path(cwd), timeout_s or FOREVER_S
        done = await self.session.tools.run(argv, cwd=place, timeout_s=limit_s, **options)
        status = done.exit_code
        return done if status is None or status >= 0 else replace(done, exit_code=128 - status)

    async def write(self, path: str, data: bytes) -> None:
        """Write a file in place, and create missing directories. Raises OSError as a local write would."""
        if len(data) > CONTENT_LIMIT // 2:
            with tempfile.NamedTemporaryFile() as file:
                await in_thread(Path(file.name).write_bytes, data)
                await self.session.tools.upload(Path(file.name), self.path(path), timeout_s=TRANSFER_S)
            return
        done = await self.run(["sh", "-c", _WRITE, "sh", self.path(path)], cwd="/", stdin=data)
        if status := done.exit_code:
            raise OSError(status, done.errors.decode(errors="replace") or os.strerror(status), path)

    async def read(self, path: str, limit: int) -> bytes:
        """Return the first `limit` bytes of a file. Raises OSError as a local read would."""
        data = await self.session.tools.read(self.path(path), limit=min(limit, CONTENT_LIMIT))
        if limit <= CONTENT_LIMIT or len(data) < CONTENT_LIMIT:
            return data
        with tempfile.TemporaryDirectory() as folder:
            await self.session.tools.download(self.path(path), Path(folder, "file"), timeout_s=TRANSFER_S)
            return (await in_thread(Path(folder, "file").read_bytes))[:limit]


def wait_for[T](work: Coroutine[Any, Any, T]) -> T:
    """Run the work of a sandbox, for a caller without an event loop."""
    return _runner.run(lambda _: work)


async def in_node[T](work: Coroutine[Any, Any, T]) -> T:
    """Run the work of a sandbox, for a caller in an event loop of asyncio."""
    return await _runner.run_from_loop(lambda _: work)


async def start(
    image: str | Path | None,
    *,
    workdir: str | None = None,
    env: Mapping[str, str] | None = None,
    network: Network | None = None,
    **limits: Any,
) -> FrameworkSandbox:
    """Start a sandbox; the caller stops it.

    Args:
        image: path of a Dockerfile, a root file system, a SIF or a `.layers.json` file; or a name such as
            `python:3.12-slim`. None and `host` are the host's own system, read-only.
        workdir: working directory, which is created; None is the image's own, or `/workspace`.
        limits: limits of `SandboxLimits`; those of this node apply if they are lower.

    Raises:
        InputError, SandboxError, ToolError: the image cannot be built or pulled, or the sandbox not started.
    """
    if (loop := asyncio.get_running_loop()) not in _loops:
        _loops[loop] = _until_loop_ends()
        await anext(_loops[loop])
    await in_thread(_count, 1)
    spec = SandboxSpec(workdir=workdir or "", env=env or {}, network=network or Network(), uid=0)
    try:
        return await in_node(_open(str(image or "host"), spec, {k: v for k, v in limits.items() if v}))
    except BaseException:
        await in_thread(_count, -1)
        raise


async def stop(box: FrameworkSandbox) -> None:
    """Kill the processes of a sandbox, and delete its files."""
    try:
        await in_node(box.session.aclose())
    finally:
        await in_thread(_count, -1)


async def _open(image: str, spec: SandboxSpec, limits: Mapping[str, Any]) -> FrameworkSandbox:
    opened, path = _runner.node, await _path(_runner.node, image)
    assert isinstance(opened.driver, NodeDriver)
    workdir = spec.workdir
    if path is not None and is_layered(path):
        workdir = workdir or (await in_thread(read_layered, path)).config.workdir or "/"
    workdir = join("/", workdir or "workspace")
    # Nobody is root of a SIF: its files belong to other users.
    is_root = path is not None and (is_layered(path) or await in_thread(path.is_dir))
    lower = {name: min(value, getattr(opened.limits, name) or value) for name, value in limits.items()}
    spec = replace(
        spec,
        image=path,
        workdir=workdir if is_root or path is None else "/workspace",
        env={**(await opened.driver.image_env(path) if path else {}), **spec.env},
        emulate_root=is_root,
        limits=replace(opened.limits, **lower),
    )
    box = FrameworkSandbox(await opened.open_session(spec), workdir)
    if workdir != spec.workdir:
        await box.run(["mkdir", "-p", "--", workdir], cwd="/")
    return box


async def _path(opened: Node, image: str) -> Path | None:
    path = expand_user(image)
    if is_layered(path):
        return path
    if "dockerfile" in path.name.lower() and await in_thread(path.is_file):
        return await opened.dockerfiles().build(path.parent, path)
    return await opened.images().resolve(image_source(image, {}))
