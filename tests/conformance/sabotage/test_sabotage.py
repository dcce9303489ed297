"""If one protection is removed, the promises about it break."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from prorl_envs.conformance.suite import PROMISES
from tests.conformance.sabotage.patches import PATCHES
from tests.conformance.sabotage.runner import PACKAGE, Patch, Workshop
from tests.conftest import existing_driver


@pytest.fixture(scope="module")
def workshop() -> Iterator[Workshop]:
    """Directory with a short path, because sandboxes have sockets below it."""
    with tempfile.TemporaryDirectory(prefix="sab-", dir="/tmp") as path:
        yield Workshop(Path(path))


@pytest.mark.thorough
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.protection)
def test_without_a_protection_its_promises_break(patch: Patch, workshop: Workshop) -> None:
    existing_driver(patch.driver)
    if not patch.applies_here:
        pytest.skip("only root notices it")
    problem = workshop.try_out(patch).problem(patch)
    assert not problem, problem


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.protection)
def test_a_patch_is_not_stale(patch: Patch) -> None:
    text = (PACKAGE / patch.file).read_text()
    compile(patch.applied(text), patch.file, "exec")


def test_there_are_enough_patches_and_each_names_its_effect() -> None:
    names = [patch.protection for patch in PATCHES]
    assert len(set(names)) == len(names) >= 60
    ids = {promise.id for promise in PROMISES}
    for patch in PATCHES:
        assert bool(patch.caught_by) + patch.no_sandbox + bool(patch.no_effect) == 1, patch.protection
        assert {*patch.caught_by, *patch.checked_by} <= ids, patch.protection
