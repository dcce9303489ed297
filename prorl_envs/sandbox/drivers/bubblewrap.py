"""Driver for bubblewrap: sandboxes in namespaces, without root or a daemon."""

import asyncio
import contextlib
import dataclasses
import errno
import itertools
import json
import os
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from prorl_envs.errors import SandboxError
from prorl_envs.sandbox.base import Checkpoint, SandboxSpec
from prorl_envs.sandbox.drivers.isolated import IsolatedDriver, IsolatedSandbox
from prorl_envs.sandbox.drivers.probe import explain, find_bwrap
from prorl_envs.sandbox.filesystem.checkpoint import TakenCheckpoint, copy_mode
from prorl_envs.sandbox.filesystem.directories import make_accessible, remove_tree
from prorl_envs.sandbox.filesystem.host_system import write_etc, write_names
from prorl_envs.sandbox.filesystem.images import ImageUse
from prorl_envs.sandbox.filesystem.layered import LayerTree
from prorl_envs.sandbox.filesystem.mount_plan import (
    HOME,
    SandboxFiles,
    bwrap_arguments,
    default_environment,
    has_own_names,
    mount_options,
    shared_memory_bytes,
)
from prorl_envs.sandbox.filesystem.rootfs import (
    add_names,
    check_owners,
    resolve_targets,
    write_root_upper,
    write_upper,
)
from prorl_envs.sandbox.filesystem.tree_copy import copy_tree
from prorl_envs.sandbox.limits.enforcement import DEFAULT_LIMITS, NodeLimits
from prorl_envs.sandbox.linux.kernel_settings import ROOT_SETTINGS, Setting, namespace_settings
from prorl_envs.sandbox.linux.pidfd import Process, not_in_forks, receive
from prorl_envs.sandbox.template.process import CHECKPOINT, ForkRequest, ToolServerProcess
from prorl_envs.sandbox.template.template import TEMPLATES, Template, TemplateSpec

START_TIMEOUT_S = 30.0
#: Output of the first process once it runs.
READY = b"ready\n"
#: Descriptor on which bubblewrap describes the namespaces that it created (`--info-fd`).
_INFO_FD = 3
#: Bytes to read from it: more than bubblewrap writes.
_INFO_BYTES = 4096


class BubblewrapDriver(IsolatedDriver["BubblewrapSandbox"]):
    """Starts sandboxes with bubblewrap. They stop with this process, even if it is killed.

    Args:
        root: see `NodeDriver`.
        bwrap: the bubblewrap program; None chooses `$PRORL_BWRAP`, the package's or the system's.
        templates, limits: see `NodeDriver`.

    Raises:
        SandboxError: bubblewrap is not installed, or no directory can be created.
    """

    name = "bubblewrap"
    takes_checkpoints = True

    def __init__(
        self,
        root: Path | None = None,
        *,
        bwrap: Path | None = None,
        templates: Mapping[str, TemplateSpec] = TEMPLATES,
        limits: NodeLimits = DEFAULT_LIMITS,
    ) -> None:
        self.program = find_bwrap(bwrap)
        super().__init__(root, templates=templates, limits=limits)
        #: Starts bubblewrap. A fork from this process would stop the event loop until the child's exec: 4 to
        #: 18 ms on a busy machine (docs/decisions/templates.md).
        self.starter = Template("starter", TemplateSpec(entries=()), nice=limits.nice)
        self._etc: dict[int, asyncio.Task[Path]] = {}

    async def warm(self, *names: str) -> None:
        """Start the starter template and the named templates: see `NodeDriver`."""
        await asyncio.gather(self._warm_starter(), super().warm(*names))

    async def _warm_starter(self) -> None:
        await self.starter.start()

    def _template(self, name: str, spec: TemplateSpec) -> Template:
        preloading = dataclasses.replace(spec, preload=(*spec.preload, CHECKPOINT))
        return Template(name, preloading, nice=self.nice, filtered=True)

    async def run(self, options: list[str], streams: int, info: int, layers: Sequence[Path]) -> Process:
        """Run bubblewrap.

        Args:
            options: bubblewrap's options without `--info-fd`.
            streams: descriptor for its standard streams.
            info: descriptor for its `--info-fd`.
            layers: the directories of the sandbox's image, which bubblewrap must be able to open.

        Raises:
            SandboxError: bubblewrap cannot be run.
        """
        starter = await self.starter.start()
        return await starter.spawn(self.command(options), [streams, info])

    def command(self, options: list[str]) -> list[str]:
        """Return the command with which `TemplateProcess.spawn` runs bubblewrap with these options."""
        program = str(self.program)
        return [program, program, "--info-fd", str(_INFO_FD), *options]

    async def _make(self, spec: SandboxSpec) -> "BubblewrapSandbox":
        self.check_network(spec)
        etc = await self._etc_for(spec.uid)
        image = await self.images.acquire(spec.image) if spec.image is not None else None
        sandbox_id, root = self._place()
        trees = {} if spec.checkpoint is None else spec.checkpoint.trees
        frozen = {target: tuple(tree.share() for tree in layers) for target, layers in trees.items()}
        files = SandboxFiles(root, etc, () if image is None else image.layers, frozen)
        return BubblewrapSandbox(sandbox_id, spec, files, self, image)

    async def _release(self) -> None:
        # A task that still writes into the directory would prevent its removal.
        await asyncio.gather(*self._etc.values(), return_exceptions=True)
        await self.starter.aclose()
        await super()._release()

    async def _etc_for(self, uid: int) -> Path:
        """Return the /etc directory for a uid; the first call writes it, or one after a failure."""
        written = self._etc.get(uid)
        if written is None or (written.done() and written.exception() is not None):
            written = self._etc[uid] = asyncio.create_task(asyncio.to_thread(self._write_etc, uid))
        return written.result() if written.done() else await asyncio.shield(written)

    def _write_etc(self, uid: int) -> Path:
        path = self.directory.path / f"etc{uid}"
        remove_tree(path)  # an earlier attempt may have failed
        write_etc(path, uid=uid, home=HOME)
        return path


