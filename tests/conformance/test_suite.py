"""Every driver keeps every promise it makes; the suite, its page and its numbers agree; and it can fail."""

import asyncio
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from prorl_envs.cli.conformance import conformance
from prorl_envs.conformance.promise import Broken, Promise, Untried, expect, same
from prorl_envs.conformance.runner import State, run_suite
from prorl_envs.conformance.subject import DRIVERS, Subject
from prorl_envs.conformance.suite import PROMISES, RETIRED, THEMES, chosen
from prorl_envs.conformance.world import World
from prorl_envs.errors import InputError
from tests.conformance.conftest import SUBJECTS, Outcomes, light

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore::prorl_envs.sandbox.local.NoIsolationWarning"),
]

PAGE = Path(__file__).parent.parent.parent / "docs" / "conformance.md"
ROW = re.compile(r"^\| ([A-Z]+-\d+) \| (.*?) \| (.*?) ?\| (.*?) ?\|$", re.MULTILINE)


#: Of each of these, `make test` runs another that takes the same way.
THOROUGH = {"namespaces-sif", "bubblewrap", "bubblewrap-sif", "instance-sif"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.thorough] * (name in THOROUGH)) for name in SUBJECTS]
)
def test_every_promise_is_kept(name: str, outcomes: Outcomes) -> None:
    broken = [f"{o.id} {o.promise} {o.reason}" for o in outcomes(name) if o.state is State.BROKEN]
    assert not broken, "\n".join(broken)


#: How reasons begin that are neither the driver's nor the image's.
LEFT_OUT = ("no image was given", "on this machine: ")


@pytest.mark.parametrize("name", ["namespaces", "local"])
def test_without_an_image_only_images_and_what_the_driver_does_not_promise_are_left_out(
    name: str, outcomes: Outcomes
) -> None:
    promised = {o.id: o for o in outcomes(name)}
    for promise in PROMISES:
        outcome = promised[promise.id]
        if outcome.state is State.NOT_APPLICABLE:
            assert name in promise.exempt or outcome.reason.startswith(LEFT_OUT), outcome


def test_each_promise_is_kept_by_some_driver(image: Callable[[str], Path | None], outcomes: Outcomes) -> None:
    image("sif")  # skips where there can be none
    found = [o for name in SUBJECTS if name not in THOROUGH for o in outcomes(name)]
    done = {o.id for o in found if o.state is State.KEPT or o.reason.startswith("on this machine: ")}
    assert {promise.id for promise in PROMISES} - done == set()


def test_there_are_enough_and_their_ids_are_unique_and_never_used_again() -> None:
    ids = [promise.id for promise in PROMISES]
    assert len(ids) >= 200
    assert len(set(ids)) == len(ids)
    assert not RETIRED & set(ids)
    for theme in THEMES:
        (prefix,) = {promise.id.partition("-")[0] for promise in theme}
        assert all(re.fullmatch(rf"{prefix}-\d\d\d", promise.id) for promise in theme)
        assert [promise.id for promise in theme] == sorted(promise.id for promise in theme)


def test_each_promise_is_one_sentence_and_says_a_thing_that_no_other_says() -> None:
    texts = [promise.text for promise in PROMISES]
    assert len(set(texts)) == len(texts)
    for text in texts:
        assert text.endswith(".") and ". " not in text and "|" not in text, text


def test_the_page_lists_each_promise_and_no_other() -> None:
    listed = {id_: rest for id_, *rest in ROW.findall(PAGE.read_text())}
    promised = {p.id: [p.text, ", ".join(p.needs), ", ".join(p.exempt)] for p in PROMISES}
    assert listed == promised


def test_promises_are_chosen_by_id_or_its_beginning() -> None:
    assert chosen(()) == PROMISES
    assert [promise.id for promise in chosen(["RUN-001", "LIM"])][:2] == ["RUN-001", "LIM-001"]
    with pytest.raises(InputError, match="no promise"):
        chosen(["ABC"])


#: Found broken, by looking, on a driver without walls: whoever runs it, on any machine.
NOTICED = [
    f"{theme}-{number:03}"
    for theme, numbers in {
        "PROC": (1, 2, 3, 13, 16, 17),
        "FS": (6, 7, 8, 9, 10, 18, 22),
        "ENV": (1, 6, 9, 10, 12),
        "NET": (1, 4, 5, 6, 7, 8, 10),
        "PRIV": (1, 2, 3, 11, 15, 17, 27, 28),
        "PY": (14,),
    }.items()
    for number in numbers
]


def test_a_driver_that_isolates_nothing_and_claims_to_is_found_out() -> None:
    """And the machine is none the worse: what would harm it is not tried."""
    careless = Subject(driver="careless", make=partial(light, "local"))
    harmful = [promise.id for promise in PROMISES if promise.harmful and not promise.needs]
    found = asyncio.run(run_suite(careless, [p for p in PROMISES if p.id in {*NOTICED, *harmful}]))
    assert [outcome for outcome in found if outcome.state is not State.BROKEN] == []
    assert {o.id for o in found if "not tried" in o.reason} == set(harmful)


async def kept(world: World) -> None:
    same(await world.box.sh("echo $((6 * 7))"), "42")


async def broken(world: World) -> None:
    expect(False, "as was to be shown")


async def untried(world: World) -> None:
    raise Untried("not on this machine")


async def faulty(world: World) -> None:
    raise ValueError("a fault of the promise's own")


def test_an_error_of_any_kind_breaks_its_promise_and_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    promises = [
        Promise(id=f"X-00{number}", text="It holds.", keep=keep, needs=needs)
        for number, (keep, needs) in enumerate(
            [(kept, ()), (broken, ()), (faulty, ()), (kept, ("no-such",)), (untried, ())]
        )
    ]
    subject = Subject(driver="namespaces", make=DRIVERS["namespaces"])
    report = tmp_path / "outcomes.json"
    assert asyncio.run(conformance(subject, promises, report)) is False
    printed = capsys.readouterr().out
    assert "1 kept, 2 broken, 2 not applicable" in printed
    assert "Broken: as was to be shown" in report.read_text()
    assert "ValueError: a fault of the promise's own" in report.read_text()
    assert "the image has no no-such" in report.read_text()
    assert asyncio.run(conformance(subject, promises[:1], None)) is True


def test_same_and_expect_say_what_was_seen() -> None:
    with pytest.raises(Broken, match="found '1', promised '2'"):
        same(1, 2)
    expect(True, "")
