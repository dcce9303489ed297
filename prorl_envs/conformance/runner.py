"""Runner of promises: tests several at a time and reports the outcome of each."""

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

from prorl_envs.conformance.promise import NotApplicable, Promise, PromiseSkipped
from prorl_envs.conformance.subject import Subject
from prorl_envs.conformance.world import PromiseContext, open_world

#: Promises that are tested at once: most tests wait more than they compute.
AT_A_TIME = 4
_DEADLINE_S = 120.0


class PromiseState(StrEnum):
    """State of a tested promise."""

    KEPT = "kept"
    BROKEN = "broken"
    NOT_APPLICABLE = "not applicable"
    NOT_TRIED = "not tried"

    @property
    def is_error(self) -> bool:
        """True if a run with such an outcome fails."""
        return self in (PromiseState.BROKEN, PromiseState.NOT_TRIED)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromiseOutcome:
    """Outcome of one promise.

    Args:
        id: id of the promise.
        promise: text of the promise.
        state: its state.
        reason: why it is not kept; empty if it is kept.
        seconds: duration of the test.
    """

    id: str
    promise: str
    state: PromiseState
    reason: str
    seconds: float


async def run_suite(
    subject: Subject,
    promises: Iterable[Promise],
    on_outcome: Callable[[PromiseOutcome], None] = lambda outcome: None,
) -> list[PromiseOutcome]:
    """Test promises against a driver.

    Args:
        subject: the driver and its image.
        promises: the promises to test.
        on_outcome: called with each outcome as it arrives.

    Returns:
        One outcome per promise, in the order of the promises.

    Raises:
        SandboxError: the driver cannot start a sandbox at all.
    """
    wanted = list(promises)
    slots = asyncio.Semaphore(AT_A_TIME)

    async def test(world: PromiseContext, promise: Promise) -> PromiseOutcome:
        async with slots:
            outcome = await _test(world, promise)
        on_outcome(outcome)
        return outcome

    async with open_world(subject, wanted) as world:
        return await asyncio.gather(*(test(world, promise) for promise in wanted))


async def _test(world: PromiseContext, promise: Promise) -> PromiseOutcome:
    started = time.monotonic()
    if (lack := world.lacks(promise)) is not None:
        state, reason = PromiseState.NOT_TRIED if lack.is_ours else PromiseState.NOT_APPLICABLE, lack.reason
    elif promise.harmful and not world.is_isolated:
        state = PromiseState.BROKEN
        reason = f"shares the host's namespaces {', '.join(world.shared)}; not tried"
    else:
        state, reason = await _keep(world, promise)
    seconds = time.monotonic() - started
    return PromiseOutcome(id=promise.id, promise=promise.text, state=state, reason=reason, seconds=seconds)


async def _keep(world: PromiseContext, promise: Promise) -> tuple[PromiseState, str]:
    """Test a promise in a separate task. With any unexpected exception, it counts as broken."""
    test = asyncio.ensure_future(promise.keep(world))
    try:
        await asyncio.wait([test], timeout=_DEADLINE_S)
    finally:
        late = not test.done()
        test.cancel()
        await asyncio.gather(test, return_exceptions=True)
    if late or test.cancelled():
        return PromiseState.BROKEN, f"did not end in {_DEADLINE_S:g} s"
    error = test.exception()
    if error is None:
        return PromiseState.KEPT, ""
    if isinstance(error, NotApplicable | PromiseSkipped):
        state = PromiseState.NOT_APPLICABLE if isinstance(error, NotApplicable) else PromiseState.NOT_TRIED
        return state, f"on this machine: {error}"
    # The message may contain output of a sandbox.
    return PromiseState.BROKEN, _printable(f"{type(error).__name__}: {error}")[:1000]


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() else " " for character in text)