class BubblewrapSandbox(IsolatedSandbox):
    """A running sandbox. On the host it consists of its first process, which waits, bubblewrap's own process,
    which waits for the first, and one socket. The sandbox stops when that socket closes, even if this service
    is killed.
    """

    def __init__(
        self,
        sandbox_id: str,
        spec: SandboxSpec,
        files: SandboxFiles,
        driver: BubblewrapDriver,
        image: ImageUse | None = None,
    ) -> None:
        super().__init__(sandbox_id, spec, files.root, driver)
        self._driver: BubblewrapDriver = driver
        self._files = files
        self._image = image
        self._lifetime: socket.socket | None = None
        #: Target of `take_layer`, and the error if the move failed.
        self._layer_target: Path | None = None
        self._layer_error: Exception | None = None
        #: No program may enter while a checkpoint is taken: it would keep the former mounts.
        self._entering = asyncio.Lock()
        #: Whether a Python session has got the memory of the spec's checkpoint.
        self._restored = False

    @property
    def socket_directory(self) -> tuple[str, Path]:
        """See `Sandbox.socket_directory`.

        A socket in an overlay can be reached only through the overlay, not through its upper directory. The
        overlay's root directory cannot be replaced by a link.
        """
        if self._spec.emulate_root:
            return "/", Path(f"/proc/{self.pid}/root")
        if self._files.below(self._inside.workdir):
            return "", Path(f"/proc/{self.pid}/root{self._inside.workdir}")
        return super().socket_directory

    async def _launch(self) -> None:
        try:
            self._prepare_files()
        except OSError as error:
            raise SandboxError(f"cannot make a sandbox's directories: {error}") from error
        try:
            await self._start_first()
        except OSError as error:
            raise SandboxError(f"the sandbox did not start: {error}") from error
        if self._spec.default_route:
            with self._network() as netns:
                await (await self._template()).route(netns)
        await self._start_proxy()

    async def _start_first(self) -> None:
        """Run bubblewrap and wait for the sandbox's first process.

        Raises:
            SandboxError: the start failed, with the reason.
            OSError: this process may open no more descriptors.
        """
        # A socket, because a program inside could open a pipe again through /proc/1/fd and keep it open.
        self._lifetime, inside = socket.socketpair()
        self._lifetime.setblocking(False)
        not_in_forks(self._lifetime)
        with contextlib.ExitStack() as opened:
            opened.enter_context(inside)
            # A file, not a pipe: if this service is killed, SIGPIPE must not kill bubblewrap, because its
            # child would then wait forever for permission to continue.
            info = os.memfd_create("namespaces")
            opened.callback(os.close, info)
            try:
                async with asyncio.timeout(START_TIMEOUT_S):
                    options = bwrap_arguments(self._inside, self._mounts())
                    monitor = await self._driver.run(options, inside.fileno(), info, self._files.layers)
                    opened.callback(monitor.close)
                    inside.close()
                    # The first process, a child of bubblewrap, inherits the limit.
                    self.enforced.bound_open_files(monitor.pid)
                    await self._await_first(self._lifetime, info)
            except TimeoutError:
                raise SandboxError(f"the sandbox was not ready in {START_TIMEOUT_S} s") from None

    async def _await_first(self, lifetime: socket.socket, info: int) -> None:
        output = b""  # output of bubblewrap and the first process, up to READY or EOF
        while not output.endswith(READY) and len(output) < 16384:
            data, _ = await receive(lifetime, 4096)
            if not data:
                default = "execvp /bin/sh: it ended at once" if self._image is not None else ""
                raise explain(output.decode(errors="replace") or default)
            output += data
        # `info` is complete: bubblewrap writes it before the first process runs.
        self._first = _open_first(json.loads(os.pread(info, _INFO_BYTES, 0)))
        self.enforced.bound_open_files(self._first.pid)

    def _mounts(self) -> list[str]:
        masks = self._driver.system_masks if self._image is None else ()
        return list(mount_options(self._inside, self._files, system_masks=masks))

    async def _fork(
        self, template: str, namespaces: int, request: ForkRequest
    ) -> tuple[ToolServerProcess, socket.socket]:
        checkpoint = self._spec.checkpoint
        memory = None
        if checkpoint is not None and template == "ipython" and not self._restored:
            memory = checkpoint.memory
        process = await self._driver.templates[template].start()
        async with self._entering:
            return await process.fork(self.id, namespaces, request, memory)

    def _open_namespaces(self) -> int:
        assert self._first is not None
        return os.dup(self._first.pidfd)

    def _request(self, entry: str) -> ForkRequest:
        return ForkRequest(
            entry=entry,
            workdir=self._spec.workdir,
            env={**default_environment(self._spec), **self._spec.env},
            host_network=self._spec.network.open,
            emulate_root=self._spec.emulate_root,
            # bubblewrap sets no limits. Tool servers set them on entry, before any untrusted code runs.
            settings=self._settings(),
        )

    def _settings(self) -> tuple[Setting, ...]:
        """Return the settings of the sandbox's namespaces."""
        is_root = self._spec.emulate_root or self._spec.uid == 0
        of_root = ROOT_SETTINGS if is_root and not self._spec.network.open else ()
        return (*namespace_settings(shared_memory_bytes(self._spec)), *of_root)

    async def open_socket(self, *, netlink: bool = False) -> socket.socket:
        """See `IsolatedSandbox.open_socket`."""
        if self._first is None or not self.alive:
            raise self.end_error()
        if self._spec.network.open:
            return socket.socket()
        with self._network() as netns:
            return await (await self._template()).open_socket(netns, netlink=netlink)

    @contextlib.contextmanager
    def _network(self) -> Iterator[int]:
        """Open a descriptor of the sandbox's network namespace.

        Raises:
            SandboxError: the sandbox has stopped.
        """
        assert self._first is not None
        try:
            netns = os.open(f"/proc/{self._first.pid}/ns/net", os.O_RDONLY)
        except OSError:
            raise self.end_error() from None
        try:
            if not self._first.alive:  # its pid and the namespace may be those of another process
                raise self.end_error()
            yield netns
        finally:
            os.close(netns)

    def _prepare_files(self) -> None:
        self._files.root.mkdir(mode=0o700)
        for directory in self._files.directories(self._spec):
            directory.mkdir(mode=0o700)
        for target, upper in self._files.places(self._spec).items():
            if target in self._files.frozen:
                copy_mode(self._files.frozen[target][0].path, upper)
        if has_own_names(self._spec):
            write_names(self._files.root, self._spec.hostname, self._spec.hosts)
        tree = LayerTree((*self._files.layers, *self._files.below("/")))
        if tree.layers:
            self._adapt_to_image(tree)
        if self._spec.emulate_root:
            write_root_upper(tree, self._files.upper, self._inside)
        elif tree.layers:
            write_upper(tree, self._files.upper, self._inside)

    def _adapt_to_image(self, tree: LayerTree) -> None:
        if self._spec.emulate_root:
            check_owners(tree.layers, os.geteuid(), os.getegid())
            self._inside = add_names(tree, self._inside, self._files.root)
        self._inside = resolve_targets(tree, self._inside)
        if self._spec.emulate_root:
            path = f"{self._files.upper.name}{self._inside.workdir}"
            self._work = None if tree.kind(self._inside.workdir) else path

    @property
    def workspace(self) -> Path:
        if self._files.below(self._inside.workdir):
            raise SandboxError(
                "no directory of the host has all files of the workspace: it has layers of checkpoints"
            )
        return super().workspace

    @property
    def workspace_layers(self) -> tuple[Path, ...]:
        """See `CheckpointingSandbox`."""
        below = self._files.below(self._inside.workdir)
        return (self._files.work, *reversed(below)) if below else (self.workspace,)

    @property
    def _trees(self) -> list[Path]:
        return [*super()._trees, *(tree.path for tree in itertools.chain(*self._files.frozen.values()))]

    async def checkpoint(self, *, shells: Sequence[int] = (), python: int | None = None) -> Checkpoint:
        """Save the state of the sandbox: see `CheckpointingSandbox`."""
        async with self._entering:
            self._check_alive()
            assert self._first is not None
            taking = TakenCheckpoint(self._files, self._inside, self._driver.directory.path)
            memory = None if python is None else os.memfd_create("memory", os.MFD_CLOEXEC)
            try:
                await asyncio.to_thread(taking.prepare)
                request = {**taking.request(), "shells": shells, "python": python}
                template = await self._template()
                lost = await template.checkpoint(self._first.pidfd, memory, request, taking.decide)
                trees, unused = await asyncio.to_thread(taking.finish)
            except BaseException as error:
                if taking.has_mounted:
                    self.end(SandboxError(f"a checkpoint failed: {error}"))
                if memory is not None:
                    os.close(memory)
                await asyncio.to_thread(taking.undo)
                if isinstance(error, OSError):
                    raise SandboxError(f"no checkpoint could be taken: {error}") from error
                raise
            for tree in unused:
                await tree.release()
            return Checkpoint(trees, memory, taking.reasons, (*taking.programs, *lost))

    async def restore_memory(self, python: int, *, file: int) -> None:
        """See `CheckpointingSandbox`."""
        self._check_alive()
        checkpoint = self._spec.checkpoint
        assert self._first is not None and checkpoint is not None and checkpoint.memory is not None
        request = {"python": python, "file": file}
        await (await self._template()).restore(self._first.pidfd, checkpoint.memory, request)
        self._restored = True

    async def take_layer(self, target: Path) -> None:
        """Close the sandbox and move its changes to the image: see `Sandbox.take_layer`."""
        self._check_alive()
        if not self._files.layers:
            raise SandboxError("a sandbox without an image has no layer")
        self._layer_target = target
        await self.close()
        if self._layer_error is not None or not await asyncio.to_thread(target.is_dir):
            why = self._layer_error or "the sandbox was closed at the same time"
            raise SandboxError(
                f"cannot move the sandbox's changes to {target}: {why}",
                hint="use a directory on the sandboxes' own file system (run_dir)",
            ) from self._layer_error

    def _remove_files(self) -> None:
        if self._layer_target is not None:
            try:
                _move_tree(self._files.upper, self._layer_target)
            except (OSError, SandboxError) as error:
                self._layer_error = error
        super()._remove_files()

    def _before_end(self) -> None:
        # The tool servers first: otherwise they could report the killed programs as results.
        for server in self._servers:
            server.process.kill()
        if self._lifetime is not None:
            self._lifetime.shutdown(socket.SHUT_WR)  # also stops a first process that is still starting

    async def _release(self) -> None:
        for tree in itertools.chain(*self._files.frozen.values()):
            await tree.release()
        if self._image is not None:
            await self._driver.images.release(self._image)

    async def _end_processes(self) -> None:
        if self._first is not None:
            self._first.kill()  # the kernel then kills all others inside; bubblewrap exits by itself
        # Tool servers too: the kernel releases a pid namespace only after parents outside have reaped.
        servers = (server.process for server in self._servers)
        for process in (*servers, self._first):
            if process is not None:
                await process.wait()
        if self._lifetime is not None:
            while (await receive(self._lifetime, 4096))[
                0
            ]:  # until no process, bubblewrap too, has the other end
                pass
            self._lifetime.close()


def _open_first(info: dict[str, Any]) -> Process:
    """Open the sandbox's first process and verify its identity.

    Raises:
        SandboxError: the process has exited already.
    """
    pid = info["child-pid"]
    with contextlib.suppress(ProcessLookupError, FileNotFoundError):
        process = Process.open(pid)
        # The pid may have been reused before it was opened, so compare the pid namespace. If the process is
        # alive after the comparison, it is the compared one.
        if Path(f"/proc/{pid}/ns/pid").stat().st_ino == info["pid-namespace"] and process.alive:
            return process
        process.close()
    raise SandboxError("the sandbox stopped while it started")


def _move_tree(source: Path, target: Path) -> None:
    """Move a directory of a stopped sandbox; copy it if `target` is on another file system.

    Raises:
        OSError, SandboxError: the directory cannot be moved or copied.
    """
    make_accessible(source)  # moving a directory needs write access to it
    try:
        source.rename(target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        if target.is_dir():
            target.rmdir()
        copy_tree(source, target, threading.Event())
