"""What promises are tried in: a driver, sandboxes shared by those who do no harm, and secrets on the host."""

import asyncio
import secrets
import sys
import tempfile
from collections.abc import AsyncIterator, Iterable, Mapping, Set
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from prorl_envs.conformance.box import Box
from prorl_envs.conformance.host import MARK, Planted, eventually, marked, planted, shared_namespaces, showing
from prorl_envs.conformance.promise import IMAGE, NO_IMAGE, PYTHON, SESSION, Broken, Promise, expect
from prorl_envs.conformance.subject import Subject
from prorl_envs.errors import SandboxError, ToolError
from prorl_envs.sandbox.base import Driver, Sandbox, SandboxSpec
from prorl_envs.sandbox.files import node_local_base, remove_tree
from prorl_envs.sandbox.runtime import python_runtime
from prorl_envs.tools.client import Toolbox
from prorl_envs.tools.link import ToolLimits

#: Short, for the promises about what comes after an ignored interrupt.
LIMITS = ToolLimits(grace_s=0.3)
_LONG_S = 600


class World:
    """Everything a promise may use. Made by `open_world`.

    Args:
        path: directory on the host, of this run alone and invisible inside.
    """

    def __init__(self, subject: Subject, path: Path, planted: Planted, driver: Driver) -> None:
        self.subject = subject
        self.path = path
        self.planted = planted
        self.driver = driver
        self.box: Box
        self.python_box: Box
        #: Namespaces that processes inside share with this one.
        self.shared: list[str] = []
        self._missing: dict[str, str] = {}

    def lacks(self, promise: Promise) -> str:
        """Why a promise cannot be tried here; empty where it can."""
        if reason := promise.exempt.get(self.subject.driver):
            return reason
        return next((reason for need in promise.needs if (reason := self._missing.get(need))), "")

    @property
    def walls(self) -> bool:
        """Whether what a trial destroys inside would be the sandbox's alone."""
        return not {"mnt", "pid", "net", "ipc"} & set(self.shared)

    def spec(self, *, python: bool = False, **fields: Any) -> SandboxSpec:
        """A spec of the image under test, and with a working Python where that is asked for."""
        if python:
            mounts, masks, env = python_runtime()
            fields["mounts"] = (*fields.get("mounts", ()), *mounts)
            fields["masks"] = (*fields.get("masks", ()), *masks)
            fields["env"] = {**env, **fields.get("env", {})}
        return SandboxSpec(image=self.subject.image, **fields)

    @asynccontextmanager
    async def fresh(
        self, *, python: bool = False, driver: Driver | None = None, **fields: Any
    ) -> AsyncIterator[Box]:
        """A sandbox of one's own, with tools; the fields are those of `SandboxSpec`."""
        sandbox = await (driver or self.driver).start(self.spec(python=python, **fields))
        try:
            tools = await Toolbox.open(sandbox, limits=LIMITS)
            try:
                yield Box(sandbox, tools, sys.executable if python else "")
            finally:
                await tools.aclose()
        finally:
            await sandbox.close()

    @asynccontextmanager
    async def shell(self) -> AsyncIterator[Box]:
        """A toolbox of one's own on the shared sandbox."""
        tools = await Toolbox.open(self.box.sandbox, limits=LIMITS)
        try:
            yield Box(self.box.sandbox, tools)
        finally:
            await tools.aclose()

    @asynccontextmanager
    async def session(self) -> AsyncIterator[Toolbox]:
        """A toolbox with a Python session of its own, on a shared sandbox."""
        tools = await Toolbox.open(self.python_box.sandbox, python=True, limits=LIMITS)
        try:
            yield tools
        finally:
            await tools.aclose()

    @asynccontextmanager
    async def own_driver(self) -> AsyncIterator[tuple[Driver, Path]]:
        """A driver of one's own and its directory; after it, nothing may be left of either.

        Raises:
            Broken: something is.
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
        left = [str(path) for path in root.rglob("*") if not path.is_dir()]
        expect(not left, f"files are left of a closed driver: {left[:5]}")

    @asynccontextmanager
    async def lingering(self, box: Box, script: str, *, count: int = 1) -> AsyncIterator[str]:
        """A script that runs in `box` meanwhile, found on the host by the mark that is yielded.

        Args:
            count: processes of it to wait for.

        Raises:
            Broken: so many did not come.
        """
        mark = secrets.token_hex(8)
        argv = ["/bin/sh", "-c", script]
        running = asyncio.create_task(box.tools.run(argv, env={MARK: mark}, timeout_s=_LONG_S))
        seen = 0

        def come() -> bool:
            nonlocal seen
            # One look is enough: a process that begins another program has no environment for a moment.
            seen = len(marked(mark))
            return seen >= count or running.done()

        try:
            await eventually(come)
            expect(seen >= count, f"the host sees {seen} of {count} processes")
            yield mark
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def tools(self, sandbox: Sandbox) -> Toolbox:
        """A toolbox on a sandbox of one's own; the caller closes both."""
        return await Toolbox.open(sandbox, limits=LIMITS)

    @asynccontextmanager
    async def tools_on(self, box: Box) -> AsyncIterator[Toolbox]:
        """Another toolbox on a box's sandbox."""
        tools = await self.tools(box.sandbox)
        try:
            yield tools
        finally:
            await tools.aclose()

    async def appears(self, path: Path) -> None:
        """Wait for a file that a sandbox makes. Raises Broken where it does not."""
        expect(await eventually(path.exists), f"{path.name} did not appear")

    async def look(self, stack: AsyncExitStack, needs: Set[str]) -> None:
        """Start the shared sandboxes and find out what of `needs` there is in them."""
        self.box = await stack.enter_async_context(self.fresh())
        self.python_box = self.box
        image = self.subject.image
        self._missing = (
            {NO_IMAGE: "is about the host's own system"} if image else {IMAGE: "no image was given"}
        )
        for name in needs - {IMAGE, NO_IMAGE, PYTHON, SESSION}:
            if (await self.box.run(f"command -v {name}")).exit_code != 0:
                self._missing[name] = f"the image has no {name}"
        async with self.lingering(self.box, "while :; do :; done") as mark:
            self.shared = shared_namespaces(marked(mark)[0])
        if needs & {PYTHON, SESSION}:
            self._missing |= await self._look_for_python(stack)

    async def _look_for_python(self, stack: AsyncExitStack) -> Mapping[str, str]:
        try:
            box = await stack.enter_async_context(self.fresh(python=True))
            await box.nothing_in_python("import socket")
            self.python_box = box
            async with self.session() as tools:
                await tools.python("1 + 1", timeout_s=30)
        except (Broken, SandboxError, ToolError, OSError) as error:
            reason = f"Python does not work in this image: {error}"
            return {SESSION: reason} if self.python_box is not self.box else {PYTHON: reason, SESSION: reason}
        return {}


@asynccontextmanager
async def open_world(subject: Subject, promises: Iterable[Promise]) -> AsyncIterator[World]:
    """Set up what `promises` need; everything is removed on leaving.

    Raises:
        SandboxError: the driver cannot start a sandbox at all.
    """
    needs = {need for promise in promises for need in promise.needs}
    path = Path(tempfile.mkdtemp(prefix="prc-", dir=node_local_base()))
    try:
        with planted() as plants:
            (path / "shared").mkdir()
            world = World(subject, path, plants, subject.make(path / "shared"))
            try:
                async with AsyncExitStack() as stack:
                    await world.look(stack, needs)
                    yield world
            finally:
                await world.driver.aclose()
    finally:
        await asyncio.to_thread(remove_tree, path)
