"""Sandbox with the operations of NeMo Gym: commands in fresh processes, file transfer, a limited lifetime.

Imports nothing of NeMo Gym.
"""

import asyncio
import contextlib
import logging
import os
import posixpath
import secrets
import signal
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Self

from prorl_envs.errors import InputError, SandboxError, ToolError
from prorl_envs.nemo.outcome import EpisodeOutcome, Notices, failed, outcome, with_notes
from prorl_envs.nemo.plan import Plan, ProviderConfig
from prorl_envs.nemo.ports import SandboxPorts
from prorl_envs.sandbox.base import Sandbox
from prorl_envs.tools.client.toolbox import Toolbox
from prorl_envs.tools.protocol.tree import is_utf8
from prorl_envs.tools.types import Completed

logger = logging.getLogger(__name__)

#: Maximum bytes of a command that is passed as one argument. Linux allows 128 KiB.
_ARGUMENT_LIMIT = 100_000
#: Chunk size, and maximum size of a file, for copies from a sandbox to the host.
_CHUNK = 8 * 1024 * 1024
_DOWNLOAD_LIMIT = 16 * 1024**3
_SETUP_S = 60.0
_FOREVER_S = 1e9


class ProviderSandbox:
    """Running sandbox with its tools. Created by `open`, or directly for a sandbox of another process."""

    def __init__(
        self,
        sandbox: Sandbox,
        tools: Toolbox,
        config: ProviderConfig,
        *,
        shell: str,
        workdir: str,
        isolated: bool,
        ports: SandboxPorts | None = None,
    ) -> None:
        self.sandbox = sandbox
        self.tools = tools
        #: None if the sandbox has the host's network, or belongs to another process.
        self.ports = ports
        self.shell = shell
        self.workdir = workdir
        #: True if the sandbox's processes can be distinguished from this user's other processes.
        self.isolated = isolated
        self.paused = False
        self._output_limit = config.output_limit
        self._slots = asyncio.Semaphore(config.concurrency)
        self._notices = Notices(sandbox)
        self._entrypoint: asyncio.Task[Completed] | None = None
        self._expiry: asyncio.TimerHandle | None = None
        self._closing: asyncio.Task[None] | None = None
        #: Awaited before the sandbox is closed.
        self.on_close: Callable[[], Awaitable[None]] | None = None

    @classmethod
    async def open(
        cls, sandbox: Sandbox, plan: Plan, config: ProviderConfig, ports: SandboxPorts | None
    ) -> Self:
        """Prepare a new sandbox, and take ownership of it: the sandbox is closed if this method fails.

        Raises:
            SandboxError, ToolError, OSError: the sandbox has no shell, or the plan's directory, files or
                entry point cannot be created.
        """
        try:
            tools = await Toolbox.open(sandbox)
            try:
                shell, isolated = await find_shell(tools), ports is not None
                box = cls(
                    sandbox, tools, config, shell=shell, workdir=plan.workdir, isolated=isolated, ports=ports
                )
                await box._prepare(plan)
            except BaseException:
                await tools.aclose()
                raise
        except BaseException:
            if ports is not None:
                await ports.aclose()
            await sandbox.close()
            raise
        return box

    @property
    def alive(self) -> bool:
        return self._closing is None and self.sandbox.alive

    async def exec(
        self, command: str, *, cwd: str | None, env: Mapping[str, str] | None, timeout_s: float | None
    ) -> EpisodeOutcome:
        """Run a command in a new shell; its background processes keep running.

        Args:
            cwd: directory; None and relative paths start from the working directory.
            timeout_s: seconds after which the command is killed with its processes. Waiting for a free slot
                does not count. None for no limit.

        Raises:
            InputError: `timeout_s` is not a valid time.
        """
        if not is_utf8(command) or "\0" in command:
            return failed("exec", "the command holds a character that no shell accepts")
        timeout_s = _FOREVER_S if timeout_s is None else timeout_s
        directory = self.path(cwd or "")
        async with self._slots:
            if self.paused:
                return failed("sandbox", "the sandbox is paused")
            with self._notices.listen() as notices:
                try:
                    done = await self._run(command, directory, env or {}, timeout_s)
                except OSError as error:
                    return failed("exec", f"cannot start a command in {directory}: {error.strerror}")
                except (SandboxError, ToolError) as error:
                    return failed("sandbox", with_notes(str(error), notices()))
                if done.exit_code == -signal.SIGKILL and not self.alive:  # the whole sandbox was killed
                    return failed("sandbox", with_notes(str(self.sandbox.end_error()), notices()))
                return outcome(done, timeout_s, notices())

    async def upload(self, source: Path, target: str) -> None:
        """Copy a file of the host into the sandbox, with its permissions. Create missing folders.

        Raises:
            OSError: as a local copy would raise.
            SandboxError, ToolError: our infrastructure failed.
        """
        path = self.path(target)
        with await asyncio.to_thread(source.open, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode & 0o777
            await self.tools.write(path, await asyncio.to_thread(file.read, _CHUNK), mode=mode)
            while chunk := await asyncio.to_thread(file.read, _CHUNK):
                await self.append(path, chunk)

    async def append(self, path: str, data: bytes) -> None:
        """Append to a file. Raise SandboxError if that fails."""
        command = ["sh", "-c", 'cat >> "$1"', "sh", path]
        done = await self.tools.run(command, stdin=data, cwd="/", timeout_s=_SETUP_S)
        _check(done, f"cannot write {path}")

    async def download(self, source: str, target: Path) -> None:
        """Copy a file out of the sandbox; `target` appears complete or not at all.

        Raises:
            OSError: as a local copy would raise.
            SandboxError, ToolError: our infrastructure failed, or the file grew while it was read.
        """
        path = self.path(source)
        await asyncio.to_thread(target.parent.mkdir, parents=True, exist_ok=True)
        part = target.with_name(f".part-{secrets.token_hex(8)}")
        try:
            with await asyncio.to_thread(part.open, "wb") as file:
                copied = 0
                while chunk := await self._read(path, copied):
                    await asyncio.to_thread(file.write, chunk)
                    copied += len(chunk)
                    if copied > _DOWNLOAD_LIMIT:
                        raise ToolError(f"{source} has more than {_DOWNLOAD_LIMIT} bytes")
                    if len(chunk) < _CHUNK:
                        break
            await asyncio.to_thread(part.replace, target)
        finally:
            await asyncio.to_thread(part.unlink, missing_ok=True)

    async def pause(self) -> None:
        """Stop every process in the sandbox at once. Idempotent.

        Raises:
            SandboxError, ToolError: our infrastructure failed.
        """
        if not self.isolated:
            raise SandboxError("the local driver cannot pause a sandbox", hint="use another driver")
        if not self.paused:
            self.paused = True  # from here on no new command starts
            try:
                await self._signal_all("STOP")
            except BaseException:
                self.paused = False
                raise

    async def resume(self) -> None:
        """Continue every process in the sandbox, including those that had stopped by themselves. Idempotent.

        Raises:
            SandboxError, ToolError: our infrastructure failed.
        """
        if self.paused:
            await self._signal_all("CONT")
            self.paused = False

    async def close(self) -> None:
        """Close the sandbox and kill its processes. Idempotent; continues if the caller is cancelled."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
        if self.on_close is not None:
            await self.on_close()
        await self.tools.aclose()
        if self.ports is not None:
            await self.ports.aclose()
        if self._entrypoint is not None:
            await asyncio.wait([self._entrypoint])
        await self.sandbox.close()

    async def _prepare(self, plan: Plan) -> None:
        if self.ports is not None:
            await self.ports.reach(plan.servers)
        if plan.make_workdir:
            done = await self.tools.run(["mkdir", "-p", "--", plan.workdir], cwd="/", timeout_s=_SETUP_S)
            _check(done, f"cannot make the working directory {plan.workdir}")
        for path, text in plan.files.items():
            await self.tools.write(self.path(path), text.encode())
        if plan.entrypoint:
            await self._start(plan.entrypoint)
        if plan.ttl_s is not None:
            self._expiry = asyncio.get_running_loop().call_later(plan.ttl_s, self._expire, plan.ttl_s)

    async def _start(self, entrypoint: tuple[str, ...]) -> None:
        """Start the entry point, which runs beside the commands.

        Raises:
            OSError: there is no such program.
        """
        self._entrypoint = asyncio.create_task(
            self.tools.run(entrypoint, cwd=self.workdir, timeout_s=_FOREVER_S, output_limit=4096)
        )
        self._entrypoint.add_done_callback(_report_end)
        # The server starts processes in the order of the requests, so the entry point starts before this one.
        await self.tools.run([self.shell, "-c", ":"], cwd="/", timeout_s=_SETUP_S)
        if self._entrypoint.done() and isinstance(error := self._entrypoint.exception(), OSError):
            raise SandboxError(f"cannot start the entry point {entrypoint[0]!r}: {error.strerror}")

    def _expire(self, ttl_s: float) -> None:
        logger.warning("closing sandbox %s: its lifetime of %g s is over", self.sandbox.id, ttl_s)
        self._closing = self._closing or asyncio.create_task(self._close())

    async def _run(self, command: str, directory: str, env: Mapping[str, str], timeout_s: float) -> Completed:
        if len(command.encode()) <= _ARGUMENT_LIMIT:
            return await self._run_argv([self.shell, "-c", command], directory, env, timeout_s)
        script = f"/tmp/.command-{secrets.token_hex(8)}"
        await self.tools.write(script, command.encode(), mode=0o600)
        try:
            return await self._run_argv([self.shell, script], directory, env, timeout_s)
        finally:
            with contextlib.suppress(
                OSError, SandboxError, ToolError
            ):  # the script is deleted with the sandbox anyway
                await self.tools.run(["rm", "-f", script], cwd="/", timeout_s=_SETUP_S)

    async def _run_argv(
        self, argv: list[str], directory: str, env: Mapping[str, str], timeout_s: float
    ) -> Completed:
        return await self.tools.run(
            argv,
            cwd=directory,
            env=env,
            timeout_s=timeout_s,
            output_limit=self._output_limit,
            apart=True,
            background=True,
        )

    async def _read(self, path: str, offset: int) -> bytes:
        if offset == 0:
            return await self.tools.read(path, limit=_CHUNK)
        script = 'tail -c "+$2" -- "$1" | head -c "$3"'
        done = await self.tools.run(
            ["sh", "-c", script, "sh", path, str(offset + 1), str(_CHUNK)],
            cwd="/",
            timeout_s=_SETUP_S,
            output_limit=2 * _CHUNK,
            apart=True,
        )
        _check(done, f"cannot read {path}")
        return done.output

    async def _signal_all(self, name: str) -> None:
        # The kernel signals all processes except the sender and the sandbox's init process, in one step.
        done = await self.tools.run(["sh", "-c", f"kill -{name} -1"], cwd="/", timeout_s=_SETUP_S)
        if done.exit_code not in (0, 1):  # 1: there was no process
            raise SandboxError(f"cannot signal the processes of sandbox {self.sandbox.id}")

    def path(self, path: str) -> str:
        """Return `path` as an absolute path; relative paths start from the working directory."""
        return posixpath.join(self.workdir, path)


async def find_shell(tools: Toolbox) -> str:
    """Return `bash` if the sandbox has it, else `sh`.

    Raises:
        SandboxError: the sandbox has neither.
    """
    for shell in ("bash", "sh"):
        with contextlib.suppress(FileNotFoundError, PermissionError):
            await tools.run([shell, "-c", ":"], cwd="/", timeout_s=_SETUP_S)
            return shell
    raise SandboxError("the image has no shell")


def check_user(user: str | int | None, uid: int) -> None:
    """Raise InputError if `user` is not the user that runs all processes of the sandbox."""
    if user not in (None, uid, str(uid)) and not (uid == 0 and user == "root"):
        raise InputError(
            f"commands run as user {uid} in this sandbox, not as {user!r}",
            hint="a sandbox has one user: choose it with provider_options `uid`",
        )


def _check(done: Completed, problem: str) -> None:
    if done.exit_code != 0:
        reason = (done.errors or done.output)[-500:].decode("utf-8", "replace").strip()
        raise SandboxError(f"{problem}: {reason or 'it took too long'}")


def _report_end(entrypoint: asyncio.Task[Completed]) -> None:
    if entrypoint.cancelled() or entrypoint.exception() is not None:
        return  # closed with the sandbox
    done = entrypoint.result()
    logger.warning(
        "an entry point ended with status %s: %s", done.exit_code, done.output.decode("utf-8", "replace")
    )
