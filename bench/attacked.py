"""Graded jobs beside sandboxes that attack shared resources of the kernel.

python -m bench.attacked                          # 15 jobs at a time beside 5 attackers; some minutes
python -m bench.attacked --rounds 5 --json attacked.json

Rounds with and without attackers alternate within one run. Each attacker runs one process at a time in its
own sandbox, gets a new sandbox when the old one is killed, and pauses before the next attempt. Every job runs
a command in a sandbox; the grade depends on the file that the command wrote. A wrong reward or a failed job
is an error.
"""

import argparse
import asyncio
import itertools
import json
import logging
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from bench.__main__ import machine
from bench.service import InstantModel, ShellEnvironment, ShellTask
from prorl_envs.cli.run_loop import run
from prorl_envs.config import ServiceSettings
from prorl_envs.conformance.attacks import ATTACKS, attack
from prorl_envs.env.base import Grade
from prorl_envs.env.node import Node
from prorl_envs.errors import SandboxError, ToolError
from prorl_envs.rollout.api.types import AgentLimits, GroupRequest, Result
from prorl_envs.rollout.service.service import RolloutService
from prorl_envs.sandbox.base import Driver, SandboxLimits, SandboxSpec
from prorl_envs.sandbox.drivers.select import choose_driver, make_driver
from prorl_envs.sandbox.filesystem.python_runtime import python_runtime
from prorl_envs.testing.tokenizer import builtin_renderer
from prorl_envs.tools.client.toolbox import Toolbox
from prorl_envs.tools.pool.sandbox_session import SandboxSession

#: Attacks, in the order in which attackers start them.
CHOSEN = (
    "epoll watches",
    "descriptors in flight",
    "memory files in flight",
    "unlinked files in flight",
    "first thread ended",
)
_LIMITS = SandboxLimits(memory_bytes=128 << 20, processes=64, open_files=8192, disk_bytes=64 << 20)
_COMMAND = {"command": "echo $((6 * 7)) > answer; sleep 0.2; cat answer"}
_TURNS = 20


class GradedEnvironment(ShellEnvironment):
    """Environment with a shell, graded by the file that the command writes."""

    async def grade(self, task: ShellTask, session: SandboxSession) -> Grade:
        """Return 1 if the answer is right."""
        done = await session.tools.run(["cat", "answer"], timeout_s=60)
        return Grade(reward=float(done.output == b"42\n"))


@dataclass(slots=True)
class Attackers:
    """The attackers of one round.

    Args:
        attempts: number of started programs, by attack.
        killed: number of stopped programs, by attack; the program or its whole sandbox was killed.
    """

    attempts: dict[str, int] = field(default_factory=dict)
    killed: dict[str, int] = field(default_factory=dict)

    async def go_on(self, driver: Driver, name: str, pause_s: float) -> None:
        """Attack repeatedly until the task is cancelled."""
        while True:
            self.attempts[name] = self.attempts.get(name, 0) + 1
            self.killed[name] = self.killed.get(name, 0) + await _is_stopped(driver, name)
            await asyncio.sleep(pause_s)


@dataclass(frozen=True, slots=True)
class Round:
    """One round of graded jobs.

    Args:
        attacked: whether attackers ran at the same time.
        job_s: seconds of each job in all stages.
        wrong: number of jobs with a wrong reward.
        failed: number of jobs without a reward.
    """

    attacked: bool
    job_s: list[float]
    wrong: int
    failed: int


async def _is_stopped(driver: Driver, name: str) -> bool:
    mounts, masks, env = python_runtime()
    spec = SandboxSpec(mounts=mounts, masks=masks, env=env, limits=_LIMITS)
    try:
        sandbox = await driver.start(spec)
        try:
            tools = await Toolbox.open(sandbox)
            try:
                done = await tools.run([sys.executable, "-I", "-c", attack(name)], timeout_s=120)
            finally:
                await tools.aclose()
        finally:
            await sandbox.close()
    except (SandboxError, ToolError):
        return True
    return b"held" not in done.output


@asynccontextmanager
async def attacking(driver: Driver, names: Sequence[str], pause_s: float) -> AsyncIterator[Attackers]:
    """Run attackers for the duration of the block."""
    attackers = Attackers()
    tasks = [asyncio.create_task(attackers.go_on(driver, name, pause_s)) for name in names]
    try:
        yield attackers
    finally:
        for task in tasks:
            task.cancel()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        for outcome in found:
            if not isinstance(outcome, asyncio.CancelledError):
                raise RuntimeError("an attacker ended by itself") from outcome


async def graded(
    service: RolloutService, groups: Sequence[GroupRequest], after: int, *, attacked: bool
) -> tuple[Round, int]:
    """Run the groups' jobs, and read the results after `after`. Return the round and the next cursor."""
    await service.groups.submit(list(groups))
    found: list[Result] = []
    while len(found) < len(groups):
        page = await service.feed.page(after, limit=64, wait_s=60)
        found += page.results
        after = page.next
    seconds = [result.timings.init_s + result.timings.run_s + result.timings.eval_s for result in found]
    wrong = sum(result.reward not in (None, 1.0) for result in found)
    return Round(attacked, seconds, wrong, sum(result.reward is None for result in found)), after


