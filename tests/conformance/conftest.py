"""The whole suite, run once for each driver and kind of image."""

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from prorl_envs.conformance.runner import Outcome, State, run_suite
from prorl_envs.conformance.subject import DRIVERS, Subject
from prorl_envs.conformance.suite import PROMISES
from prorl_envs.sandbox.base import Driver
from prorl_envs.sandbox.choice import make_driver
from prorl_envs.testing.sandbox_entry import LIGHT_TEMPLATES
from tests.conformance.images import write_image
from tests.sandbox.rootfs import build_sif, missing_for_sif

type Outcomes = Callable[[str], list[Outcome]]

#: Every driver with every kind of image: its name, and which image. A new driver is a line here.
SUBJECTS = {
    "namespaces": ("namespaces", ""),
    "namespaces-sif": ("namespaces", "sif"),
    "bubblewrap": ("bubblewrap", ""),
    "bubblewrap-sif": ("bubblewrap", "sif"),
    "apptainer-sif": ("apptainer", "sif"),
    "instance-sif": ("instance", "sif"),
    "local": ("local", ""),
}


def light(name: str, root: Path) -> Driver:
    """A driver as `DRIVERS` has it, but for the libraries that a Python session finds imported."""
    return make_driver(name, root, templates=LIGHT_TEMPLATES)


@pytest.fixture(scope="session")
def image(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path | None]:
    """The image of a kind, made at first use."""
    made: dict[str, Path] = {}

    def get(kind: str) -> Path | None:
        if kind == "sif" and (reason := missing_for_sif()):
            pytest.skip(reason)
        if kind and "directory" not in made:
            made["directory"] = write_image(tmp_path_factory.mktemp("conformance") / "root")
        if kind == "sif" and "sif" not in made:
            made["sif"] = build_sif(made["directory"], made["directory"].parent / "image.sif")
        return made[kind] if kind else None

    return get


@pytest.fixture(scope="session")
def outcomes(image: Callable[[str], Path | None], run_dir: Path) -> Outcomes:
    """What came of all promises for one of `SUBJECTS`; asked again, where one was broken."""
    known: dict[str, list[Outcome]] = {}

    def get(name: str) -> list[Outcome]:
        if name not in known:
            driver, kind = SUBJECTS[name]
            make = DRIVERS[driver] if driver == "namespaces" else partial(light, driver)
            subject = Subject(driver=driver, make=make, image=image(kind))
            found = asyncio.run(run_suite(subject, PROMISES))
            if any(outcome.state is State.BROKEN for outcome in found):
                return found
            known[name] = found
        return known[name]

    return get
