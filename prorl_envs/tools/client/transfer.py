"""Host side of file transfers into and out of a sandbox. Content from the sandbox is untrusted."""

import asyncio
import os
import shutil
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path

from prorl_envs.errors import InputError, ToolError
from prorl_envs.sandbox.base import Sandbox
from prorl_envs.sandbox.linux.descriptors import opened
from prorl_envs.tools.protocol.messages import WireError
from prorl_envs.tools.protocol.transfer import Pack, TransferChannel, Unpack, ended
from prorl_envs.tools.protocol.tree import Transferred, TreeLimits, pack
from prorl_envs.tools.protocol.unpack import unpack

ENTRY = "prorl_envs.tools.server.transfer:serve"


async def upload(sandbox: Sandbox, source: Path, target: str, timeout_s: float) -> Transferred:
    """Upload a file or tree: see `Toolbox.upload`."""
    limits = TreeLimits()

    def work(sock: socket.socket) -> Transferred:
        channel = TransferChannel(sock)
        try:
            channel.send(Unpack(target, limits))
            done = pack(str(source.absolute()), channel, limits, skip_unsupported=False)
            channel.send_end(done)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the sandbox's side has failed, and reported the reason
        return ended(channel.receive())

    return await _transfer(sandbox, work, timeout_s)


async def download(
    sandbox: Sandbox,
    source: str,
    target: Path,
    limits: TreeLimits,
    timeout_s: float,
    *,
    skip_unsupported: bool,
) -> Transferred:
    """Download a file or tree: see `Toolbox.download`."""

    def work(sock: socket.socket) -> Transferred:
        if os.path.lexists(target):
            raise InputError(f"{target} exists already", hint="choose a path that does not exist")
        channel = TransferChannel(sock)
        channel.send(Pack(source, limits, skip_unsupported))
        # Unpack into a temporary directory beside the target. Move the result only if all of it is valid.
        scratch = Path(tempfile.mkdtemp(prefix=".prorl-", dir=target.parent))
        try:
            with opened(scratch, os.O_RDONLY | os.O_DIRECTORY) as folder:
                done = unpack(channel, folder, "tree", limits, merge=False)
            channel.check_end(done)
            (scratch / "tree").rename(target)
        finally:
            shutil.rmtree(scratch)
        return done

    return await _transfer(sandbox, work, timeout_s)


async def _transfer(
    sandbox: Sandbox, work: Callable[[socket.socket], Transferred], timeout_s: float
) -> Transferred:
    """Run the host's side of a transfer in a thread, with a tool server as the peer.

    On cancellation or timeout, the socket is shut down: both sides fail at their next message, and the thread
    cleans up.
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
                    await _finish(thread, sock)
                return thread.result()
    except TimeoutError:
        raise ToolError(f"the transfer did not end within {timeout_s:g} s") from None
    except (EOFError, ConnectionResetError, BrokenPipeError, WireError) as error:
        if not sandbox.alive:
            raise sandbox.end_error() from error
        raise ToolError(f"the transfer broke off: {error or 'its tool server ended'}") from error


async def _finish(thread: "asyncio.Task[Transferred]", sock: socket.socket) -> None:
    if thread.done():
        return
    sock.shutdown(socket.SHUT_RDWR)
    cancelled = False
    while not thread.done():
        try:
            await asyncio.wait({thread})
        except asyncio.CancelledError:
            cancelled = True  # the thread still uses the socket
    thread.exception()  # mark the exception as retrieved
    if cancelled:
        raise asyncio.CancelledError
