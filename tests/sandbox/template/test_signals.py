"""Programs in a sandbox start with default signals, even if the service's parent ignored or blocked some."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import existing_driver

#: A small service: prints the signals that a program of each tool ignores and blocks.
SERVICE = """\
import asyncio, json, shlex, signal, sys
from prorl_envs.tools.client.python import PythonEngine
from prorl_envs.sandbox.base import SandboxSpec
from prorl_envs.sandbox.drivers.select import make_driver
from prorl_envs.sandbox.filesystem.python_runtime import python_runtime
from tests.support.sandbox_entry import LIGHT_TEMPLATES
from prorl_envs.tools.client.toolbox import Toolbox

LOOK = ["grep", "-E", "^Sig(Ign|Blk)", "/proc/self/status"]
CELL = f"import subprocess; print(subprocess.check_output({LOOK!r}, text=True))"

async def main():
    driver = make_driver(sys.argv[1], templates=LIGHT_TEMPLATES)
    try:
        mounts, masks, env = python_runtime()
        sandbox = await driver.start(SandboxSpec(mounts=mounts, masks=masks, env=env))
        tools = await Toolbox.open(sandbox, python=PythonEngine.FORKED)
        said = [
            (await tools.run(LOOK, timeout_s=60)).output.decode(),
            (await tools.bash(shlex.join(LOOK), timeout_s=60)).text,
            (await tools.bash(shlex.join(LOOK), timeout_s=60, session="further")).text,
            (await tools.python(CELL, timeout_s=60)).text,
        ]
        await tools.aclose()
    finally:
        await driver.aclose()
    print(json.dumps([[int(word, 16) for word in text.split()[1::2]] for text in said]))

blocked = {signal.SIGUSR2, signal.SIGALRM, signal.SIGTERM, signal.SIGRTMIN + 4}
signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
asyncio.run(main())
"""
#: As a script starts a service that must survive its terminal.
LAUNCH = "trap '' HUP INT QUIT USR1; exec nohup setsid -w \"$@\""
#: Signals 32 and 33, which the C library reserves.
OF_THE_LIBRARY = 0b11 << 31


@pytest.mark.parametrize("name", ["bubblewrap", "apptainer", "apptainer-instance"])
def test_programs_of_a_service_under_nohup_have_default_signals(name: str, run_dir: Path) -> None:
    command = [sys.executable, "-c", SERVICE, existing_driver(name)]
    done = subprocess.run(
        ["sh", "-c", LAUNCH, "sh", *command], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [[mask & ~OF_THE_LIBRARY for mask in masks] for masks in found] == [[0, 0]] * 4


#: Ignores and blocks signals, then starts one program by `spawn` and another after `restore_signals`.
ODD = """\
import os, signal, sys
from prorl_envs.sandbox.template.enter import restore_signals
from prorl_envs.sandbox.template.spawn import spawn
for number in (signal.SIGHUP, signal.SIGCHLD, signal.SIGRTMIN + 1):
    signal.signal(number, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGUSR2})
look = ["/bin/grep", "grep", "-E", "^Sig(Ign|Blk)", "/proc/self/status"]
if sys.argv[1] == "restore":
    restore_signals()
    os.execv(look[0], look[1:])
signal.signal(signal.SIGCHLD, signal.SIG_DFL)
sys.exit(os.waitpid(spawn(look, [1]), 0)[1])
"""


@pytest.mark.parametrize("way", ["spawn", "restore"])
def test_ignored_and_blocked_signals_are_not_inherited(way: str) -> None:
    done = subprocess.run([sys.executable, "-c", ODD, way], capture_output=True, text=True, check=True)
    blocked, ignored = (int(line.split()[1], 16) & ~OF_THE_LIBRARY for line in done.stdout.splitlines())
    # Python restores the signals that it ignores itself when it starts programs; `execv` does not.
    own = {signal.SIGPIPE, signal.SIGXFSZ} if way == "restore" else set()
    assert (blocked, ignored) == (0, sum(1 << number - 1 for number in own))
