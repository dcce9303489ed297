"""Every promise, in order."""

from collections.abc import Iterable

from prorl_envs.conformance.promise import Promise, Promises
from prorl_envs.conformance.promises import (
    end,
    environment,
    files,
    filesystems,
    fresh,
    limits,
    network,
    privileges,
    processes,
    python,
    server,
    shell,
    snapshot,
    start,
)
from prorl_envs.errors import InputError

THEMES: tuple[Promises, ...] = (
    start.promises,
    end.promises,
    processes.promises,
    filesystems.promises,
    environment.promises,
    network.promises,
    privileges.promises,
    server.promises,
    fresh.promises,
    files.promises,
    shell.promises,
    python.promises,
    snapshot.promises,
    limits.promises,
)

PROMISES: tuple[Promise, ...] = tuple(promise for theme in THEMES for promise in theme)

#: Ids of promises that are made no more. They are given to no other.
RETIRED: frozenset[str] = frozenset()


def chosen(only: Iterable[str]) -> tuple[Promise, ...]:
    """The promises of these ids, or beginnings of ids; all of them where none is named.

    Raises:
        InputError: one is unknown.
    """
    names = tuple(only)
    for name in names:
        if not any(promise.id.startswith(name) for promise in PROMISES):
            raise InputError(f"there is no promise {name!r}", hint="docs/conformance.md lists them")
    return tuple(promise for promise in PROMISES if not names or promise.id.startswith(names))