async def measure(options: argparse.Namespace, folder: Path) -> tuple[list[Round], Attackers]:
    """Run rounds with and without attackers in alternation."""
    driver = make_driver(options.driver or choose_driver(), folder)
    renderer, names = builtin_renderer(), itertools.count()
    model = InstantModel(renderer, {"tool": "bash", "arguments": _COMMAND})
    count = options.jobs
    settings = ServiceSettings(init=count, run=count, eval=count, max_jobs_with_sandbox=count)
    total, rounds, after = Attackers(), [], 0
    async with Node(driver, folder) as node:
        service = RolloutService(node, {"shell": GradedEnvironment}, renderer, model, settings)
        await service.start()
        try:
            for number in range(-1, 2 * options.rounds):  # the first round warms up
                groups = [
                    GroupRequest(
                        id=f"g{next(names)}",
                        environment="shell",
                        task={"id": "t", "instruction": "Answer."},
                        samples=1,
                        limits=AgentLimits(max_turns=_TURNS),
                    )
                    for _ in range(count * options.each)
                ]
                if number % 2 == 0 or number < 0:
                    done, after = await graded(service, groups, after, attacked=False)
                    rounds += [done] * (number >= 0)
                    continue
                async with attacking(driver, options.attacks, options.pause_s) as attackers:
                    done, after = await graded(service, groups, after, attacked=True)
                    rounds.append(done)
                for name, attempts in attackers.attempts.items():
                    total.attempts[name] = total.attempts.get(name, 0) + attempts
                    total.killed[name] = total.killed.get(name, 0) + attackers.killed.get(name, 0)
        finally:
            await service.stop()
    return rounds, total


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures of all rounds.

    Args:
        jobs: number of jobs in rounds with attackers.
        wrong: number of all jobs with a wrong reward.
        failed: number of all jobs without a reward.
        calm_s: median seconds of a job in rounds without attackers.
        attacked_s: median seconds of a job in rounds with attackers.
        ratio: `attacked_s` divided by `calm_s`.
        attempts: number of started programs, by attack.
        killed: number of stopped programs, by attack.
    """

    jobs: int
    wrong: int
    failed: int
    calm_s: float
    attacked_s: float
    ratio: float
    attempts: dict[str, int]
    killed: dict[str, int]


def summary(rounds: Sequence[Round], attackers: Attackers) -> Summary:
    """Compute the figures of all rounds."""
    calm = [seconds for each in rounds if not each.attacked for seconds in each.job_s]
    attacked = [seconds for each in rounds if each.attacked for seconds in each.job_s]
    calm_s, attacked_s = statistics.median(calm), statistics.median(attacked)
    return Summary(
        jobs=len(attacked),
        wrong=sum(each.wrong for each in rounds),
        failed=sum(each.failed for each in rounds),
        calm_s=calm_s,
        attacked_s=attacked_s,
        ratio=attacked_s / calm_s,
        attempts=attackers.attempts,
        killed=attackers.killed,
    )


def table(found: Summary) -> str:
    """Format the figures as Markdown."""
    lines = [
        "| | |\n|---|---|",
        f"| jobs beside attackers | {found.jobs} |",
        f"| wrong rewards, failures | {found.wrong}, {found.failed} |",
        f"| median seconds of a job, undisturbed | {found.calm_s:.2f} |",
        f"| beside attackers | {found.attacked_s:.2f} |",
        f"| ratio | {found.ratio:.2f} |",
    ]
    lines += [
        f"| {name}: attempts, stopped | {found.attempts[name]}, {found.killed.get(name, 0)} |"
        for name in found.attempts
    ]
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    """Create the parser of the options."""
    options = argparse.ArgumentParser(
        prog="python -m bench.attacked",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.add_argument("--driver", help="sandbox driver; by default the best one for this machine")
    options.add_argument("--jobs", type=int, default=15, help="concurrent jobs")
    options.add_argument("--each", type=int, default=2, help="jobs of a round, per concurrent job")
    options.add_argument("--rounds", type=int, default=3, help="rounds with attackers, and rounds without")
    attacks = ", ".join(ATTACKS)
    options.add_argument("--attacks", type=lambda text: text.split(","), default=CHOSEN, help=attacks)
    options.add_argument("--pause-s", type=float, default=1.0, help="seconds between two attempts")
    options.add_argument("--json", type=Path)
    return options


def main() -> None:
    options = parser().parse_args()
    logging.getLogger("prorl_envs").setLevel(logging.CRITICAL)
    print(machine(), "\n")
    with tempfile.TemporaryDirectory(prefix="prb-") as folder:
        found = summary(*run(measure(options, Path(folder))))
    print(table(found))
    if options.json:
        options.json.write_text(json.dumps({"machine": machine(), **asdict(found)}, indent=1))
    sys.exit(bool(found.wrong or found.failed))


if __name__ == "__main__":
    main()
