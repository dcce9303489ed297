"""What the suite is run against. A new driver is one line here."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from prorl_envs.sandbox.apptainer import ApptainerDriver
from prorl_envs.sandbox.base import Driver
from prorl_envs.sandbox.bubblewrap import BubblewrapDriver
from prorl_envs.sandbox.instance import InstanceDriver
from prorl_envs.sandbox.local import LocalDriver
from prorl_envs.sandbox.namespaces import NamespaceDriver

#: How to make each driver, given an existing directory of its own.
DRIVERS: Mapping[str, Callable[[Path], Driver]] = {
    "namespaces": NamespaceDriver,
    "bubblewrap": BubblewrapDriver,
    "apptainer": ApptainerDriver,
    "instance": InstanceDriver,
    "local": LocalDriver,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A driver and the system that its sandboxes have.

    Args:
        driver: its name; names what it is exempt from.
        make: makes one, given an existing directory of its own.
        image: see `SandboxSpec`.
    """

    driver: str
    make: Callable[[Path], Driver]
    image: Path | None = None
