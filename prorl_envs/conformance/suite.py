"""List of all promises, in order."""

from collections.abc import Iterable

from prorl_envs.conformance.promise import Promise, Promises
from prorl_envs.conformance.promises import (
    checkpoint,
    counters,
    end,
    environment,
    filesystems,
    kernel,
    limits,
    mounts,
    network,
    network_services,
    privileges,
    processes,
    python,
    root,
    server,
    shared_kernel,
    shell,
    start,
    ways,
)
from prorl_envs.errors import InputError

THEMES: tuple[Promises, ...] = (
    start.promises,
    end.promises,
    processes.promises,
    ways.promises,
    filesystems.promises,
    mounts.promises,
    environment.promises,
    network.promises,
    network_services.promises,
    privileges.promises,
    kernel.promises,
    root.promises,
    shared_kernel.promises,
    server.promises,
    shell.promises,
    python.promises,
    checkpoint.promises,
    python.kernel_promises,
    limits.promises,
    counters.promises,
)

PROMISES: tuple[Promise, ...] = tuple(promise for theme in THEMES for promise in theme)

#: Ids of promises that are no longer made. Never reused.
RETIRED: frozenset[str] = frozenset(
    f"{theme}-{number:03}"
    for theme, numbers in {
        "SNAP": range(1, 11),  # snapshots of a sandbox were removed
        # Other promises test some of these: WAY-001 to WAY-011 the state of processes, PROC-016 and PROC-017
        # their namespaces, FS-027 the mounts, PRIV-004 set-user-id programs, PRIV-021 /sys, NET-004 the
        # loopback, KERN-005 address families. The others became tests in `tests/sandbox/` and `tests/tools/`,
        # because no machine or image can break them.
        "START": (1, 2, *range(7, 14), 15, 16),
        "END": (1, 2, 3, 5),
        "PROC": (2, 10, 11, 13, 15),
        "FS": (25,),
        "ENV": (2, 3, 4, 8, 12, 13),
        "NET": (2, 5, 10, 14, 15, 20),
        "PRIV": (3, 28, 30, 31),
        "SRV": (*range(1, 5), 6, 8, 10, 11),
        "RUN": range(1, 14),
        "FILE": range(1, 16),
        "BASH": (*range(2, 10), 11, 14, 15, 17, 18, *range(20, 32), 51, 52),
        "PY": (*range(1, 15), 35, 36, 37),
        "JUP": (*range(1, 15), 35, 36, 37),
        "LIM": (3, 7),
    }.items()
    for number in numbers
)


def chosen(only: Iterable[str]) -> tuple[Promise, ...]:
    """Return the promises with these ids or id prefixes; all of them if none is named.

    Raises:
        InputError: a name is unknown.
    """
    names = tuple(only)
    for name in names:
        if not any(promise.id.startswith(name) for promise in PROMISES):
            raise InputError(
                f"there is no promise {name!r}", hint="list them with: prorl-envs conformance --list"
            )
    return tuple(promise for promise in PROMISES if not names or promise.id.startswith(names))
