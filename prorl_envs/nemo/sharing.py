"""Sharing of a sandbox with another process of this user on this node.

The owner listens on a socket in its driver's directory, which is closed to other users, hidden from every
sandbox, and removed with the driver. A borrower names a sandbox and receives sockets that are connected to
tool servers in it. From then on, it uses these servers directly. Messages are JSON, one per packet.
"""

import asyncio
import json
import re
import socket
from pathlib import Path
from typing import Any

from prorl_envs.errors import InputError, ProrlError, SandboxError
from prorl_envs.nemo.box import ProviderSandbox
from prorl_envs.sandbox.base import Sandbox, SandboxSpec
from prorl_envs.sandbox.filesystem.directories import driver_directory
from prorl_envs.sandbox.linux.pidfd import readable, receive

_NAME = "share"
_MESSAGE_LIMIT = 16 * 1024
_BACKLOG = 128
_SANDBOX_ID = re.compile(r"[a-z0-9_]+-[0-9]+")


class SandboxShareServer:
    """Owner's side of the sharing. Bound to one event loop.

    Args:
        base: parent of the driver's directory.
    """

    def __init__(self, base: Path) -> None:
        self._base = base
        self._boxes: dict[str, ProviderSandbox] = {}
        self._listening: asyncio.Task[None] | None = None
        self._borrowers: dict[asyncio.Task[None], str] = {}

    def offer(self, box: ProviderSandbox) -> None:
        """Share this sandbox with borrowers until it is withdrawn."""
        self._boxes[box.sandbox.id] = box
        if self._listening is None:
            path = driver_directory(self._base, box.sandbox.id) / _NAME
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
            try:
                listener.bind(str(path))
                listener.listen(_BACKLOG)
            except BaseException:
                listener.close()
                raise
            self._listening = asyncio.create_task(self._listen(listener))

    async def withdraw(self, box: ProviderSandbox) -> None:
        """Disconnect the borrowers of this sandbox, which will close. Idempotent."""
        self._boxes.pop(box.sandbox.id, None)
        await _cancel(*(task for task, sandbox in self._borrowers.items() if sandbox == box.sandbox.id))

    async def aclose(self) -> None:
        """Stop accepting borrowers, and disconnect all. Idempotent."""
        if self._listening is not None:
            await _cancel(self._listening, *self._borrowers)

    async def _listen(self, listener: socket.socket) -> None:
        with listener:
            while True:
                await readable(listener.fileno())
                try:
                    connection, _ = listener.accept()
                except BlockingIOError:
                    continue
                connection.setblocking(False)
                borrower = asyncio.create_task(self._serve(connection))
                self._borrowers[borrower] = ""
                borrower.add_done_callback(self._borrowers.pop)

    async def _serve(self, connection: socket.socket) -> None:
        borrower = asyncio.current_task()
        assert borrower is not None
        with connection:
            while message := (await receive(connection, _MESSAGE_LIMIT))[0]:
                request = json.loads(message)
                # `close` disconnects all borrowers except the one that requests it, which awaits the reply.
                self._borrowers[borrower] = "" if request["do"] == "close" else request["sandbox"]
                try:
                    answer, process_socket = await self._answer(request)
                except (ProrlError, OSError) as error:
                    answer, process_socket = {"error": str(error)}, None
                try:
                    descriptors = [] if process_socket is None else [process_socket.fileno()]
                    socket.send_fds(connection, [json.dumps(answer).encode()], descriptors)
                except (BrokenPipeError, ConnectionResetError):
                    return
                finally:
                    if process_socket is not None:
                        process_socket.close()

    async def _answer(self, request: dict[str, Any]) -> tuple[dict[str, Any], socket.socket | None]:
        box = self._boxes.get(request["sandbox"])
        if box is None:
            raise SandboxError(f"sandbox {request['sandbox']} has ended")
        if not box.alive:
            raise box.sandbox.end_error()
        match request["do"]:
            case "spawn":
                return {}, await box.sandbox.spawn(request["entry"], template=request["template"])
            case "close":
                await box.close()
                return {}, None
            case _:
                spec = box.sandbox.spec
                properties = {"sandbox_workdir": spec.workdir, "uid": spec.uid, "shell": box.shell}
                return {**properties, "workdir": box.workdir, "isolated": box.isolated}, None


