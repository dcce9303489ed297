"""Promises about the close of a sandbox: no process or file survives it."""

import asyncio
import json
import os
import secrets
import subprocess
import sys
from pathlib import Path

from prorl_envs.conformance.box import Probe
from prorl_envs.conformance.host import SECRET, eventually, marked, showing
from prorl_envs.conformance.promise import Promises, expect, same
from prorl_envs.conformance.world import PromiseContext
from prorl_envs.errors import SandboxError, ToolError

promises = Promises("end")

_NO_PID_NAMESPACE = {"local": "has no pid namespace that ends with the service"}


@promises.fresh(
    "END-004", "A call that runs while the sandbox is closed fails with an error.", needs=("sleep",)
)
async def call_under_way(box: Probe) -> None:
    call = asyncio.ensure_future(box.run("sleep 600"))
    await asyncio.wait([call], timeout=0.2)
    await box.sandbox.close()
    (outcome,) = await asyncio.gather(call, return_exceptions=True)
    expect(isinstance(outcome, SandboxError | ToolError), f"it ended with {outcome!r}")


async def check_none_survives(world: PromiseContext, script: str, count: int) -> None:
    """Start a script's processes, close the sandbox, and check at once that none of them survived."""
    async with world.fresh() as box, world.lingering(box, script, count=count) as mark:
        await box.sandbox.close()
        survivors = marked(mark)
        expect(not survivors, f"{len(survivors)} processes survived")


_TRICKS = (
    ("END-006", "A process in the foreground", "sleep 600; :", 1, ("sleep",)),
    ("END-007", "A process in the background", "sleep 600 & sleep 600 & wait", 2, ("sleep",)),
    ("END-008", "A process in a session of its own", "setsid sleep 600 & wait", 2, ("sleep", "setsid")),
    (
        "END-009",
        "A daemon that forked twice",
        "(setsid sh -c 'sleep 600 & sleep 600' &) ; sleep 600",
        3,
        ("sleep", "setsid"),
    ),
    ("END-010", "A process under nohup", "nohup sleep 600 & wait", 2, ("sleep", "nohup")),
    (
        "END-011",
        "A process that ignores every signal it can",
        "trap '' HUP INT QUIT TERM USR1 USR2 TSTP TTIN TTOU; sleep 600; sleep 600",
        1,
        ("sleep",),
    ),
    ("END-012", "A stopped process", "sleep 600 & kill -STOP $!; sleep 600; :", 2, ("sleep",)),
    (
        "END-013",
        "A process that starts itself again and again",
        "while :; do (sleep 0.01); done",
        1,
        ("sleep",),
    ),
    (
        "END-014",
        "A process whose directory is gone",
        "mkdir d; cd d; rmdir ../d; sleep 600; :",
        1,
        ("sleep", "mkdir", "rmdir"),
    ),
    (
        "END-015",
        "Two hundred processes",
        "for i in 1 2 3 4 5 6 7 8 9 10; do for j in 1 2 3 4 5 6 7 8 9 10 "
        "11 12 13 14 15 16 17 18 19 20; do sleep 600 & done; done; wait",
        200,
        ("sleep",),
    ),
)


def _add_trick(id_: str, subject: str, script: str, count: int, needs: tuple[str, ...]) -> None:
    async def keep(world: PromiseContext) -> None:
        await check_none_survives(world, script, count)

    promises.add(id_, f"{subject} does not survive the close.", needs=needs)(keep)


for _trick in _TRICKS:
    _add_trick(*_trick)


@promises.add("END-016", "Closing removes links of the workspace, but not their targets.", needs=("ln",))
async def links(world: PromiseContext) -> None:
    kept = world.path / f"kept-{secrets.token_hex(4)}"
    kept.mkdir()
    (kept / "file").write_text("kept")
    async with world.fresh() as box:
        await box.sh(f"ln -s {kept} directory; ln -s {kept}/file file; ln -s / root")
    same((kept / "file").read_text(), "kept")


@promises.add(
    "END-017", "A tree that is deep, unreadable and full of odd names is removed.", needs=("mkdir", "chmod")
)
async def odd_tree(world: PromiseContext) -> None:
    script = (
        "d=dddddddddddddddddddd; i=0; while [ $i -lt 300 ]; do mkdir $d && cd $d; i=$((i+1)); done; "
        "cd \"$HOME\"; mkdir shut; : > 'shut/a\nb'; : > \"shut/$(printf '\\377')\"; chmod 0 shut"
    )
    async with world.fresh() as box:
        await box.sh(script)
        workspace = box.sandbox.workspace
    expect(not workspace.exists(), "the workspace is there")


class Victim:
    """Service with one sandbox, in a separate process that is killed."""

    def __init__(self, world: PromiseContext, root: Path, *, look: str = "", linger: str) -> None:
        self.mark = secrets.token_hex(8)
        request = {
            "driver": world.subject.driver,
            "image": str(world.subject.image or ""),
            "root": str(root),
            "look": look,
            "linger": linger,
            "mark": self.mark,
        }
        self._request = json.dumps(request).encode() + b"\n"

    async def run_until_killed(self, count: int) -> str:
        """Start the service, wait for its sandbox's processes, and kill it. Return the output of `look`."""
        service = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "prorl_envs.conformance.victim",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, SECRET: os.environ[SECRET]},
        )
        try:
            assert service.stdin is not None and service.stdout is not None
            service.stdin.write(self._request)
            line = await service.stdout.readline()
            expect(bool(line), "the service ended before its time")
            expect(await eventually(lambda: len(marked(self.mark)) >= count), "its processes did not start")
        finally:
            if service.returncode is None:
                service.kill()
            await service.communicate()
        seen: str = json.loads(line)
        return seen


@promises.add(
    "END-018",
    "Nothing survives a kill -9 of the service, and the next driver removes its files.",
    needs=("sleep", "setsid"),
    exempt=_NO_PID_NAMESPACE,
)
async def killed_service(world: PromiseContext) -> None:
    async with world.own_driver() as (driver, root):
        victim = Victim(world, root, linger="setsid sh -c 'trap \"\" TERM HUP; sleep 600' & sleep 600")
        await victim.run_until_killed(3)
        expect(
            await eventually(lambda: not marked(victim.mark)), f"{len(marked(victim.mark))} processes live on"
        )
        await (await driver.start(world.spec())).close()  # removes old files; `own_driver` checks that


@promises.add(
    "END-019", "A service killed while a sandbox starts leaves no process.", exempt=_NO_PID_NAMESPACE
)
async def killed_early(world: PromiseContext) -> None:
    for delay_ms in (150, 300, 450, 600):
        root = world.path / secrets.token_hex(4)
        root.mkdir()
        victim = Victim(world, root, linger=":")
        running = asyncio.ensure_future(victim.run_until_killed(1000))
        await asyncio.wait([running], timeout=delay_ms / 1000)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        expect(await gone(root.name), f"left: {showing(root.name)}")


async def gone(name: str) -> bool:
    """Return whether all processes that show the directory `name` exit soon."""
    return await eventually(lambda: not showing(name))
