"""Lending a sandbox to another process of this user on this node.

The owner listens on a socket in its driver's directory, which is closed to other users, out of sight of every
sandbox, and removed with the driver. A borrower names a sandbox and is handed connected sockets to tool
servers in it; from there on it speaks with them directly. Messages are JSON, one per packet.
"""

import asyncio
import json
import re
import socket
from pathlib import Path
from typing import Any, NoReturn

from prorl_envs.errors import InputError, ProrlError, SandboxError
from prorl_envs.nemo.box import Box
from prorl_envs.sandbox.base import SandboxSpec
from prorl_envs.sandbox.files import driver_directory
from prorl_envs.sandbox.processes import readable, receive

_NAME = "gate"
_MESSAGE_LIMIT = 16 * 1024
_BACKLOG = 128
_SANDBOX_ID = re.compile(r"[a-z0-9_]+-[0-9]+")


class Gate:
    """The owner's side. Belongs to one event loop.

    Args:
        base: under which the driver has its directory.
    """

    def __init__(self, base: Path) -> None:
        self._base = base
        self._boxes: dict[str, Box] = {}
        self._listening: asyncio.Task[None] | None = None
        self._guests: dict[asyncio.Task[None], str] = {}

    def offer(self, box: Box) -> None:
        """Let borrowers have this sandbox until it is withdrawn."""
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

    async def withdraw(self, box: Box) -> None:
        """Tell its borrowers that it ends. Idempotent."""
        self._boxes.pop(box.sandbox.id, None)
        await _end(*(guest for guest, lent in self._guests.items() if lent == box.sandbox.id))

    async def aclose(self) -> None:
        """Let no one in any more. Idempotent."""
        if self._listening is not None:
            await _end(self._listening, *self._guests)

    async def _listen(self, listener: socket.socket) -> None:
        with listener:
            while True:
                await readable(listener.fileno())
                try:
                    connection, _ = listener.accept()
                except BlockingIOError:
                    continue
                connection.setblocking(False)
                guest = asyncio.create_task(self._serve(connection))
                self._guests[guest] = ""
                guest.add_done_callback(self._guests.pop)

    async def _serve(self, connection: socket.socket) -> None:
        guest = asyncio.current_task()
        assert guest is not None
        with connection:
            while message := (await receive(connection, _MESSAGE_LIMIT))[0]:
                request = json.loads(message)
                # Who asks for the end waits for it; the others hear of it first.
                self._guests[guest] = "" if request["do"] == "close" else request["sandbox"]
                try:
                    answer, lent = await self._answer(request)
                except (ProrlError, OSError) as error:
                    answer, lent = {"error": str(error)}, None
                try:
                    descriptors = [] if lent is None else [lent.fileno()]
                    socket.send_fds(connection, [json.dumps(answer).encode()], descriptors)
                except (BrokenPipeError, ConnectionResetError):
                    return
                finally:
                    if lent is not None:
                        lent.close()

    async def _answer(self, request: dict[str, Any]) -> tuple[dict[str, Any], socket.socket | None]:
        box = self._boxes.get(request["sandbox"])
        if box is None:
            raise SandboxError(f"sandbox {request['sandbox']} has ended")
        if not box.alive:
            raise box.sandbox.ended()
        match request["do"]:
            case "spawn":
                return {}, await box.sandbox.spawn(request["entry"], template=request["template"])
            case "close":
                await box.close()
                return {}, None
            case _:
                spec = box.sandbox.spec
                seen = {"place": spec.workdir, "uid": spec.uid, "shell": box.shell, "workdir": box.workdir}
                return {**seen, "isolated": box.isolated}, None


