"""Test context of promises: a driver, sandboxes shared by harmless promises, and secrets on the host."""

import asyncio
import secrets
import sys
import tempfile
from collections.abc import AsyncIterator, Iterable, Set
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prorl_envs.conformance.box import Probe
from prorl_envs.conformance.host import MARK, Planted, eventually, marked, planted, shared_namespaces, showing
from prorl_envs.conformance.promise import (
    EMULATED_ROOT,
    IMAGE,
    KERNEL,
    NO_IMAGE,
    NO_PROGRAMS,
    ORDINARY,
    PYTHON,
    SESSION,
    Promise,
    PromiseBroken,
    expect,
)
from prorl_envs.conformance.subject import Subject
from prorl_envs.errors import SandboxError, ToolError
from prorl_envs.sandbox.base import Driver, Sandbox, SandboxSpec
from prorl_envs.sandbox.filesystem.directories import node_local_base, remove_tree
from prorl_envs.sandbox.filesystem.python_runtime import python_runtime
from prorl_envs.tools.client.python import PythonEngine
from prorl_envs.tools.client.toolbox import Toolbox

_LONG_S = 600


@dataclass(frozen=True, slots=True)
class Lack:
    """Reason why a promise is not tested.

    Args:
        reason: description of the reason.
        is_ours: True if this package is the cause, not the image or the driver. The run then fails.
    """

    reason: str
    is_ours: bool = False