class SharedSandbox(Sandbox):
    """Borrower's side: see `sandbox.base.Sandbox`. Created by `borrow`; released with `release`."""

    def __init__(self, sandbox_id: str, connection: socket.socket) -> None:
        self._id = sandbox_id
        self._connection = connection
        self._asking = asyncio.Lock()
        self._spec = SandboxSpec()
        self.shell = "sh"
        self.workdir = "/"
        self.isolated = False

    @classmethod
    async def borrow(cls, sandbox_id: str, base: Path) -> "SharedSandbox":
        """Connect to the owner of a sandbox.

        Args:
            base: parent of the owner's driver directory.

        Raises:
            InputError: `sandbox_id` is not a sandbox id.
            SandboxError: the owner is not running here, or does not have the sandbox.
        """
        if not _SANDBOX_ID.fullmatch(sandbox_id):
            raise InputError(f"not the id of a sandbox: {sandbox_id!r}")
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        sandbox = cls(sandbox_id, connection)
        try:
            connection.connect(str(driver_directory(base, sandbox_id) / _NAME))
            properties, _ = await sandbox._ask("look")
        except OSError as error:
            connection.close()
            raise SandboxError(
                f"cannot reach the owner of sandbox {sandbox_id}: {error.strerror}",
                hint="it must run on this node, as this user, with the same run_dir",
            ) from error
        except BaseException:
            connection.close()
            raise
        sandbox._spec = SandboxSpec(workdir=properties["sandbox_workdir"], uid=properties["uid"])
        sandbox.shell, sandbox.workdir = properties["shell"], properties["workdir"]
        sandbox.isolated = properties["isolated"]
        return sandbox

    @property
    def id(self) -> str:
        return self._id

    @property
    def spec(self) -> SandboxSpec:
        """User and private directory of the sandbox; only the owner knows the rest."""
        return self._spec

    @property
    def alive(self) -> bool:
        """True if the owner still has the sandbox."""
        if self._connection.fileno() < 0:
            return False
        try:
            return bool(self._connection.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            return True
        except ConnectionResetError:
            return False

    async def spawn(self, entry: str, *, template: str = "base") -> socket.socket:
        """Ask the owner to start the program; see `sandbox.base.Sandbox`."""
        _, process_socket = await self._ask("spawn", entry=entry, template=template)
        if process_socket is None:
            raise SandboxError(f"the owner of sandbox {self.id} sent no socket")
        process_socket.setblocking(False)
        return process_socket

    async def close(self) -> None:
        """Ask the owner to close the sandbox, and release it. Idempotent."""
        try:
            if self.alive:
                await self._ask("close")
        except SandboxError:
            pass  # it was closed meanwhile
        finally:
            self.release()

    def release(self) -> None:
        """Release the sandbox without closing it. Idempotent."""
        self._connection.close()

    async def _ask(self, action: str, **more: str) -> tuple[dict[str, Any], socket.socket | None]:
        async with self._asking:
            request = {"sandbox": self._id, "do": action, **more}
            try:
                self._connection.send(json.dumps(request).encode())
                message, descriptors = await receive(self._connection, _MESSAGE_LIMIT, descriptors=1)
            except (OSError, ValueError) as error:  # this side or the owner has closed the connection
                raise self.end_error() from error
        process_socket = socket.socket(fileno=descriptors[0]) if descriptors else None
        if not message:
            raise self.end_error()
        answer: dict[str, Any] = json.loads(message)
        if "error" in answer:
            raise SandboxError(answer["error"])
        return answer, process_socket


async def _cancel(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
