"""Lower bounds: minimal sessions.

pty     a bash on a pseudo-terminal without a sandbox; each action writes a line and reads the output
bwrap   a bash on pipes in a sandbox of bubblewrap, with the namespaces of our sandboxes
"""

import os
import subprocess
import sys
import termios

from ptyprocess import PtyProcess  # type: ignore[import-untyped]

from bench.subjects.protocol import Session, bash_task, serve
from prorl_envs.sandbox.drivers.probe import find_bwrap

SYSTEM = [path for path in ("/usr", "/etc") if os.path.isdir(path)]  # noqa: PTH112
LINKS = [path for path in ("/bin", "/sbin", "/lib", "/lib64") if os.path.islink(path)]  # noqa: PTH114


class Pty:
    def __init__(self) -> None:
        argv = ["bash", "--norc", "--noprofile", "--noediting", "-i"]
        self._shell = PtyProcess.spawn(argv, env={**os.environ, "PS1": "", "PS2": ""}, echo=False)
        settings = termios.tcgetattr(self._shell.fd)
        settings[1] &= ~termios.OPOST
        termios.tcsetattr(self._shell.fd, termios.TCSANOW, settings)

    def act(self, text: str) -> str:
        os.write(self._shell.fd, text.encode() + b"\n")
        output = b""
        while not output.endswith(b"\n"):
            output += os.read(self._shell.fd, 4096)
        return output.decode()

    def close(self) -> None:
        self._shell.delayafterclose = 0
        self._shell.close(force=True)


class Bwrap:
    def __init__(self) -> None:
        system = [word for path in SYSTEM for word in ("--ro-bind", path, path)]
        links = [word for path in LINKS for word in ("--symlink", os.readlink(path), path)]  # noqa: PTH115
        namespaces = [f"--unshare-{name}" for name in ("user", "pid", "net", "ipc", "uts", "cgroup")]
        argv = [
            *(str(find_bwrap()), *namespaces, "--new-session", "--as-pid-1", "--clearenv", *system, *links),
            *("--setenv", "PATH", "/usr/bin:/bin", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"),
            *("bash", "--norc", "--noprofile"),
        ]
        self._shell = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)

    def act(self, text: str) -> str:
        assert self._shell.stdin is not None and self._shell.stdout is not None
        self._shell.stdin.write(text.encode() + b"\n")
        output = b""
        while not output.endswith(b"\n"):
            output += self._shell.stdout.read(4096)
        return output.decode()

    def close(self) -> None:
        assert self._shell.stdin is not None and self._shell.stdout is not None
        self._shell.stdin.close()  # bash exits; it is the sandbox's first process, so all others are killed
        self._shell.stdout.close()
        self._shell.wait()


KINDS: dict[str, type[Session]] = {"pty": Pty, "bwrap": Bwrap}


class Floor:
    blocking = True
    task = staticmethod(bash_task)

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def prepare(self) -> str:
        program = str(find_bwrap()) if self._kind == "bwrap" else "bash"
        shown = subprocess.run([program, "--version"], stdout=subprocess.PIPE, check=True, text=True).stdout
        return shown.splitlines()[0]

    def open(self) -> Session:
        return KINDS[self._kind]()

    def pids(self) -> list[int]:
        return []

    def close(self) -> None:
        pass


if __name__ == "__main__":
    serve(Floor(sys.argv[1]))
