"""Kernel counters that all sandboxes of a host user share, and one sandbox's share of each. Pure, but for
reading the sizes.

A sandbox that holds more than its share is killed. If all together hold more than three quarters, the one
that holds the most is killed, to keep the rest for the service.
"""

import errno
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from prorl_envs.sandbox.limits.held_descriptors import Holdings
from prorl_envs.sandbox.linux.descriptors import SOFT_OPEN_FILES

#: Share of descriptors if the machine does not limit them: 250 MB of kernel memory, with their files.
_DESCRIPTORS = 262_144
#: From this size on a counter counts as unlimited: systemd sets `fs.file-max` so.
UNLIMITED = 1 << 62
#: A sandbox's share is the size divided by this.
_PART = 8
#: Divisor for descriptors in flight: their size is the sender's soft limit. Programs soon receive them.
_FLYING_PART = 4
#: Counters that may be full, by the error number of a failed system call, the likeliest first. An epoll
#: can be in flight.
_FULL: Mapping[int, tuple[str, ...]] = {
    errno.ENOSPC: ("watches", "in_flight"),
    errno.ETOOMANYREFS: ("in_flight",),
    errno.EMFILE: ("descriptors", "in_flight"),
    errno.ENFILE: ("descriptors", "in_flight"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Counter:
    """A kernel counter.

    Args:
        name: the counted things, in the plural.
        source: origin of the size.
        size: limit for all processes of this user; of the machine, if `machine`.
        share: limit of one sandbox.
        machine: whether other users share it.
    """

    name: str
    source: str
    size: int
    share: int
    machine: bool = False

    @property
    def crowded(self) -> int:
        """Limit of all sandboxes together."""
        return self.size - self.size // 4


@functools.cache
def counters(proc: Path = Path("/proc")) -> dict[str, Counter]:
    """Return the counters that the watchdog keeps, by field of `Holdings`; without those the kernel lacks.

    Args:
        proc: directory from which the kernel's settings are read.
    """
    found = {}
    if watches := _setting(proc / "sys/fs/epoll/max_user_watches"):
        found["watches"] = Counter(
            name="epoll watches",
            source="fs.epoll.max_user_watches",
            size=watches,
            share=max(1, watches // _PART),
        )
    found["in_flight"] = Counter(
        name="descriptors in flight",
        source="the soft limit of open files in sandboxes",
        size=SOFT_OPEN_FILES,
        share=SOFT_OPEN_FILES // _FLYING_PART,
    )
    files = _setting(proc / "sys/fs/file-max") or UNLIMITED
    found["descriptors"] = Counter(
        name="open files",
        source="fs.file-max",
        size=files,
        share=min(_DESCRIPTORS, max(1, files // _PART)),
        machine=True,
    )
    return found


def excess(held: Holdings, shares: Mapping[str, Counter]) -> str:
    """Describe the share that a sandbox exceeds; "" if none."""
    for field, counter in shares.items():
        count = getattr(held, field)
        if count > counter.share:
            return f"it holds {count} {counter.name}, more than its share of {counter.share}"
    return ""


def most[K](
    held: Mapping[K, Holdings], shares: Mapping[str, Counter], refused: int | None = None
) -> tuple[K, str] | None:
    """Return the sandbox to kill for the service's headroom, and the reason; None if none holds too much.

    Args:
        held: by all sandboxes.
        refused: the error number of a system call that the kernel refused the service.
    """
    fields = shares.keys() if refused is None else _FULL.get(refused, ())
    for field in fields:
        counter = shares[field]
        counts = {key: getattr(each, field) for key, each in held.items()}
        if refused is None and sum(counts.values()) <= counter.crowded:
            continue
        key = max(counts, key=lambda each: counts[each], default=None)
        # One descriptor in flight can be a socket that holds any number of others.
        least = 1 if refused is not None and field == "in_flight" else max(1, counter.share // 16)
        if key is not None and counts[key] >= least:
            return key, f"{counter.name} are short, and it holds the most of them: {counts[key]}"
    return None


def refused_for_want(error: BaseException) -> int | None:
    """Return the error number if a full counter may be the cause of `error`; None otherwise."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in _FULL:
            return cause.errno
        cause = cause.__cause__ or cause.__context__
    return None


def _setting(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
