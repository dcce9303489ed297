"""Stopping with the parent process."""

import os
import signal
import subprocess
import sys

CHILD = """
import os, signal
from prorl_envs.nemo.process import die_with_parent
die_with_parent()
os.write(1, b"r")
signal.pause()
"""


def test_a_server_stops_when_its_parent_shell_is_killed() -> None:
    """The child has the write end of the pipe, so a read to the end waits for the child's exit."""
    shell = subprocess.Popen(
        # The second command keeps the shell from replacing itself with Python.
        ["/bin/sh", "-c", f'"{sys.executable}" -c "$0"; true', CHILD],
        stdout=subprocess.PIPE,
    )
    assert shell.stdout is not None
    with shell.stdout as output:
        assert output.read(1) == b"r"
        os.kill(shell.pid, signal.SIGKILL)
        shell.wait()
        assert output.read() == b""
