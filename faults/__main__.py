"""Inject faults, round after round, and print the outcome of each.

python -m faults                                # each for 30 seconds
python -m faults --seconds 600 --seed 7 service_killed cancellations
"""

import argparse
import asyncio
import logging
import sys
import time
import traceback

from faults.scenarios import SCENARIOS, Scenario
from faults.world import new_world

#: Seconds that one round may take before it counts as hung.
_ROUND_S = 300


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m faults", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help=", ".join(SCENARIOS))
    parser.add_argument("--seconds", type=float, default=30, help="for each fault; a round is always ended")
    parser.add_argument("--seed", type=int, default=0, help="of the first round; the next one has the next")
    parser.add_argument("--scale", type=int, default=4, help="how much is done in a round")
    options = parser.parse_args()
    if unknown := set(options.names) - set(SCENARIOS):
        parser.error(f"no fault {', '.join(sorted(unknown))}; there are: {', '.join(SCENARIOS)}")
    logging.getLogger("prorl_envs").setLevel(logging.CRITICAL + 1)  # failures are intended here
    good = [
        repeat(name, SCENARIOS[name], options.seconds, options.seed, options.scale)
        for name in options.names or SCENARIOS
    ]
    sys.exit(not all(good))


def repeat(name: str, scenario: Scenario, seconds: float, seed: int, scale: int) -> bool:
    """Repeat one fault until its time is up or a problem is found; return whether none was found."""
    begin, rounds, jobs = time.monotonic(), 0, 0
    print(f"{name:22} {(scenario.__doc__ or '').splitlines()[0]}", flush=True)
    while rounds == 0 or time.monotonic() < begin + seconds:
        try:
            jobs += once(scenario, seed + rounds, scale)
        except Exception:  # noqa: BLE001 - whatever it is, it was found
            print(f"{'':22} FOUND with --seed {seed + rounds}:\n{traceback.format_exc()}", flush=True)
            return False
        rounds += 1
    what = "nothing lost, nothing twice, nothing left"
    took = time.monotonic() - begin
    print(f"{'':22} {rounds:,} rounds, {jobs:,} jobs, {took:.0f} s: {what}", flush=True)
    return True


def once(scenario: Scenario, seed: int, scale: int) -> int:
    """Run one round; return the number of its jobs.

    Raises:
        AssertionError, TimeoutError: a job was lost or duplicated, a resource leaked, or the round hangs.
    """
    with new_world(seed, scale) as world:
        asyncio.run(asyncio.wait_for(scenario(world), _ROUND_S))
        return world.jobs


if __name__ == "__main__":
    main()
