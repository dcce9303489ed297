"""Tries promises, several at a time, and says of each what came out."""

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

from prorl_envs.conformance.promise import Promise, Untried
from prorl_envs.conformance.subject import Subject
from prorl_envs.conformance.world import World, open_world

#: Promises tried at a time: most wait more than they work.
AT_A_TIME = 4
_DEADLINE_S = 120.0


class State(StrEnum):
    """What came of a promise."""

    KEPT = "kept"
    BROKEN = "broken"
    NOT_APPLICABLE = "not applicable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of one promise.

    Args:
        id: the promise's.
        promise: its sentence.
        state: what came of it.
        reason: why it is not kept; empty where it is.
        seconds: how long it took.
    """

    id: str
    promise: str
    state: State
    reason: str
    seconds: float


async def run_suite(
    subject: Subject,
    promises: Iterable[Promise],
    on_outcome: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Try promises against a driver.

    Args:
        subject: the driver and its image.
        promises: which.
        on_outcome: called with each outcome as it comes.

    Returns:
        One outcome per promise, in their order.

    Raises:
        SandboxError: the driver cannot start a sandbox at all.
    """
    wanted = list(promises)
    places = asyncio.Semaphore(AT_A_TIME)

    async def one(world: World, promise: Promise) -> Outcome:
        async with places:
            outcome = await _try(world, promise)
        on_outcome(outcome)
        return outcome

    async with open_world(subject, wanted) as world:
        return await asyncio.gather(*(one(world, promise) for promise in wanted))


async def _try(world: World, promise: Promise) -> Outcome:
    started = time.monotonic()
    if reason := world.lacks(promise):
        state = State.NOT_APPLICABLE
    elif promise.harmful and not world.walls:
        state, reason = State.BROKEN, f"shares the host's namespaces {', '.join(world.shared)}; not tried"
    else:
        state, reason = await _keep(world, promise)
    seconds = time.monotonic() - started
    return Outcome(id=promise.id, promise=promise.text, state=state, reason=reason, seconds=seconds)


async def _keep(world: World, promise: Promise) -> tuple[State, str]:
    """Try it in a task of its own. Whatever it raises, but `Untried`, is the reason why it is broken."""
    trial = asyncio.ensure_future(promise.keep(world))
    try:
        await asyncio.wait([trial], timeout=_DEADLINE_S)
    finally:
        late = not trial.done()
        trial.cancel()
        await asyncio.gather(trial, return_exceptions=True)
    if late or trial.cancelled():
        return State.BROKEN, f"was not over after {_DEADLINE_S:g} s"
    error = trial.exception()
    if error is None:
        return State.KEPT, ""
    if isinstance(error, Untried):
        return State.NOT_APPLICABLE, f"on this machine: {error}"
    # What a sandbox said may be in it.
    return State.BROKEN, _printable(f"{type(error).__name__}: {error}")[:1000]


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() else " " for character in text)
