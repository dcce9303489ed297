"""`prorl-envs conformance`: tests of a driver's promises on this machine."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from prorl_envs.cli.output.check_table import check_table
from prorl_envs.cli.output.console import err, out, plain, print_json
from prorl_envs.conformance.promise import Promise
from prorl_envs.conformance.runner import PromiseOutcome, PromiseState, run_suite
from prorl_envs.conformance.subject import DRIVERS, Subject
from prorl_envs.errors import InputError


def subject(driver: str, image: Path | None, *, emulate_root: bool = False) -> Subject:
    """Return the driver and image that the options name.

    Raises:
        InputError: there is no such driver, or an emulated root has no image.
    """
    if emulate_root and image is None:
        raise InputError("an emulated root needs an image", hint="set it with --image")
    if driver not in DRIVERS:
        raise InputError(f"there is no driver {driver!r}", hint=f"drivers: {', '.join(DRIVERS)}")
    return Subject(driver=driver, make_driver=DRIVERS[driver], image=image, emulate_root=emulate_root)


def print_promises(promises: Sequence[Promise], *, as_json: bool = False) -> None:
    """Print promises with what each needs, and the drivers that do not make it, without testing them."""
    if as_json:
        fields = ("id", "text", "needs", "exempt")
        print_json([{name: getattr(promise, name) for name in fields} for promise in promises])
        return
    table = Table("id", "promise", "needs", "not made by", show_edge=False)
    for promise in promises:
        table.add_row(
            *map(plain, (promise.id, promise.text, ", ".join(promise.needs), ", ".join(promise.exempt)))
        )
    out.print(table)


async def conformance(against: Subject, promises: Sequence[Promise], *, as_json: bool = False) -> bool:
    """Test promises and print the outcomes.

    Args:
        against: the driver and its image.
        promises: the promises to test.
        as_json: print JSON instead of a table.

    Returns:
        True if no promise is broken, and all could be tested.
    """

    def note(outcome: PromiseOutcome) -> None:
        if outcome.state.is_error:
            err.print(f"{outcome.id} is {outcome.state}: {outcome.reason}")

    outcomes = await run_suite(against, promises, note)
    counts = Counter(outcome.state for outcome in outcomes)
    if as_json:
        print_json({"driver": against.driver, "image": against.image or "", "outcomes": outcomes})
    else:
        out.print(check_table("promise", ((o.id, o.promise, o.state, o.reason, o.seconds) for o in outcomes)))
        out.print(", ".join(f"{counts[state]} {state}" for state in PromiseState))
    return not any(state.is_error for state in counts)