class PromiseContext:
    """Everything that the test of a promise may use. Created by `open_world`.

    Args:
        path: directory on the host, private to this run and invisible inside.
    """

    def __init__(self, subject: Subject, path: Path, planted: Planted, driver: Driver) -> None:
        self.subject = subject
        self.path = path
        self.planted = planted
        self.driver = driver
        self.box: Probe
        self.python_box: Probe
        #: Namespaces that processes inside share with this one.
        self.shared: list[str] = []
        self._missing: dict[str, Lack] = {}

    def lacks(self, promise: Promise) -> Lack | None:
        """Return the reason why a promise cannot be tested here; None if it can."""
        if reason := promise.exempt.get(self.subject.driver):
            return Lack(reason)
        return next((lack for need in promise.needs if (lack := self._missing.get(need))), None)

    @property
    def is_isolated(self) -> bool:
        """True if damage by a test stays within the sandbox."""
        return not {"mnt", "pid", "net", "ipc"} & set(self.shared)

    def spec(self, *, python: bool = False, **fields: Any) -> SandboxSpec:
        """Return a spec of the image under test, with a working Python if requested."""
        if python:
            mounts, masks, env = python_runtime()
            fields["mounts"] = (*fields.get("mounts", ()), *mounts)
            fields["masks"] = (*fields.get("masks", ()), *masks)
            fields["env"] = {**env, **fields.get("env", {})}
        if self.subject.emulate_root:
            fields |= {"emulate_root": True, "uid": 0}
        return SandboxSpec(image=self.subject.image, **fields)

    @asynccontextmanager
    async def fresh(
        self, *, python: bool = False, driver: Driver | None = None, **fields: Any
    ) -> AsyncIterator[Probe]:
        """Start a sandbox with tools for the caller alone. `fields` are those of `SandboxSpec`."""
        spec = self.spec(python=python, **fields)
        async with self.started(spec, driver=driver, python=sys.executable if python else "") as box:
            yield box

    @asynccontextmanager
    async def started(
        self,
        spec: SandboxSpec,
        *,
        driver: Driver | None = None,
        python: str = "",
    ) -> AsyncIterator[Probe]:
        """Start a sandbox with tools. `python` is the path of its Python."""
        sandbox = await (driver or self.driver).start(spec)
        try:
            async with self.tools(sandbox) as tools:
                yield Probe(sandbox, tools, python)
        finally:
            await sandbox.close()

    @asynccontextmanager
    async def tools(
        self,
        sandbox: Sandbox,
        *,
        python: PythonEngine = PythonEngine.NONE,
        interpreter: str = "python3",
    ) -> AsyncIterator[Toolbox]:
        """Open a toolbox on a sandbox: see `Toolbox.open`."""
        tools = await Toolbox.open(sandbox, python=python, interpreter=interpreter)
        try:
            yield tools
        finally:
            await tools.aclose()

    @asynccontextmanager
    async def shell(self) -> AsyncIterator[Probe]:
        """Open a toolbox for the caller alone on the shared sandbox."""
        async with self.tools(self.box.sandbox) as tools:
            yield Probe(self.box.sandbox, tools)

    def session(self, engine: PythonEngine = PythonEngine.FORKED) -> AbstractAsyncContextManager[Toolbox]:
        """Open a toolbox with a new Python session on a shared sandbox."""
        box = self.python_box
        return self.tools(box.sandbox, python=engine, interpreter=box.python)

    @asynccontextmanager
    async def own_driver(self) -> AsyncIterator[tuple[Driver, Path]]:
        """Create a driver with its own directory; check that the closed driver leaves nothing.

        Raises:
            PromiseBroken: the closed driver left processes or files.
        """
        root = self.path / secrets.token_hex(4)
        root.mkdir()
        driver = self.subject.make(root)
        try:
            yield driver, root
        finally:
            await driver.aclose()
        gone = await eventually(lambda: not showing(root.name))
        expect(gone, f"processes are left of a closed driver: {showing(root.name)}")
        files = [str(path) for path in root.rglob("*") if not path.is_dir()]
        expect(not files, f"files are left of a closed driver: {files[:5]}")

    @asynccontextmanager
    async def lingering(self, box: Probe, script: str, *, count: int = 1) -> AsyncIterator[str]:
        """Run a script in `box` while the block runs. Yield the mark by which the host finds its processes.

        Args:
            count: number of its processes to wait for.

        Raises:
            PromiseBroken: fewer processes started.
        """
        mark = secrets.token_hex(8)
        argv = ["/bin/sh", "-c", script]
        running = asyncio.create_task(box.tools.run(argv, env={MARK: mark}, timeout_s=_LONG_S))
        seen = 0

        def has_started() -> bool:
            nonlocal seen
            # One match is enough, because a process that executes a program has no environment for a moment.
            seen = len(marked(mark))
            return seen >= count or running.done()

        try:
            await eventually(has_started)
            if seen < count and running.done():
                running.result()  # raises the error of the start
            expect(seen >= count, f"the host sees {seen} of {count} processes")
            yield mark
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def appears(self, path: Path) -> None:
        """Wait for a file that a sandbox creates. Raise PromiseBroken if it does not appear."""
        expect(await eventually(path.exists), f"{path.name} did not appear")

    async def find_missing(self, stack: AsyncExitStack, needs: Set[str]) -> None:
        """Start the shared sandboxes and find out which of `needs` they lack."""
        self.box = await stack.enter_async_context(self.fresh())
        self.python_box = self.box
        image = self.subject.image
        absent = (NO_IMAGE, "is about the host's own system") if image else (IMAGE, "no image was given")
        self._missing = {absent[0]: Lack(absent[1])}
        if self.subject.emulate_root:
            self._missing[ORDINARY] = Lack("an emulated root is not refused this")
        else:
            self._missing[EMULATED_ROOT] = Lack("root is not emulated")
        for name in needs - NO_PROGRAMS:
            if (await self.box.run(f"command -v {name}")).exit_code != 0:
                self._missing[name] = Lack(f"the {'image' if image else 'host'} has no {name}")
        async with self.lingering(self.box, "while :; do :; done") as mark:
            self.shared = shared_namespaces(marked(mark)[0])
        if needs & {PYTHON, SESSION, KERNEL}:
            await self._find_python(stack)

    async def _find_python(self, stack: AsyncExitStack) -> None:
        """Find out whether this interpreter works inside, with sessions and Jupyter kernels.

        The interpreter and its packages are mounted, so it fails only if an image lacks its C library.
        """
        missing, needs = self._missing, (PYTHON, SESSION, KERNEL)
        try:
            box = await stack.enter_async_context(self.fresh(python=True))
            is_there = (await box.run(f"[ -e '{box.python}' ]")).exit_code == 0
            try:
                await box.nothing_in_python("import socket")
            except (PromiseBroken, OSError) as error:
                is_ours = self.subject.image is None or not is_there
                missing |= dict.fromkeys(needs, Lack(f"Python does not run inside: {error}", is_ours=is_ours))
                return
            self.python_box = box
            if (
                await box.tools.run([box.python, "-I", "-c", "import ipykernel"], timeout_s=60)
            ).exit_code != 0:
                lack = Lack("ipykernel cannot be imported inside", is_ours=self.subject.image is None)
                missing[KERNEL] = lack
            async with self.session() as tools:
                await tools.python("1 + 1", timeout_s=30)
        except (SandboxError, ToolError, OSError) as error:
            lack = Lack(f"no Python session can be started: {error}", is_ours=True)
            missing |= dict.fromkeys(needs if self.python_box is self.box else (SESSION, KERNEL), lack)


@asynccontextmanager
async def open_world(subject: Subject, promises: Iterable[Promise]) -> AsyncIterator[PromiseContext]:
    """Set up the context that `promises` need; remove everything on leaving.

    Raises:
        SandboxError: the driver cannot start a sandbox at all.
    """
    needs = {need for promise in promises for need in promise.needs}
    path = Path(tempfile.mkdtemp(prefix="prc-", dir=node_local_base()))
    try:
        with planted() as plants:
            (path / "shared").mkdir()
            world = PromiseContext(subject, path, plants, subject.make(path / "shared"))
            try:
                async with AsyncExitStack() as stack:
                    await world.find_missing(stack, needs)
                    yield world
            finally:
                await world.driver.aclose()
    finally:
        await asyncio.to_thread(remove_tree, path)
