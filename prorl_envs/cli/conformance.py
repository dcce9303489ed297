"""`prorl-envs conformance`: try every promise against a driver on this machine."""

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from prorl_envs.cli.console import err, out
from prorl_envs.cli.trials import trials_table
from prorl_envs.conformance.promise import Promise
from prorl_envs.conformance.runner import Outcome, State, run_suite
from prorl_envs.conformance.subject import DRIVERS, Subject
from prorl_envs.errors import InputError


def subject(driver: str, image: Path | None) -> Subject:
    """What the options name.

    Raises:
        InputError: there is no such driver.
    """
    if driver not in DRIVERS:
        raise InputError(f"there is no driver {driver!r}", hint=f"there are: {', '.join(DRIVERS)}")
    return Subject(driver=driver, make=DRIVERS[driver], image=image)


async def conformance(against: Subject, promises: Sequence[Promise], report: Path | None) -> bool:
    """Try promises and say what came out.

    Args:
        against: the driver and its image.
        promises: which.
        report: where the outcomes go as JSON, too.

    Returns:
        whether none is broken.
    """

    def note(outcome: Outcome) -> None:
        if outcome.state is State.BROKEN:
            err.print(f"{outcome.id} is broken: {outcome.reason}")

    outcomes = await run_suite(against, promises, note)
    counts = Counter(outcome.state for outcome in outcomes)
    out.print(trials_table("promise", ((o.id, o.promise, o.state, o.reason, o.seconds) for o in outcomes)))
    out.print(", ".join(f"{counts[state]} {state}" for state in State))
    if report is not None:
        content = {
            "driver": against.driver,
            "image": str(against.image or ""),
            "outcomes": [asdict(outcome) for outcome in outcomes],
        }
        await asyncio.to_thread(report.write_text, json.dumps(content, indent=1) + "\n")
    return counts[State.BROKEN] == 0
