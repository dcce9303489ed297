"""Time and memory of checkpoints and of the sandboxes that start from them, compared with `cp -a`.

python -m bench.branch
python -m bench.branch --rounds 5 --forks 20 --depth 20
"""

import argparse
import asyncio
import contextlib
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

from bench.__main__ import machine
from bench.memory import Memory
from prorl_envs.cli.run_loop import run
from prorl_envs.env.node import Node
from prorl_envs.env.sandboxed import sandbox_session
from prorl_envs.sandbox.base import Checkpoint, SandboxSpec
from prorl_envs.tools.client.python import PythonEngine
from prorl_envs.tools.pool.sandbox_session import SandboxSession

FILES, FILE_BYTES = 5_000, 2_000
#: Makes the files of the workspace, in directories of a hundred.
WORKSPACE = (
    f"for d in $(seq {FILES // 100}); do mkdir d$d; for f in $(seq 100); do"
    f" head -c {FILE_BYTES} /dev/zero > d$d/f$f; done; done"
)
#: A warm session: 100 MB of one array, or of bytes where there is no numpy.
WARM = """
try:
    import numpy
    data = numpy.ones(100 * 2**17)
except ImportError:
    data = bytearray(b"1") * (100 * 2**20)
print(type(data).__name__)
"""


@contextlib.asynccontextmanager
async def branch(
    node: Node, checkpoint: Checkpoint, spec: SandboxSpec, python: PythonEngine = PythonEngine.NONE
) -> AsyncIterator[SandboxSession]:
    """Start a sandbox from a checkpoint."""
    async with sandbox_session(node, replace(spec, checkpoint=checkpoint), python=python) as session:
        yield session


async def said(session: SandboxSession, command: str) -> str:
    """Return the output of a command in the shell of the session."""
    return (await session.tools.bash(command, timeout_s=60)).text


async def workspace(node: Node, rounds: int) -> None:
    """Measure a checkpoint of a workspace with many files, and the first answer after it, beside `cp -a`."""
    took: dict[str, list[float]] = {"checkpoint": [], "rollback": [], "cp": []}
    async with sandbox_session(node, SandboxSpec()) as session:
        await said(session, WORKSPACE)
        with tempfile.TemporaryDirectory(prefix="prb-") as scratch:
            source = Path(scratch) / "source"
            for number in range(FILES):
                place = source / f"d{number // 100}"
                place.mkdir(parents=True, exist_ok=True)
                (place / f"f{number % 100}").write_bytes(bytes(FILE_BYTES))
            for number in range(rounds):
                await said(session, f"echo {number} > d1/f1")
                began = time.perf_counter()
                checkpoint = await session.tools.checkpoint()
                took["checkpoint"].append(time.perf_counter() - began)
                began = time.perf_counter()
                async with branch(node, checkpoint, session.sandbox.spec) as restored:
                    answer = await said(restored, "cat d1/f1")
                    took["rollback"].append(time.perf_counter() - began)
                    assert answer == f"{number}\n", answer
                await checkpoint.close()
                began = time.perf_counter()
                subprocess.run(["cp", "-a", source, Path(scratch) / f"copy{number}"], check=True)
                took["cp"].append(time.perf_counter() - began)
                os.sync()  # the copies that are written later would delay the next round
    middle = {name: statistics.median(values) for name, values in took.items()}
    print(f"| a workspace with {FILES:,} files | ms, median | p95 | `cp -a` takes |\n|---|---|---|---|")
    for name, what in (
        ("checkpoint", "checkpoint"),
        ("rollback", "rollback, to the first answer"),
        ("cp", "`cp -a`"),
    ):
        late = sorted(took[name])[int(0.95 * (rounds - 1))]
        ratio = middle["cp"] / middle[name]
        print(f"| {what} | {1000 * middle[name]:.1f} | {1000 * late:.1f} | {ratio:.1f} times as long |")


async def forks(node: Node, count: int) -> None:
    """Measure many sandboxes that start from one warm Python session."""
    engine = PythonEngine.FORKED
    async with sandbox_session(node, SandboxSpec(), python=engine) as session:
        kind = (await session.tools.python(WARM, timeout_s=60)).text.strip()
        checkpoint = await session.tools.checkpoint()
        async with contextlib.AsyncExitStack() as stack:
            before = Memory.now()
            began = time.perf_counter()
            opened = await asyncio.gather(
                *(
                    stack.enter_async_context(branch(node, checkpoint, session.sandbox.spec, engine))
                    for _ in range(count)
                )
            )
            answers = await asyncio.gather(
                *(one.tools.python("print(int(data[-1]))", timeout_s=60) for one in opened)
            )
            took, after = time.perf_counter() - began, Memory.now()
            assert {answer.text for answer in answers} <= {"1\n", "49\n"}, answers[0].text
        await checkpoint.close()
    each = (before.available - after.available) / count / 1e6
    print(
        f"\n{count} sandboxes from a Python session with 100 MB ({kind}): {took:.2f} s to all first answers,"
        f" {each:.1f} MB each of the machine's memory"
    )


async def chain(node: Node, depth: int) -> None:
    """Measure a chain in which each sandbox starts from a checkpoint of the one before."""
    began = time.perf_counter()
    async with sandbox_session(node, SandboxSpec()) as session:
        spec = session.sandbox.spec
        await said(session, "echo 0 > log; n=0")
        checkpoint = await session.tools.checkpoint()
    for number in range(1, depth + 1):
        async with branch(node, checkpoint, spec) as session:
            text = await said(session, "n=$((n + 1)); echo $n >> log; wc -l < log; echo $n")
            assert text.split() == [str(number + 1), str(number)], (number, text)
            following = await session.tools.checkpoint()
        await checkpoint.close()
        checkpoint = following
    await checkpoint.close()
    each = (time.perf_counter() - began) / depth
    print(f"\nA chain of {depth} branches: {1000 * each:.1f} ms each, all answers right")


async def bench(rounds: int, count: int, depth: int) -> None:
    print(machine(), "\n")
    async with Node.local() as node:
        await workspace(node, rounds)
        await forks(node, count)
        await chain(node, depth)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="rounds of the workspace's figures")
    parser.add_argument("--forks", type=int, default=100, help="sandboxes from one Python session")
    parser.add_argument("--depth", type=int, default=200, help="branches of the chain")
    options = parser.parse_args()
    run(bench(options.rounds, options.forks, options.depth))


if __name__ == "__main__":
    main()
