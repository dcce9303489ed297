"""A minimal tool server: runs one shell script in the sandbox and answers with its output.

For testing and measuring sandboxes without the tools room.
"""

import socket
import subprocess

OUTPUT_LIMIT = 1 << 20


def run_scripts(sock: socket.socket) -> None:
    """Read scripts, one a line, until the socket closes; answer each with its output and a NUL byte."""
    with sock, sock.makefile("rb") as requests:
        for script in requests:
            done = subprocess.run(
                ["/bin/sh", "-c", script.decode()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                check=False,
            )
            sock.sendall(done.stdout[:OUTPUT_LIMIT].replace(b"\0", b"?") + b"\0")


def fail(sock: socket.socket) -> None:
    """Fail at once, as a tool server with a fault does."""
    raise RuntimeError("the tool server has a fault")
