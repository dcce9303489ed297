"""Writer of the system calls of a launch program (see `elf.py` and `launcher.py`)."""

import os
import socket
import struct
from collections.abc import Iterable, Mapping

from prorl_envs.sandbox.launcher.elf import ANY, FAIL, WAY, Argument, Call, Jump, Label, Step, Table

#: Initial descriptors: the standard streams are a socket, and the sandbox stops once its peer closes; the
#: next ones are the socket to the host (`WAY`) and the directory of the sandbox.
LIFETIME, OWN = 0, 4
#: Sent by the host to start the launch, and again to start the shell. Sent by the launcher, with descriptors,
#: once each is done.
GO = b"g"
#: The working directory, for calls that take a directory descriptor.
HERE = -100


class Writer:
    """Collector of steps, which tracks the descriptors that are open after them."""

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
        """Return the number of the next new descriptor, and mark it as open."""
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
        """Write `content` to a file."""
        fd = self.openat(directory, path, os.O_WRONLY, what)
        self.call("write", fd, content.encode(), len(content), what=what)
        self.close(fd)

    def try_to_put(self, directory: int, path: str, content: str, fd: int) -> None:
        """Write `content` to a file if it exists and may be written.

        Args:
            fd: the lowest free number. If the file cannot be opened, the other calls fail, which is ignored.
        """
        self.call("openat", directory, path, os.O_WRONLY | os.O_CLOEXEC, least=ANY)
        self.call("write", fd, content.encode(), len(content), least=ANY)
        self.call("close", fd, least=ANY)

    def send(self, *fds: int) -> None:
        """Pass descriptors to the host: see cmsg(3)."""
        length = 16 + 4 * len(fds)
        control = struct.pack(f"=Qii{len(fds)}i", length, socket.SOL_SOCKET, socket.SCM_RIGHTS, *fds)
        control += bytes(-len(control) % 8)
        message = Table((0, 0, Table((GO, len(GO))), 1, control, length, 0))
        self.call("sendmsg", WAY, message, 0)

    def execute(self, programs: Iterable[str], arguments: Iterable[str], env: Mapping[str, str]) -> None:
        """Execute the first of these programs that exists."""
        after: list[bytes | int] = [*map(text, arguments), 0]
        environment = Table((*(text(f"{name}={value}") for name, value in env.items()), 0))
        *tried, last = programs
        for path in tried:
            self.call("execve", path, Table((text(path), *after)), environment, least=ANY)
        self.call("execve", last, Table((text(last), *after)), environment, what=f"execvp {last}")


def text(value: str) -> bytes:
    """Return the string as the kernel takes it. Raises ValueError if it contains a zero byte."""
    if "\0" in value:
        raise ValueError(f"a zero byte in {value!r}")
    return os.fsencode(value) + b"\0"
