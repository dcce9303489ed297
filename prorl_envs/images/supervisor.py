"""Runs one image build so that it ends with whoever asked for it, whatever way they end.

    python -I -m prorl_envs.images.supervisor DIRECTORY identity|same COMMAND [ARGUMENT ...]

Standard input is the leash: at its end (its other end was closed, or its process killed) everything that the
command started is killed and DIRECTORY removed. `identity` runs the command in a user namespace that maps
every number to itself: root of a container has all capabilities there, on which `apptainer build` insists.

A program of its own: nothing here runs in the service's process, and it imports little.
"""

import os
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from prorl_envs.sandbox.files import remove_tree
from prorl_envs.sandbox.syscalls import PR_SET_CHILD_SUBREAPER, prctl

#: One less than all: Apptainer takes a map of all numbers for no namespace at all.
_ALL_NUMBERS = 2**32 - 2


def main(arguments: list[str]) -> int:
    """Run the command to its end or to the leash's; returns the exit status as a shell has it."""
    directory, namespace, *command = arguments
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    pid = _start(command, identity=namespace == "identity")
    pidfd = os.pidfd_open(pid)
    ready, _, _ = select.select([0, pidfd], [], [])
    finished = pidfd in ready
    if not finished:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    _end_all()
    if not finished:
        remove(Path(directory))
    return status if status >= 0 else 128 - status


def remove(directory: Path) -> None:
    """Remove a build's directory, also what belongs to the subordinate users of its namespace."""
    try:
        remove_tree(directory)
    except OSError:
        # Only who has those numbers mapped may remove it: the same map as in Apptainer's own namespace.
        unshare = shutil.which("unshare") or "/usr/bin/unshare"
        program = [unshare, "--map-root-user", "--map-auto", "rm", "-rf", "--", str(directory)]
        subprocess.run(program, check=False, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _start(command: list[str], *, identity: bool) -> int:
    mapped, done = os.pipe()
    unshared, say = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(done)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            if identity:
                os.unshare(os.CLONE_NEWUSER)
                os.write(say, b".")
                os.read(mapped, 1)
            os.execvp(command[0], command)
        except OSError as error:
            os.write(2, f"{command[0]}: {error.strerror}\n".encode())
        finally:
            os._exit(127)
    os.close(say)
    if identity and os.read(unshared, 1):
        for kind in ("uid", "gid"):
            Path(f"/proc/{pid}/{kind}_map").write_text(f"0 0 {_ALL_NUMBERS}")
    for end in (mapped, done, unshared):
        os.close(end)
    return pid


def _end_all() -> None:
    """Kill what is left. Orphans become our children, so none is left when we have none."""
    while True:
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        for child in children:
            os.kill(int(child), signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
