"""Drivers and images that the suite can test. A new driver needs one line here."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from prorl_envs.sandbox.base import Driver
from prorl_envs.sandbox.drivers.apptainer import ApptainerDriver
from prorl_envs.sandbox.drivers.bubblewrap import BubblewrapDriver
from prorl_envs.sandbox.drivers.instance.driver import InstanceDriver
from prorl_envs.sandbox.drivers.local import LocalDriver
from prorl_envs.sandbox.template.template import TEMPLATES, TemplateSpec

#: Entry of the `base` template that reports the state of a forked tool server.
STATE_ENTRY = "prorl_envs.conformance.state:serve"


class MakeDriver(Protocol):
    """Factory of a driver, given an existing directory for it."""

    def __call__(self, root: Path, *, templates: Mapping[str, TemplateSpec] = ...) -> Driver: ...


DRIVERS: Mapping[str, MakeDriver] = {
    "bubblewrap": BubblewrapDriver,
    "apptainer": ApptainerDriver,
    "apptainer-instance": InstanceDriver,
    "local": LocalDriver,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """Driver and the system image of its sandboxes.

    Args:
        driver: name of the driver, as in the promises' exemptions.
        make_driver: factory of the driver.
        image: see `SandboxSpec`.
        emulate_root: see `SandboxSpec`. If True, an emulated root tries to break the promises.
        templates: templates that the driver can fork; `STATE_ENTRY` is added to `base`.
    """

    driver: str
    make_driver: MakeDriver
    image: Path | None = None
    emulate_root: bool = False
    templates: Mapping[str, TemplateSpec] = field(default_factory=lambda: TEMPLATES)

    def make(self, root: Path) -> Driver:
        """Create a driver, given an existing directory for it."""
        base = self.templates["base"]
        entries = dict.fromkeys((*base.entries, STATE_ENTRY))
        return self.make_driver(
            root, templates={**self.templates, "base": replace(base, entries=tuple(entries))}
        )
