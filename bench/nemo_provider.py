"""NeMo Gym's sandbox API with our provider and with its Apptainer provider, in alternation on one image.

python -m bench.nemo_provider               # in an environment with NeMo Gym; needs apptainer and busybox
"""

# mypy: disable-error-code="import-not-found,import-untyped"

import argparse
import asyncio
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from nemo_gym.sandbox import AsyncSandbox, SandboxSpec

#: As root, Apptainer needs the option that drops root's privileges.
PROVIDERS: dict[str, dict[str, Any]] = {
    "prorl": {},
    "apptainer": {"create": {"extra_start_args": ["--userns"]}},
}
APPLETS = ("sh", "stty", "true", "echo", "cat", "cp", "mkdir", "printf", "sleep", "rm", "tail", "head")

type Action = Callable[[Any], Awaitable[None]]


def build_image(folder: Path) -> Path:
    """Build a SIF that contains only busybox."""
    root, sif = folder / "root", folder / "image.sif"
    for name in ("bin", "tmp", "etc", "proc", "sys", "dev", "root", "var/tmp", "home"):
        (root / name).mkdir(parents=True)
    busybox = shutil.which("busybox")
    if busybox is None:
        raise SystemExit("error: there is no busybox\nhint: install busybox-static")
    shutil.copy(busybox, root / "bin/busybox")
    for name in APPLETS:
        (root / "bin" / name).symlink_to("busybox")
    for name in ("passwd", "group", "hosts", "resolv.conf"):
        (root / "etc" / name).touch()
    subprocess.run(["apptainer", "--silent", "build", str(sif), str(root)], check=True)
    return sif


async def single(box: Any) -> None:
    done = await box.exec("true")
    assert done.return_code == 0, done


async def concurrent(box: Any, commands: int = 64) -> None:
    """Run concurrent commands."""
    for done in await asyncio.gather(*(box.exec("true") for _ in range(commands))):
        assert done.return_code == 0, done


class Session:
    """Shell that stays open. The Apptainer provider has none, so there each command is a process."""

    def __init__(self) -> None:
        self._shells: dict[Any, Any] = {}

    async def command(self, box: Any) -> None:
        if box not in self._shells:
            try:
                self._shells[box] = await box.pty.create()
                await self._shells[box].write(b"stty -echo; PS1=\n")
            except NotImplementedError:
                self._shells[box] = None
        shell, said = self._shells[box], b""
        if shell is None:
            return await single(box)
        await shell.write(b"true; echo status-$?\n")
        while b"status-0" not in said:
            said += await shell.read()
        return None


async def timed(action: Action, box: Any) -> float:
    started = time.perf_counter()
    await action(box)
    return time.perf_counter() - started


async def bench(image: Path, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return the seconds of each action by provider, measured in alternation."""
    seconds: dict[str, dict[str, list[float]]] = {}
    async with AsyncExitStack() as exits:
        boxes = {}
        for name, config in PROVIDERS.items():
            for turn in range(6):
                box = AsyncSandbox({name: config}, SandboxSpec(image=str(image)))
                started = time.perf_counter()
                await exits.enter_async_context(await box.start())
                if turn:  # the first sandbox starts shared processes
                    seconds.setdefault("start to ready", {}).setdefault(name, []).append(
                        time.perf_counter() - started
                    )
            boxes[name] = box
        actions: dict[str, Action] = {"`true`": single, "64 x `true` at once": concurrent}
        if hasattr(boxes["prorl"], "pty"):  # NeMo Gym 0.7
            actions["`true` in a session"] = Session().command
        for label, action in actions.items():
            turns = max(rounds // 10, 3) if action is concurrent else rounds
            for turn in range(turns + 1):
                for name, box in boxes.items():
                    taken = await timed(action, box)
                    if turn:
                        seconds.setdefault(label, {}).setdefault(name, []).append(taken)
    return seconds


def show(seconds: dict[str, dict[str, list[float]]]) -> None:
    print(f"{'median ms':24}" + "".join(f"{name:>12}" for name in PROVIDERS) + f"{'ratio':>10}")
    for label, by_name in seconds.items():
        medians = [statistics.median(by_name[name]) for name in PROVIDERS]
        row = "".join(f"{median * 1e3:12.2f}" for median in medians)
        print(f"{label:24}{row}{medians[1] / medians[0]:10.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Compare our NeMo Gym provider with NeMo Gym's Apptainer provider."
    )
    parser.add_argument("--rounds", type=int, default=50, help="repetitions of an action")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        show(asyncio.run(bench(build_image(Path(folder)), options.rounds)))


if __name__ == "__main__":
    main()
