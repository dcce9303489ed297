"""This machine's shared resources: one driver, its templates, a cache directory."""

import asyncio
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Self

from prorl_envs.env.search import SearchBackend, SearchSettings
from prorl_envs.env.search_index import IndexSearch
from prorl_envs.env.web_search import WebSearch
from prorl_envs.images.builder import ImageBuilder
from prorl_envs.images.store import ImageStore
from prorl_envs.sandbox.base import Driver, Sandbox, SandboxSpec
from prorl_envs.sandbox.choice import choose_driver, make_driver
from prorl_envs.sandbox.pressure import memory_is_short
from prorl_envs.tools.pool import WarmPool
from prorl_envs.tools.starts import Starts
from prorl_envs.tools.workplace import Workplace


@dataclass(frozen=True, slots=True)
class NodeUse:
    """What a node does at one moment, and what it has done.

    Args:
        open: sandboxes that are not closed, those that stand ready included.
        warm: of these, those that stand ready.
        given: sandboxes that were asked for and given out with their tools.
        seconds: from asking to having, of all of them.
        from_pool: of these, those that stood ready.
        failed: those that could not be had.
        starting: sandboxes that start now, and `waiting`: those that wait for their turn to.
        starts_limit: most that may start at once; infinite where nothing speaks against more.
        slow, short: how often that bound was lowered: for slow starts, and for little memory.
    """

    open: int
    warm: int
    given: int
    seconds: float
    from_pool: int
    failed: int
    starting: int = 0
    waiting: int = 0
    starts_limit: float = math.inf
    slow: int = 0
    short: int = 0


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes of memory that count towards the limits of sandboxes, by their ids, of those that can be told.

    Args:
        busy: of those that are in use; `warm`: of those that stand ready.
    """

    busy: Mapping[str, int] = field(default_factory=dict)
    warm: Mapping[str, int] = field(default_factory=dict)


class Node:
    """Starts sandboxes and equips them with tools.

    Args:
        driver: the sandbox driver of this machine. The node closes it.
        cache_dir: node-local directory for built trees and environments; survives the process.
        warm: most sandboxes that stand ready before they are asked for; see `WarmPool`.
        search: what search tools ask; None leaves it to the family.
        pace: start fewer sandboxes at once while they start slowly or memory is short; see `Starts`.
        images: makes what pulls and builds images, given whom to tell of its progress; None keeps them in
            the cache directory.
    """

    def __init__(
        self,
        driver: Driver,
        cache_dir: Path,
        *,
        warm: int = 0,
        search: SearchSettings | None = None,
        pace: bool = True,
        images: Callable[[Callable[[str], None]], ImageBuilder] | None = None,
    ) -> None:
        self.driver = driver
        self._images = images
        self._search = search or SearchSettings()
        self._backend: SearchBackend | None = None
        self.cache_dir = cache_dir
        self._starts = Starts(memory_is_short) if pace else None
        self._pool = WarmPool(driver, limit=warm, starts=self._starts)
        self._given = self._failed = 0
        self._seconds = 0.0

    @classmethod
    def local(cls, *, cache_dir: Path | None = None) -> Self:
        """This machine with its default driver: the one `$PRORL_DRIVER` names, else what works here.

        Call it in the event loop that will use it. Blocks for some milliseconds.

        Args:
            cache_dir: None chooses `$PRORL_CACHE_DIR`, else `prorl-envs` in the user's cache directory.

        Raises:
            SandboxError: the machine cannot run sandboxes.
        """
        search = SearchSettings.from_environ(os.environ)
        return cls(make_driver(choose_driver()), cache_dir or default_cache_dir(), search=search)

    async def sandbox(self, spec: SandboxSpec) -> Sandbox:
        """Start a sandbox. The caller closes it."""
        return await self.driver.start(spec)

    async def workplace(self, spec: SandboxSpec, *, python: bool = False) -> Workplace:
        """A sandbox with its tools. The caller closes it."""
        asked = time.monotonic()
        try:
            place = await self._pool.take(spec, python=python)
        except Exception:
            self._failed += 1
            raise
        self._given += 1
        self._seconds += time.monotonic() - asked
        return place

    def expect(self, spec: SandboxSpec) -> None:
        """Such a workplace will be asked for soon: have it ready, where there is room and time."""
        self._pool.expect(spec)

    def expect_no_more(self, spec: SandboxSpec) -> None:
        """Who was expected does not come."""
        self._pool.expect_no_more(spec)

    def searching(self, sample: Path) -> SearchBackend:
        """What search tools ask; the same for all episodes.

        Args:
            sample: folder of texts that is searched where the settings name none.

        Raises:
            InputError: the settings name no back end, or not what it needs.
        """
        if self._backend is None:
            if self._search.backend == "index":
                self._backend = IndexSearch(self._search.corpus or sample, self.cache_dir)
            else:
                self._backend = WebSearch(self._search)
        return self._backend

    def images(self, progress: Callable[[str], None] = lambda line: None) -> ImageBuilder:
        """What pulls and builds images.

        Args:
            progress: called with a short line as the work goes on.
        """
        if self._images is not None:
            return self._images(progress)
        return ImageBuilder(ImageStore(self.cache_dir / "images"), progress=progress)

    @property
    def use(self) -> NodeUse:
        """What it does now, and what it has done, for operators."""
        use = NodeUse(
            open=len(self.driver.sandboxes),
            warm=self._pool.ready,
            given=self._given,
            seconds=self._seconds,
            from_pool=self._pool.hits,
            failed=self._failed,
        )
        if self._starts is None:
            return use
        starts, pace = self._starts, self._starts.pace
        return replace(
            use,
            starting=starts.running,
            waiting=starts.waiting,
            starts_limit=pace.window.limit,
            slow=pace.slow,
            short=pace.short,
        )

    async def memory(self) -> MemoryUse:
        """What its sandboxes hold now, measured in a thread: some tenths of a millisecond each."""
        sandboxes, warm = tuple(self.driver.sandboxes), self._pool.ready_sandboxes
        held = await asyncio.to_thread(lambda: {one.id: one.memory() for one in sandboxes})
        found = {name: size for name, size in held.items() if size is not None}
        return MemoryUse(
            busy={name: size for name, size in found.items() if name not in warm},
            warm={name: size for name, size in found.items() if name in warm},
        )

    async def aclose(self) -> None:
        await self._pool.aclose()
        await self.driver.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()


def default_cache_dir() -> Path:
    """`$PRORL_CACHE_DIR`, else `prorl-envs` in the user's cache directory."""
    if chosen := os.environ.get("PRORL_CACHE_DIR"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "prorl-envs"