class BorrowedSandbox:
    """The borrower's side: see `sandbox.base.Sandbox`. Made by `borrow`; given back with `release`."""

    def __init__(self, sandbox_id: str, connection: socket.socket) -> None:
        self._id = sandbox_id
        self._connection = connection
        self._asking = asyncio.Lock()
        self._spec = SandboxSpec()
        self.shell = "sh"
        self.workdir = "/"
        self.isolated = False

    @classmethod
    async def borrow(cls, sandbox_id: str, base: Path) -> "BorrowedSandbox":
        """Reach the owner of a sandbox.

        Args:
            base: directory below which the owner's driver has its own.

        Raises:
            InputError: this is no sandbox's id.
            SandboxError: there is no such owner here any more, or it does not have the sandbox.
        """
        if not _SANDBOX_ID.fullmatch(sandbox_id):
            raise InputError(f"not the id of a sandbox: {sandbox_id!r}")
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        sandbox = cls(sandbox_id, connection)
        try:
            connection.connect(str(driver_directory(base, sandbox_id) / _NAME))
            seen, _ = await sandbox._ask("look")
        except OSError as error:
            connection.close()
            raise SandboxError(
                f"cannot reach the owner of sandbox {sandbox_id}: {error.strerror}",
                hint="it must run on this node, as this user, with the same run_dir",
            ) from error
        except BaseException:
            connection.close()
            raise
        sandbox._spec = SandboxSpec(workdir=seen["place"], uid=seen["uid"])
        sandbox.shell, sandbox.workdir = seen["shell"], seen["workdir"]
        sandbox.isolated = seen["isolated"]
        return sandbox

    @property
    def id(self) -> str:
        return self._id

    @property
    def spec(self) -> SandboxSpec:
        """Its user and its private directory; the rest is the owner's to know."""
        return self._spec

    @property
    def workspace(self) -> NoReturn:
        raise SandboxError("a borrowed sandbox's files are the owner's to reach")

    @property
    def alive(self) -> bool:
        """Whether the owner still has it."""
        if self._connection.fileno() < 0:
            return False
        try:
            return bool(self._connection.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            return True
        except ConnectionResetError:
            return False

    async def listen(self) -> NoReturn:
        raise SandboxError("what listens in a borrowed sandbox is its owner's")

    async def spawn(self, entry: str, *, template: str = "base") -> socket.socket:
        """See `sandbox.base.Sandbox`; the owner forks it."""
        _, lent = await self._ask("spawn", entry=entry, template=template)
        if lent is None:
            raise SandboxError(f"the owner of sandbox {self.id} handed nothing over")
        lent.setblocking(False)
        return lent

    async def begin_shell(self) -> None:
        """The shell that is begun without a tool server is the owner's."""
        return

    def ended(self) -> SandboxError:
        """See `sandbox.base.Sandbox`; the owner may know more."""
        return SandboxError(f"sandbox {self._id} has ended")

    def take_notices(self) -> list[str]:
        """What was done to keep its limits, the owner is told."""
        return []

    def memory(self) -> int | None:
        """What it holds, the owner knows."""
        return None

    async def snapshot(self) -> NoReturn:
        raise SandboxError("a borrowed sandbox's files are the owner's to copy")

    async def close(self) -> None:
        """Have the owner end the sandbox, and give it back. Idempotent."""
        if self.alive:
            try:
                await self._ask("close")
            except SandboxError:
                pass  # it had ended meanwhile
            finally:
                self.release()
        else:
            self.release()

    def release(self) -> None:
        """Give it back without ending it. Idempotent."""
        self._connection.close()

    async def _ask(self, what: str, **more: str) -> tuple[dict[str, Any], socket.socket | None]:
        async with self._asking:
            request = {"sandbox": self._id, "do": what, **more}
            try:
                self._connection.send(json.dumps(request).encode())
                message, descriptors = await receive(self._connection, _MESSAGE_LIMIT, descriptors=1)
            except (OSError, ValueError) as error:  # closed, here or there
                raise self.ended() from error
        lent = socket.socket(fileno=descriptors[0]) if descriptors else None
        if not message:
            raise self.ended()
        answer: dict[str, Any] = json.loads(message)
        if "error" in answer:
            raise SandboxError(answer["error"])
        return answer, lent


async def _end(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
