"""Trees of files into a sandbox and out of it, seen from the host. What comes out is hostile."""

import asyncio
import os
import shutil
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path

from prorl_envs.errors import InputError, ToolError
from prorl_envs.sandbox.base import Sandbox
from prorl_envs.tools.tree import Transferred, TreeLimits, pack
from prorl_envs.tools.tree_wire import Channel, Pack, Unpack, ended
from prorl_envs.tools.unpack import unpack
from prorl_envs.tools.wire import WireError

ENTRY = "prorl_envs.tools.tree_server:serve"


async def upload(
    sandbox: Sandbox, source: Path, target: str, limits: TreeLimits, timeout_s: float
) -> Transferred:
    """See `Toolbox.upload`."""

    def work(sock: socket.socket) -> Transferred:
        channel = Channel(sock)
        try:
            channel.send(Unpack(target, limits))
            done = pack(str(source.absolute()), channel, limits, leave_out=False)
            channel.send_end(done)
        except (BrokenPipeError, ConnectionResetError):
            pass  # it has ended early, and said why
        end = ended(channel.receive())
        return Transferred(end.entries, end.bytes)

    return await _transfer(sandbox, work, timeout_s)


async def download(
    sandbox: Sandbox,
    source: str,
    target: Path,
    limits: TreeLimits,
    timeout_s: float,
    *,
    leave_out: bool,
) -> Transferred:
    """See `Toolbox.download`."""

    def work(sock: socket.socket) -> Transferred:
        if os.path.lexists(target):
            raise InputError(f"{target} exists already", hint="a download makes something new")
        channel = Channel(sock)
        channel.send(Pack(source, limits, leave_out))
        # In a directory of its own beside the target, and moved there when all of it is good.
        scratch = Path(tempfile.mkdtemp(prefix=".prorl-", dir=target.parent))
        try:
            folder = os.open(scratch, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                done = unpack(channel, folder, "tree", limits, merge=False)
            finally:
                os.close(folder)
            channel.check_end(done)
            (scratch / "tree").rename(target)
        finally:
            shutil.rmtree(scratch)
        return done

    return await _transfer(sandbox, work, timeout_s)


async def _transfer(
    sandbox: Sandbox, work: Callable[[socket.socket], Transferred], timeout_s: float
) -> Transferred:
    """Run one end in a thread, with a tool server as the other.

    Cancelled or late, the socket is shut down: both ends fail at their next word, and the thread cleans up.
    """
    try:
        async with asyncio.timeout(timeout_s):
            sock = await sandbox.spawn(ENTRY)
            with sock:
                sock.setblocking(True)
                thread = asyncio.create_task(asyncio.to_thread(work, sock))
                try:
                    await asyncio.wait({thread})
                finally:
                    await _ended(thread, sock)
                return thread.result()
    except TimeoutError:
        raise ToolError(f"the transfer did not end within {timeout_s:g} s") from None
    except (EOFError, ConnectionResetError, BrokenPipeError, WireError) as error:
        if not sandbox.alive:
            raise sandbox.ended() from error
        raise ToolError(f"the transfer broke off: {error or 'its tool server ended'}") from error


async def _ended(thread: "asyncio.Task[Transferred]", sock: socket.socket) -> None:
    if thread.done():
        return
    sock.shutdown(socket.SHUT_RDWR)
    cancelled = False
    while not thread.done():
        try:
            await asyncio.wait({thread})
        except asyncio.CancelledError:
            cancelled = True  # the thread still uses the socket
    thread.exception()  # nobody wants to know
    if cancelled:
        raise asyncio.CancelledError
