"""A bash action against what it cannot be faster than, and against a fresh process per command.

    python -m bench.bash_action

All rows are measured in one run, in turns, so that a busy machine slows them alike: read them as ratios.
"""

import argparse
import asyncio
import os
import statistics
import subprocess
import termios
import time
from collections.abc import Awaitable, Callable

from ptyprocess import PtyProcess  # type: ignore[import-untyped]

from prorl_envs.sandbox.base import SandboxSpec
from prorl_envs.sandbox.bubblewrap import BubblewrapDriver
from prorl_envs.sandbox.runtime import python_runtime
from prorl_envs.tools.client import Toolbox

COMMAND = "echo hi"
TIMEOUT_S = 30.0

type Action = Callable[[], Awaitable[object]]


class RawPty:
    """The floor: a shell on a pseudo-terminal, a line written, its output read, nothing else."""

    def __init__(self) -> None:
        argv = ["bash", "--norc", "--noprofile", "--noediting", "-i"]
        self._shell = PtyProcess.spawn(argv, env={**os.environ, "PS1": "", "PS2": ""}, echo=False)
        settings = termios.tcgetattr(self._shell.fd)
        settings[1] &= ~termios.OPOST
        termios.tcsetattr(self._shell.fd, termios.TCSANOW, settings)

    async def action(self) -> None:
        """Run the command; blocks the loop, as the floor may."""
        os.write(self._shell.fd, COMMAND.encode() + b"\n")
        output = b""
        while not output.endswith(b"hi\n"):
            output += os.read(self._shell.fd, 4096)

    def close(self) -> None:
        self._shell.delayafterclose = 0
        self._shell.close(force=True)


async def fresh_on_host() -> None:
    """What a tool without a session does at least."""
    subprocess.run(["bash", "-c", COMMAND], stdout=subprocess.PIPE, check=True)  # noqa: ASYNC221 - measured


async def measure(actions: dict[str, Action], rounds: int, batch: int) -> dict[str, list[float]]:
    """Seconds of each action, taken in turns.

    Args:
        actions: by name.
        rounds: how often each has its turn.
        batch: repetitions per turn.
    """
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    for turn in range(rounds + 1):
        for name, action in actions.items():
            for _ in range(batch):
                started = time.perf_counter()
                await action()
                if turn:  # the first turn warms up
                    seconds[name].append(time.perf_counter() - started)
    return seconds


async def throughput(driver: BubblewrapDriver, sandboxes: int, commands: int) -> float:
    """Commands per second of many sandboxes at once, each running its commands one after the other."""
    boxes = [await Toolbox.open(await driver.start(SandboxSpec())) for _ in range(sandboxes)]

    async def session(box: Toolbox) -> None:
        for _ in range(commands):
            await box.bash(COMMAND, timeout_s=TIMEOUT_S)

    await asyncio.gather(*(box.bash(COMMAND, timeout_s=TIMEOUT_S) for box in boxes))
    started = time.perf_counter()
    await asyncio.gather(*map(session, boxes))
    elapsed = time.perf_counter() - started
    for box in boxes:
        await box.aclose()
        await box.sandbox.close()
    return sandboxes * commands / elapsed


async def bench(rounds: int, batch: int, sandboxes: int) -> None:
    """Measure and print."""
    driver = BubblewrapDriver()
    raw = RawPty()
    try:
        mounts, masks, _ = python_runtime()
        spec = SandboxSpec(mounts=mounts, masks=masks)
        box = await Toolbox.open(await driver.start(spec), python=True)
        actions: dict[str, Action] = {
            "raw pty, no sandbox (floor)": raw.action,
            "bash action in a sandbox": lambda: box.bash(COMMAND, timeout_s=TIMEOUT_S),
            "fresh bash, no sandbox": fresh_on_host,
            "fresh bash in a sandbox": lambda: box.run(["bash", "-c", COMMAND], timeout_s=TIMEOUT_S),
            "IPython cell `1+1`": lambda: box.python("1+1", timeout_s=TIMEOUT_S),
        }
        show(await measure(actions, rounds, batch))
        await box.aclose()
        rate = await throughput(driver, sandboxes, commands=4 * rounds)
        print(f"\n{sandboxes} sandboxes at once: {rate:,.0f} commands/s")
    finally:
        raw.close()
        await driver.aclose()


def show(seconds: dict[str, list[float]]) -> None:
    """Print the table; the first row is the unit of the ratios."""
    floor = statistics.median(next(iter(seconds.values())))
    print(f"{'`echo hi`':32}{'median ms':>12}{'p99 ms':>12}{'ratio':>10}")
    for name, values in seconds.items():
        median = statistics.median(values)
        p99 = statistics.quantiles(values, n=100)[98]
        print(f"{name:32}{median * 1e3:12.3f}{p99 * 1e3:12.3f}{median / floor:10.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description="A bash action against its floor and a fresh process.")
    parser.add_argument("--rounds", type=int, default=100, help="turns each row has")
    parser.add_argument("--batch", type=int, default=10, help="repetitions per turn")
    parser.add_argument("--sandboxes", type=int, default=32, help="sandboxes at once for the throughput")
    options = parser.parse_args()
    asyncio.run(bench(options.rounds, options.batch, options.sandboxes))


if __name__ == "__main__":
    main()
