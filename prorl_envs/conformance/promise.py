"""Promises: their definition and the exceptions that report a broken one."""

import os
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prorl_envs.conformance.world import PromiseContext

type Keep = Callable[["PromiseContext"], Awaitable[None]]

#: Needs of promises, besides names of programs.
IMAGE, NO_IMAGE, PYTHON, SESSION = "an image", "no image", "a working Python", "a Python session"
#: Package that the interpreter of a Jupyter kernel needs.
KERNEL = "ipykernel"
#: Kinds of users inside.
ORDINARY, EMULATED_ROOT = "an ordinary user", "an emulated root"
NO_PROGRAMS = frozenset({IMAGE, NO_IMAGE, PYTHON, SESSION, KERNEL, ORDINARY, EMULATED_ROOT})

#: Exemption of the driver without isolation, which warns about that at each start.
NOT_LOCAL = {"local": "isolates nothing, and warns about that"}


class PromiseBroken(Exception):
    """Error for a broken promise; the message describes the violation."""


class NotApplicable(Exception):
    """Error for a promise about something that this machine does not have, so that nothing can break it."""


class PromiseSkipped(Exception):
    """Error for a promise that the suite cannot test here: its state is unknown, which fails the run."""


def expect(condition: bool, violation: str) -> None:
    """Raise PromiseBroken with the message `violation` unless `condition` is true."""
    if not condition:
        raise PromiseBroken(violation)


def same(found: object, promised: object) -> None:
    """Raise PromiseBroken if two values differ."""
    if found != promised:
        raise PromiseBroken(f"found {str(found)[:500]!r}, promised {str(promised)[:500]!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """Property that every sandbox has.

    Args:
        id: theme and number; never reused for another promise.
        text: the promise, one sentence.
        keep: function that tests the promise, and raises an error if it is broken.
        needs: programs inside, or the constants above, without which the promise cannot be tested.
        exempt: drivers that do not make the promise, and the reason.
        harmful: True if the test harms this machine with a driver that breaks the promise. If processes
            inside share the host's namespaces, it is not tested and counts as broken.
    """

    id: str
    text: str
    keep: Keep
    needs: tuple[str, ...] = ()
    exempt: Mapping[str, str] = field(default_factory=dict)
    harmful: bool = False


class Promises:
    """Promises of one theme, in order."""

    def __init__(self, theme: str) -> None:
        self.theme = theme
        self._promises: list[Promise] = []

    def __iter__(self) -> Iterator[Promise]:
        return iter(self._promises)

    def add(
        self,
        id_: str,
        text: str,
        *,
        needs: tuple[str, ...] = (),
        exempt: Mapping[str, str] | None = None,
        harmful: bool = False,
    ) -> Callable[[Keep], Keep]:
        """Add the decorated function as a promise: see `Promise`."""

        def add(keep: Keep) -> Keep:
            self._promises.append(
                Promise(id=id_, text=text, keep=keep, needs=needs, exempt=exempt or {}, harmful=harmful)
            )
            return keep

        return add

    def probe(
        self,
        id_: str,
        text: str,
        code: str,
        *,
        machine: str = "",
        harmful: bool = False,
        needs: tuple[str, ...] = (),
    ) -> None:
        """Add a promise that a program in Python prints nothing; see `Probe.nothing_in_python`.

        Args:
            code: the program; empty if there is none for this machine.
            machine: the only architecture that the promise applies to (`uname -m`); empty means all.
        """

        async def keep(world: "PromiseContext") -> None:
            if machine not in ("", os.uname().machine):
                raise NotApplicable(f"only {machine} has that")
            if not code:
                raise PromiseSkipped(f"not written for {os.uname().machine}")
            await world.python_box.nothing_in_python(code)

        self.add(id_, text, needs=(PYTHON, *needs), exempt=NOT_LOCAL, harmful=harmful)(keep)
