"""Writing down the system calls of a program that makes a sandbox (see `program.py` and `making.py`)."""

import os
import socket
import struct
from collections.abc import Iterable, Mapping

from prorl_envs.sandbox.program import ANY, FAIL, WAY, Argument, Call, Jump, Label, Step, Table

#: Its descriptors when it begins: the socket whose other end, once closed, ends the sandbox, which is its
#: standard streams; the way to the host; the directory of the sandbox.
LIFETIME, OWN = 0, 4
#: What the host tells it: to begin; and to begin the shell. What it tells the host: that this is done, with
#: descriptors.
GO = b"g"
#: The working directory, for calls that take a directory.
HERE = -100


class Writer:
    """Collects steps, and knows which descriptors are open after them."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.open = {*range(3), WAY, OWN}

    def call(
        self,
        name: str,
        *arguments: Argument | str,
        what: str = "",
        least: int | None = 0,
        but: int = 0,
        otherwise: str = FAIL,
    ) -> None:
        given = tuple(text(value) if isinstance(value, str) else value for value in arguments)
        self.steps.append(Call(name, given, what, least, but, otherwise))

    def label(self, name: str) -> None:
        self.steps.append(Label(name))

    def jump(self, to: str, *, if_none: bool = False) -> None:
        self.steps.append(Jump(to, if_none))

    def fresh(self) -> int:
        """The number of the descriptor that is made next."""
        number = next(number for number in range(len(self.open) + 1) if number not in self.open)
        self.open.add(number)
        return number

    def openat(self, directory: int, path: str, flags: int, what: str = "") -> int:
        self.call("openat", directory, path, flags | os.O_CLOEXEC, what=what)
        return self.fresh()

    def close(self, fd: int) -> None:
        self.call("close", fd)
        self.open.discard(fd)

    def put(self, directory: int, path: str, content: str, what: str) -> None:
        """Write into a file."""
        fd = self.openat(directory, path, os.O_WRONLY, what)
        self.call("write", fd, content.encode(), len(content), what=what)
        self.close(fd)

    def send(self, *fds: int) -> None:
        """Pass descriptors to the host: see cmsg(3)."""
        length = 16 + 4 * len(fds)
        control = struct.pack(f"=Qii{len(fds)}i", length, socket.SOL_SOCKET, socket.SCM_RIGHTS, *fds)
        control += bytes(-len(control) % 8)
        message = Table((0, 0, Table((GO, len(GO))), 1, control, length, 0))
        self.call("sendmsg", WAY, message, 0)

    def execute(self, programs: Iterable[str], arguments: Iterable[str], env: Mapping[str, str]) -> None:
        """Become the first of these programs that there is."""
        after: list[bytes | int] = [*map(text, arguments), 0]
        environment = Table((*(text(f"{name}={value}") for name, value in env.items()), 0))
        *tried, last = programs
        for path in tried:
            self.call("execve", path, Table((text(path), *after)), environment, least=ANY)
        self.call("execve", last, Table((text(last), *after)), environment, what=f"execvp {last}")


def text(value: str) -> bytes:
    """As the kernel takes it. Raises ValueError where it cannot."""
    if "\0" in value:
        raise ValueError(f"a zero byte in {value!r}")
    return os.fsencode(value) + b"\0"
