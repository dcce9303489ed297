"""Minimal tool server and its host side: runs shell scripts in a sandbox.

For testing and measuring sandboxes without the tools package.
"""

import asyncio
import importlib
import os
import signal
import socket
import subprocess
from dataclasses import replace

from prorl_envs.sandbox.base import Sandbox
from prorl_envs.sandbox.template.template import TEMPLATES, TemplateSpec

OUTPUT_LIMIT = 1 << 20

RUN_SCRIPTS = "tests.support.sandbox_entry:run_scripts"
FAIL = "tests.support.sandbox_entry:fail"
IMPORT_LATE = "tests.support.sandbox_entry:import_late"
FORK = "tests.support.sandbox_entry:fork_child"

#: Templates whose forks run the entries below.
SCRIPT_TEMPLATES = {"base": TemplateSpec(entries=(RUN_SCRIPTS, FAIL, IMPORT_LATE, FORK))}

#: A node's own templates, but a Python session imports its libraries itself: 1 s of processor time to start,
#: instead of 4.
LIGHT_TEMPLATES = {
    **TEMPLATES,
    "ipython": replace(
        TEMPLATES["ipython"], preload=("prorl_envs.tools.server.python_kernel:prepare_alone",)
    ),
}


def run_scripts(sock: socket.socket) -> None:
    """Read scripts, one per line, until the socket closes; answer each with its output and a NUL byte."""
    with sock, sock.makefile("rb") as requests:
        for script in requests:
            done = subprocess.run(
                ["/bin/sh", "-c", script.decode()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                check=False,
                start_new_session=True,  # or `kill 0` inside would kill this process too
            )
            sock.sendall(done.stdout[:OUTPUT_LIMIT].replace(b"\0", b"?") + b"\0")


def fail(sock: socket.socket) -> None:
    """Fail immediately, like a faulty tool server."""
    raise RuntimeError("the tool server has a fault")


def import_late(sock: socket.socket) -> None:
    """Import the module named by the first line; answer the result and a NUL byte."""
    with sock, sock.makefile("rb") as requests:
        try:
            importlib.import_module(requests.readline().decode().strip())
        except ModuleNotFoundError:
            sock.sendall(b"not found\0")
        else:
            sock.sendall(b"imported\0")


def fork_child(sock: socket.socket) -> None:
    """Fork a child that leads a session and runs no program; answer its pid and a NUL byte; wait."""
    if (pid := os.fork()) == 0:
        os.setsid()
        sock.close()
        signal.pause()
    with sock:
        sock.sendall(f"{pid}\0".encode())
        sock.recv(1)


async def ask(sock: socket.socket, script: str) -> str:
    """Send a script of one line to the tool server at the other end of `sock`.

    Returns:
        Its output, standard error included.

    Raises:
        EOFError: the tool server exited first.
    """
    loop = asyncio.get_running_loop()
    output = b""
    try:
        await loop.sock_sendall(sock, script.encode() + b"\n")
        while not output.endswith(b"\0"):
            data = await loop.sock_recv(sock, 65536)
            if not data:
                raise EOFError(f"the tool server ended after {output!r}")
            output += data
    except ConnectionError as error:
        raise EOFError("the tool server ended") from error
    return output.removesuffix(b"\0").decode()


async def run_script(sandbox: Sandbox, script: str) -> str:
    """Run a script of one line in a new tool server; see `ask`."""
    with await sandbox.spawn(RUN_SCRIPTS) as sock:
        return await ask(sock, script)
