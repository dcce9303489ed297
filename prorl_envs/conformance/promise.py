"""Promises: their definition and the exceptions that report a broken one."""

import os
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

if TYPE_CHECKING:
    from prorl_envs.conformance.box import Probe
    from prorl_envs.conformance.world import PromiseContext

type Keep = Callable[["PromiseContext"], Awaitable[None]]
#: Test that needs only one sandbox.
type BoxTest = Callable[["Probe"], Awaitable[None]]

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


class PromiseOptions(TypedDict, total=False):
    """Optional fields of `Promise`."""

    needs: tuple[str, ...]
    exempt: Mapping[str, str]
    harmful: bool


class Promises:
    """Promises of one theme, in order.

    Args:
        exempt: see `Promise`; the default for the promises of the theme.
    """

    def __init__(self, theme: str, *, exempt: Mapping[str, str] | None = None) -> None:
        self.theme = theme
        self._exempt = exempt or {}
        self._promises: list[Promise] = []

    def __iter__(self) -> Iterator[Promise]:
        return iter(self._promises)

    def add(self, id_: str, text: str, **options: Unpack[PromiseOptions]) -> Callable[[Keep], Keep]:
        """Add the decorated function as a promise: see `Promise`."""

        def add(keep: Keep) -> Keep:
            options.setdefault("exempt", self._exempt)
            self._promises.append(Promise(id=id_, text=text, keep=keep, **options))
            return keep

        return add

    def fresh(
        self,
        id_: str,
        text: str,
        *,
        fields: Mapping[str, Any] | None = None,
        **options: Unpack[PromiseOptions],
    ) -> Callable[[BoxTest], BoxTest]:
        """Add the decorated function as a promise. It is called with a fresh sandbox.

        Args:
            fields: fields of its `SandboxSpec`. If `needs` names PYTHON, it has a working Python too.
        """
        python = PYTHON in options.get("needs", ())

        def add(test: BoxTest) -> BoxTest:
            async def keep(world: "PromiseContext") -> None:
                async with world.fresh(python=python, **(fields or {})) as box:
                    await test(box)

            self.add(id_, text, **options)(keep)
            return test

        return add

    def shell(
        self, id_: str, text: str, *, needs: tuple[str, ...] = ("bash",)
    ) -> Callable[[BoxTest], BoxTest]:
        """Add the decorated function as a promise. It is called with new tools on the shared sandbox."""

        def add(test: BoxTest) -> BoxTest:
            async def keep(world: "PromiseContext") -> None:
                async with world.shell() as box:
                    await test(box)

            self.add(id_, text, needs=needs)(keep)
            return test

        return add

    def script(self, id_: str, text: str, script: str, **options: Unpack[PromiseOptions]) -> None:
        """Add a promise that a script of `/bin/sh` prints nothing; see `Probe.nothing`."""

        async def keep(world: "PromiseContext") -> None:
            await world.box.nothing(script)

        self.add(id_, text, **options)(keep)

    def probe(
        self, id_: str, text: str, code: str, *, machine: str = "", **options: Unpack[PromiseOptions]
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

        options["needs"] = (PYTHON, *options.get("needs", ()))
        self.add(id_, text, **options)(keep)
