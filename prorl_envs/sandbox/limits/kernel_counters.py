"""Kernel counters that all sandboxes of a host user share, and one sandbox's share of each. Pure, except
that it reads the sizes.

A sandbox that holds more than its share is killed. If all sandboxes together hold more than three quarters
of a counter, the sandbox that holds the most is killed, to keep the rest for the service.
"""

import errno
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from prorl_envs.sandbox.limits.held_descriptors import MOST_DESCRIPTORS, MOST_LOCKS, Holdings
from prorl_envs.sandbox.linux.descriptors import SOFT_OPEN_FILES, errno_behind

#: A counter of this size or more is unlimited: systemd sets `fs.file-max` to such a value.
UNLIMITED = 1 << 62
#: A sandbox's share is the size divided by this.
_SHARE_DIVISOR = 8
#: Pages of a pipe. Above the user's limit, new ones have two: programs that wait for a child first may hang.
_PAGES_OF_PIPE = 16
#: The divisor for descriptors in flight, whose size is the sender's soft limit. Programs soon receive them.
_IN_FLIGHT_DIVISOR = 4
#: Counters that may be full, by the error number of a failed system call, the likeliest first. An epoll in
#: flight keeps its watches.
_COUNTERS_BY_ERRNO: Mapping[int, tuple[str, ...]] = {
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
        source: the setting that determines the size.
        size: limit of all processes of this user, or of the machine if `machine` is True.
        share: limit of one sandbox.
        machine: whether other users share it.
    """

    name: str
    source: str
    size: int
    share: int
    machine: bool = False

    @property
    def total_limit(self) -> int:
        """Limit of all sandboxes together."""
        return self.size - self.size // 4


@functools.cache
def counters(proc: Path = Path("/proc")) -> dict[str, Counter]:
    """Return the counters that the watchdog checks, by field of `Holdings`, if the kernel has them.

    Args:
        proc: directory from which the kernel's settings are read.
    """
    found = {}
    if watches := _setting(proc / "sys/fs/epoll/max_user_watches"):
        found["watches"] = Counter(
            name="epoll watches",
            source="fs.epoll.max_user_watches",
            size=watches,
            share=max(1, watches // _SHARE_DIVISOR),
        )
    found["in_flight"] = Counter(
        name="descriptors in flight",
        source="the soft limit of open files in sandboxes",
        size=SOFT_OPEN_FILES,
        share=SOFT_OPEN_FILES // _IN_FLIGHT_DIVISOR,
    )
    found["locks"] = Counter(
        name="file locks", source="of the kernel", size=UNLIMITED, share=MOST_LOCKS, machine=True
    )
    if pages := _setting(proc / "sys/fs/pipe-user-pages-soft"):
        # No total: with many sandboxes, honest programs exceed it, and small pipes rarely harm.
        share = max(1, pages // _PAGES_OF_PIPE * 3 // 4)
        found["pipes"] = Counter(name="pipes", source="fs.pipe-user-pages-soft", size=UNLIMITED, share=share)
    files = _setting(proc / "sys/fs/file-max") or UNLIMITED
    found["descriptors"] = Counter(
        name="open files",
        source="fs.file-max",
        size=files,
        share=min(MOST_DESCRIPTORS, max(1, files // _SHARE_DIVISOR)),
        machine=True,
    )
    return found


def excess(holdings: Holdings, shares: Mapping[str, Counter]) -> str:
    """Describe the share that a sandbox exceeds; "" if none."""
    for field, counter in shares.items():
        count = getattr(holdings, field)
        if count > counter.share:
            return f"it holds {count} {counter.name}, more than its share of {counter.share}"
    return ""


def largest_holder[K](
    sandboxes: Mapping[K, Holdings], shares: Mapping[str, Counter], refused: int | None = None
) -> tuple[K, str] | None:
    """Return the sandbox to kill so that the service keeps headroom, and the reason; None if there is none.

    Args:
        sandboxes: the holdings of each sandbox.
        refused: the error number of a failed system call of the service; None if none has failed.
    """
    fields = shares.keys() if refused is None else _COUNTERS_BY_ERRNO.get(refused, ())
    for field in fields:
        counter = shares[field]
        counts = {key: getattr(holdings, field) for key, holdings in sandboxes.items()}
        if refused is None and sum(counts.values()) <= counter.total_limit:
            continue
        key = max(counts, key=lambda key: counts[key], default=None)
        # A single descriptor in flight can be a socket in which any number of others wait.
        minimum = 1 if refused is not None and field == "in_flight" else max(1, counter.share // 16)
        if key is not None and counts[key] >= minimum:
            return key, f"{counter.name} are running out, and it holds the most of them: {counts[key]}"
    return None


def full_counter_errno(error: BaseException) -> int | None:
    """Return the error number if a full counter may be the cause of `error`; None otherwise."""
    return errno_behind(error, _COUNTERS_BY_ERRNO)


def _setting(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
