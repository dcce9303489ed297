"""Runs of the whole suite, one for each driver and kind of image."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from prorl_envs.conformance.runner import PromiseOutcome, run_suite
from prorl_envs.conformance.subject import DRIVERS, Subject
from prorl_envs.conformance.suite import PROMISES
from prorl_envs.sandbox.template.template import TEMPLATES
from tests.conformance.images import write_image
from tests.conftest import existing_driver
from tests.sandbox.rootfs import build_sif, missing_for_sif
from tests.support.sandbox_entry import LIGHT_TEMPLATES

type Outcomes = Callable[[str], list[PromiseOutcome]]

#: Every driver with every kind of image; an emulated root has a directory. A new driver is a line here.
SUBJECTS = {
    "bubblewrap": ("bubblewrap", ""),
    "bubblewrap-sif": ("bubblewrap", "sif"),
    "bubblewrap-root": ("bubblewrap", "directory"),
    "apptainer-root": ("apptainer", "directory"),
    "apptainer-sif": ("apptainer", "sif"),
    "apptainer-instance-sif": ("apptainer-instance", "sif"),
    "local": ("local", ""),
}


@pytest.fixture(scope="session")
def image(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path | None]:
    """Build the image of a kind at first use."""
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
    """Outcomes of all promises for one of `SUBJECTS`; a broken promise is tried again."""
    known: dict[str, list[PromiseOutcome]] = {}

    def get(name: str) -> list[PromiseOutcome]:
        if name not in known:
            driver, kind = SUBJECTS[name]
            existing_driver(driver)
            templates = TEMPLATES if driver == "bubblewrap" else LIGHT_TEMPLATES
            subject = Subject(
                driver=driver,
                make_driver=DRIVERS[driver],
                image=image(kind),
                emulate_root=name.endswith("-root"),
                templates=templates,
            )
            found = asyncio.run(run_suite(subject, PROMISES))
            if any(outcome.state.is_error for outcome in found):
                return found
            known[name] = found
        return known[name]

    return get
