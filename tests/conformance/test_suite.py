"""Every driver keeps its promises, the suite can list them, and it detects broken promises."""

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from prorl_envs.cli.commands.conformance import conformance, print_promises
from prorl_envs.conformance.promise import NotApplicable, Promise, PromiseBroken, PromiseSkipped, expect, same
from prorl_envs.conformance.runner import PromiseState, run_suite
from prorl_envs.conformance.subject import DRIVERS, Subject
from prorl_envs.conformance.suite import PROMISES, RETIRED, THEMES, chosen
from prorl_envs.conformance.world import PromiseContext
from prorl_envs.errors import InputError
from prorl_envs.sandbox.drivers.local import LocalDriver
from tests.conformance.conftest import SUBJECTS, Outcomes
from tests.support.sandbox_entry import LIGHT_TEMPLATES

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.xdist_group("suite"),  # its tests share the outcomes of each subject
    pytest.mark.filterwarnings("ignore::prorl_envs.sandbox.drivers.local.NoIsolationWarning"),
]


#: For each of these, `make test` runs another subject with the same code path, or it needs a program that few
#: machines have.
THOROUGH = {
    "bubblewrap-sif",
    "bubblewrap-root",
    "apptainer-sif",
    "apptainer-root",
    "apptainer-instance-sif",
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.thorough] * (name in THOROUGH)) for name in SUBJECTS]
)
def test_every_promise_is_kept(name: str, outcomes: Outcomes) -> None:
    broken = [f"{o.id} {o.promise} {o.state}: {o.reason}" for o in outcomes(name) if o.state.is_error]
    assert not broken, "\n".join(broken)


#: First words of reasons that concern neither the driver nor the image.
LEFT_OUT = ("no image was given", "root is not emulated", "on this machine: only")


@pytest.mark.parametrize("name", ["bubblewrap", "local"])
def test_without_an_image_only_promises_of_images_and_of_other_drivers_are_skipped(
    name: str, outcomes: Outcomes
) -> None:
    promised = {o.id: o for o in outcomes(name)}
    for promise in PROMISES:
        outcome = promised[promise.id]
        if outcome.state is PromiseState.NOT_APPLICABLE:
            assert name in promise.exempt or outcome.reason.startswith(LEFT_OUT), outcome


@pytest.mark.thorough
def test_each_promise_is_kept_by_some_driver(image: Callable[[str], Path | None], outcomes: Outcomes) -> None:
    image("sif")  # skips if there can be none
    found = [o for name in SUBJECTS for o in outcomes(name)]
    done = {o.id for o in found if o.state is PromiseState.KEPT or o.reason.startswith("on this machine: ")}
    assert {promise.id for promise in PROMISES} - done == set()


def test_there_are_enough_promises_with_unique_ids_that_are_never_reused() -> None:
    ids = [promise.id for promise in PROMISES]
    assert len(ids) >= 170
    assert len(set(ids)) == len(ids)
    assert not RETIRED & set(ids)
    for theme in THEMES:
        (prefix,) = {promise.id.partition("-")[0] for promise in theme}
        assert all(re.fullmatch(rf"{prefix}-\d\d\d", promise.id) for promise in theme)
        assert [promise.id for promise in theme] == sorted(promise.id for promise in theme)


def test_each_promise_is_one_unique_sentence() -> None:
    texts = [promise.text for promise in PROMISES]
    assert len(set(texts)) == len(texts)
    for text in texts:
        assert text.endswith(".") and ". " not in text and "|" not in text, text


def test_the_promises_are_listed_without_tests(capsys: pytest.CaptureFixture[str]) -> None:
    print_promises(chosen(["FS-004"]))
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "FS-004" in line]
    assert "The image" in row and "an image, rm" in row and "local" in row
    print_promises(PROMISES, as_json=True)
    listed = json.loads(capsys.readouterr().out)
    assert [promise["id"] for promise in listed] == [promise.id for promise in PROMISES]
    assert listed[0].keys() == {"id", "text", "needs", "exempt"}


def test_promises_are_chosen_by_id_or_prefix() -> None:
    assert chosen(()) == PROMISES
    assert [promise.id for promise in chosen(["BASH-001", "LIM"])][:2] == ["BASH-001", "LIM-001"]
    with pytest.raises(InputError, match="no promise"):
        chosen(["ABC"])


#: Promises that a driver without isolation breaks for every user, on every machine.
NOTICED = [
    f"{theme}-{number:03}"
    for theme, numbers in {
        "PROC": (1, 3, 16, 17),
        "FS": (6, 7, 8, 9, 10, 18, 22, 27),
        "ENV": (1, 6, 9, 10),
        "NET": (4, 6, 7, 8),
        "PRIV": (1, 2, 11, 15, 17, 27),
        "KERN": (5,),
        "WAY": (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11),
        "SRV": (9,),
    }.items()
    for number in numbers
]


def test_a_driver_that_isolates_nothing_but_claims_to_is_detected() -> None:
    """The machine is not harmed: dangerous probes are skipped."""
    careless = Subject(driver="careless", make_driver=LocalDriver, templates=LIGHT_TEMPLATES)
    harmful = [promise.id for promise in PROMISES if promise.harmful and not promise.needs]
    found = asyncio.run(run_suite(careless, [p for p in PROMISES if p.id in {*NOTICED, *harmful}]))
    assert [outcome for outcome in found if outcome.state is not PromiseState.BROKEN] == []
    assert {o.id for o in found if "not tried" in o.reason} == set(harmful)


async def kept(world: PromiseContext) -> None:
    same(await world.box.sh("echo $((6 * 7))"), "42")


async def broken(world: PromiseContext) -> None:
    expect(False, "as was to be shown")


async def untried(world: PromiseContext) -> None:
    raise PromiseSkipped("not on this machine")


async def inapplicable(world: PromiseContext) -> None:
    raise NotApplicable("this machine has no such thing")


async def faulty(world: PromiseContext) -> None:
    raise ValueError("a fault of the promise's own")


def test_an_error_of_any_kind_breaks_its_promise_and_no_other(
    capsys: pytest.CaptureFixture[str],
) -> None:
    promises = [
        Promise(id=f"X-00{number}", text="It holds.", keep=keep, needs=needs)
        for number, (keep, needs) in enumerate(
            [(kept, ()), (broken, ()), (faulty, ()), (kept, ("no-such",)), (inapplicable, ()), (untried, ())]
        )
    ]
    subject = Subject(driver="bubblewrap", make_driver=DRIVERS["bubblewrap"])
    assert asyncio.run(conformance(subject, promises)) is False
    assert "1 kept, 2 broken, 2 not applicable, 1 not tried" in capsys.readouterr().out
    assert asyncio.run(conformance(subject, promises, as_json=True)) is False
    outcomes = json.loads(capsys.readouterr().out)["outcomes"]
    reasons = {outcome["id"]: outcome["reason"] for outcome in outcomes}
    assert reasons["X-001"] == "PromiseBroken: as was to be shown"
    assert "ValueError: a fault of the promise's own" in reasons["X-002"]
    assert "the host has no no-such" in reasons["X-003"]
    assert asyncio.run(conformance(subject, promises[:1])) is True
    assert asyncio.run(conformance(subject, promises[3:5])) is True, "not applicable is no error"
    assert asyncio.run(conformance(subject, promises[5:])) is False, "but not tried is one"


def test_same_and_expect_report_the_actual_value() -> None:
    with pytest.raises(PromiseBroken, match="found '1', promised '2'"):
        same(1, 2)
    expect(True, "")
