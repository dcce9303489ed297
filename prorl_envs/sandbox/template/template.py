"""Host side of template processes, which are started once and forked for each tool server.

An interpreter per sandbox takes 100 ms and 15 MB; a fork of a process that has imported everything takes 2 ms
and 1 MB, and needs no files of the sandbox's image.
"""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass

from prorl_envs.sandbox.template.process import TemplateProcess, Wrapper

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateSpec:
    """Preparation of a template before it forks.

    Args:
        entries: `package.module:function`s that its forks may run, and no others; it imports their modules.
        preload: further modules to import, or `module:function`s to call once, in order.
        wrapper: another program that runs it; None starts it directly.
    """

    entries: tuple[str, ...]
    preload: tuple[str, ...] = ()
    wrapper: Wrapper | None = None


#: Templates of a node, by their name in `Sandbox.spawn`. Entries are text: this package imports no tools.
TEMPLATES: Mapping[str, TemplateSpec] = {
    "base": TemplateSpec(
        entries=(
            "prorl_envs.tools.server.server:serve",
            "prorl_envs.tools.server.interactive:serve",
            "prorl_envs.tools.server.transfer:serve",
        ),
        preload=("prorl_envs.tools.server.server:rehearse",),
    ),
    "ipython": TemplateSpec(
        entries=("prorl_envs.tools.server.server:serve",),
        preload=("prorl_envs.tools.server.python_kernel:prepare",),
    ),
}


class Template:
    """Template process, started at first use and again whenever it is found dead.

    Args:
        name: name of the template in messages.
        spec: its preparation.
        nice: minimum nice value of the template and its forks.
        filtered: whether the system calls of all its forks are filtered from the start.
    """

    def __init__(self, name: str, spec: TemplateSpec, *, nice: int, filtered: bool = False) -> None:
        self.name = name
        self.spec = spec
        self._nice = nice
        self._filtered = filtered
        self._starting = asyncio.Lock()
        self._process: TemplateProcess | None = None

    @property
    def pid(self) -> int | None:
        """Pid of the running process, for operators; None if none was started."""
        return None if self._process is None else self._process.pid

    @property
    def inner_pid(self) -> int | None:
        """Pid of the template itself, not of a program that runs it; None if it is not ready."""
        return None if self._process is None else self._process.inner_pid

    async def start(self) -> TemplateProcess:
        """Return the running process; start it unless it runs.

        Raises:
            SandboxError: with the template's own message.
        """
        async with self._starting:
            if self._process is not None and not self._process.alive:
                logger.warning("template %s died and is started again", self.name)
                dead, self._process = self._process, None
                await asyncio.shield(dead.aclose())
            if self._process is None:
                self._process = await self._start()
            return self._process

    async def aclose(self) -> None:
        """Stop the process. Its forks stop with it. Idempotent."""
        async with self._starting:
            process, self._process = self._process, None
            if process is not None:
                await asyncio.shield(process.aclose())

    async def _start(self) -> TemplateProcess:
        process = TemplateProcess(self.name, self._nice, self.spec.wrapper, filtered=self._filtered)
        try:
            await process.prepare(self.spec.entries, self.spec.preload)
        except BaseException:
            await asyncio.shield(process.aclose())
            raise
        return process
