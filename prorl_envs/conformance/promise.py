"""What a promise is, and how one is found broken."""

from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prorl_envs.conformance.world import World

type Keep = Callable[["World"], Awaitable[None]]

#: What a promise may need besides programs, which it needs by their names.
IMAGE, NO_IMAGE, PYTHON, SESSION = "an image", "no image", "a working Python", "a Python session"

#: For promises about walls, of a driver that has none and says so each time it is made.
NOT_LOCAL = {"local": "isolates nothing, and warns so"}


class Broken(Exception):
    """A promise was not kept; the message says what was seen instead."""


class Untried(Exception):
    """A promise cannot be tried on this machine; the message says why."""


def expect(kept: bool, otherwise: str) -> None:
    """Raises Broken, saying `otherwise`, where something promised is not so."""
    if not kept:
        raise Broken(otherwise)


def same(found: object, promised: object) -> None:
    """Raises Broken where two things differ."""
    if found != promised:
        raise Broken(f"found {str(found)[:500]!r}, promised {str(promised)[:500]!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """One thing that holds of every sandbox.

    Args:
        id: theme and number; never given to another promise.
        text: the promise, one sentence.
        keep: tries it out; raises where it is not kept.
        needs: programs inside, or the constants above, without which it cannot be tried.
        exempt: drivers that do not make it, and why.
        harmful: a driver that breaks it would let the trial harm this machine; so it is not tried, and counts
            as broken, where processes inside share the host's namespaces.
    """

    id: str
    text: str
    keep: Keep
    needs: tuple[str, ...] = ()
    exempt: Mapping[str, str] = field(default_factory=dict)
    harmful: bool = False


class Promises:
    """The promises of one theme, in order."""

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
        """Add the decorated function as a promise; see `Promise`."""

        def add(keep: Keep) -> Keep:
            self._promises.append(
                Promise(id=id_, text=text, keep=keep, needs=needs, exempt=exempt or {}, harmful=harmful)
            )
            return keep

        return add
