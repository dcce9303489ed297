"""Supervisor of one image build: kills the build when its requester exits, for whatever reason.

    python -I -m prorl_envs.images.supervisor DIRECTORY identity|same COMMAND [ARGUMENT ...]

At end of file on standard input (the requester has closed its end, or was killed), the supervisor kills all
processes of the command and removes DIRECTORY. `identity` runs the command in a user namespace that maps
every id to itself: there, a container's root has all capabilities, which `apptainer build` requires.

This is a separate program. Nothing here runs in the service's process, and it imports little.
"""

import os
import select
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

from prorl_envs.sandbox.filesystem.directories import remove_tree
from prorl_envs.sandbox.linux.children import kill_children
from prorl_envs.sandbox.linux.syscall_wrappers import PR_SET_CHILD_SUBREAPER, prctl

#: One id less than all: Apptainer sees no namespace if the map has all ids.
_MAPPED_IDS = 2**32 - 2


def main(arguments: list[str]) -> int:
    """Run the command until it exits or standard input ends; return the exit status as a shell does."""
    directory, namespace, *command = arguments
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    wakeup, woken = socket.socketpair()
    wakeup.setblocking(False)
    woken.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
    pid = _start(command, identity=namespace == "identity")
    status: int | None = None
    while status is None and 0 not in select.select([0, wakeup.fileno()], [], [])[0]:
        wakeup.recv(4096)
        status = _reap(pid)
    finished = status is not None
    if status is None:
        os.kill(pid, signal.SIGKILL)  # not reaped yet, so the pid is still the command's
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    kill_children()
    if not finished:
        remove(Path(directory))
    return status if status >= 0 else 128 - status


def remove(directory: Path) -> None:
    """Remove a build's directory, including files of subordinate users."""
    try:
        remove_tree(directory)
    except OSError:
        # Only root of a namespace that maps the subordinate ids, such as Apptainer's, can remove such files.
        unshare = shutil.which("unshare") or "/usr/bin/unshare"
        program = [unshare, "--map-root-user", "--map-auto", "rm", "-rf", "--", str(directory)]
        subprocess.run(program, check=False, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _start(command: list[str], *, identity: bool) -> int:
    mapped, write_mapped = os.pipe()
    unshared, write_unshared = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(write_mapped)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            if identity:
                os.unshare(os.CLONE_NEWUSER)
                os.write(write_unshared, b".")
                os.read(mapped, 1)
            os.execvp(command[0], command)
        except OSError as error:
            os.write(2, f"{command[0]}: {error.strerror}\n".encode())
        finally:
            os._exit(127)
    os.close(write_unshared)
    if identity and os.read(unshared, 1):
        for kind in ("uid", "gid"):
            Path(f"/proc/{pid}/{kind}_map").write_text(f"0 0 {_MAPPED_IDS}")
    for end in (mapped, write_mapped, unshared):
        os.close(end)
    return pid


def _reap(command: int) -> int | None:
    """Reap all exited children, including adopted ones. Return the command's status if it was reaped.

    A pid namespace stays alive until parents outside have reaped its processes.
    """
    status: int | None = None
    while True:
        try:
            pid, code = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status
        if pid == 0:
            return status
        if pid == command:
            status = os.waitstatus_to_exitcode(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
