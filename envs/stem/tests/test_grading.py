"""Grading of short answers, also hostile ones, and the search tool."""

from typing import Any

import pytest

from prorl_envs.env.audit.audit import validate
from prorl_envs.env.node import Node
from prorl_envs.env.registry import example_path, load_tasks
from prorl_envs.envs.stem.env import MAX_SEARCHES, StemEnvironment
from prorl_envs.envs.stem.grading import MAX_CHARS, chosen, is_right
from prorl_envs.envs.stem.task import StemTask
from prorl_envs.tools.types import ToolCall, ToolResult

CHOICE = {"type": "choice", "value": "B"}
NUMBER = {"type": "number", "value": 3e8, "units": ["m/s", "m s^-1"]}
TEXT = {"type": "text", "values": ["Arctic char", "charr"]}

STEPS = {**CHOICE, "choices": ["Decrease", "Increase, then decrease", "Increase"]}
GRAVITY = {"type": "number", "value": 9.8, "units": ["m/s^2"]}
ANGLE = {"type": "number", "value": 30, "units": ["°"]}
WATER = {"type": "text", "values": ["H2O"]}


def task(answer: dict[str, Any]) -> StemTask:
    choices = ["an ion", "a photon", "a proton"] if answer["type"] == "choice" else []
    row = {"id": "t", "instruction": "Which?", "choices": answer.get("choices", choices)}
    row["answer"] = {key: value for key, value in answer.items() if key != "choices"}
    return StemEnvironment.load(row)


@pytest.mark.anyio
@pytest.mark.timeout(600)
async def test_every_example_discriminates(node: Node) -> None:
    tasks = [loaded for loaded in load_tasks("stem", example_path("stem")) if isinstance(loaded, StemTask)]
    verdicts = await validate(StemEnvironment, node, tasks, concurrency=2)
    assert len(verdicts) == 10
    assert {verdict.task_id: verdict.findings for verdict in verdicts if not verdict.ok} == {}


@pytest.mark.parametrize(
    ("answer", "given", "right"),
    [
        (CHOICE, "B", True),
        (CHOICE, "(b)", True),
        (CHOICE, "**B.**", True),
        (CHOICE, r"\text{B}", True),
        (CHOICE, "B. a photon", True),
        (CHOICE, "a photon", True),
        (CHOICE, "option B", True),
        (CHOICE, "Choice (B)", True),
        (CHOICE, "B - a photon", True),
        (CHOICE, "B, a photon", True),
        (CHOICE, "B - a proton", False),
        (CHOICE, "(B). a photon", True),
        (CHOICE, "(B). a proton", False),
        (CHOICE, "[B]", True),
        (CHOICE, "{b}", True),
        (CHOICE, "B,", True),
        (CHOICE, "(B", False),
        (CHOICE, "The answer is B", True),
        (CHOICE, "the correct answer is option (B).", True),
        (CHOICE, "The answer is not B", False),
        # a text that is cut off or goes on
        (CHOICE, r"\boxed{B: A photon...}", True),
        (CHOICE, "B: a photon (light)", True),
        (CHOICE, "B) a photon, because it has no mass", True),
        (CHOICE, "B. not a photon", False),
        (CHOICE, "B. a photon or a proton", False),
        (CHOICE, "B. a photon, no: C", False),
        (CHOICE, "B: wrong", False),
        (STEPS, "B. increase, then decrease", True),
        (STEPS, "B. increase, then", True),
        (STEPS, "B. increase", False),
        (STEPS, "C. increase", False),
        (STEPS, "A. increase, then decrease", False),
        (CHOICE, "Answer: B", True),
        (CHOICE, "A", False),
        (CHOICE, "A or B", False),
        (CHOICE, r"\boxed{A} or \boxed{B}", False),
        (CHOICE, r"\boxed{A}. \boxed{B}", True),
        (CHOICE, "B, C", False),
        (CHOICE, "ABC", False),
        (CHOICE, "B. a proton", False),
        (CHOICE, "", False),
        (NUMBER, "3e8", True),
        (NUMBER, "3.0e8 m/s", True),
        (NUMBER, r"3.0 \times 10^{8} \text{m/s}", True),
        (NUMBER, "2.998 x 10^8 m s^-1", True),
        (NUMBER, r"300\,000\,000", True),
        (NUMBER, "300{,}000{,}000 m/s", True),
        (NUMBER, "300 000 00", False),
        ({"type": "number", "value": 1e5}, "10^{5}", True),
        ({"type": "number", "value": 1e5}, "10^50", False),
        ({"type": "number", "value": 1e-30}, "10^{-20}", False),
        (NUMBER, "3 × 10⁸ m/s", True),
        (NUMBER, "3 × 10⁷ m/s", False),
        (NUMBER, "≈ 3e8 m/s", True),
        (NUMBER, r"\approx 3 \times 10^8 \text{ m s}^{-1}", True),
        (NUMBER, "3e8 m s⁻¹", True),
        (NUMBER, "3e8 m s⁻²", False),
        (GRAVITY, "9.8 m/s²", True),
        (GRAVITY, r"9.8\,\mathrm{m}/\mathrm{s}^2", True),
        (GRAVITY, "9.8 m/s³", False),
        (ANGLE, r"30^\circ", True),
        (ANGLE, r"30^{\circ}", True),
        (ANGLE, "30°", True),
        (ANGLE, r"30^\circ\text{C}", False),
        ({"type": "number", "value": -5, "units": ["°C"]}, r"−5^\circ\text{C}", True),
        ({"type": "number", "value": 5, "units": ["µm"]}, r"5\,\mu\text{m}", True),
        ({"type": "number", "value": 5, "units": ["µm"]}, "5 mm", False),
        ({"type": "number", "value": 5, "units": ["Ω"]}, r"5\,\Omega", True),
        ({"type": "number", "value": 50, "units": ["%"]}, r"50\%", True),
        ({"type": "number", "value": 0.5}, r"\frac{1}{2}", True),
        ({"type": "number", "value": 0.5}, r"-\dfrac12", False),
        ({"type": "number", "value": 1000}, "10³", True),
        ({"type": "number", "value": 103}, "10³", False),
        (NUMBER, "3e8 km/s", False),
        (NUMBER, "3e5", False),
        (NUMBER, "3e8 or 4e8", False),
        (NUMBER, "3e8, 4e8", False),
        (NUMBER, "9" * 3000, False),
        (TEXT, "the arctic  CHAR.", True),
        (TEXT, "charr", True),
        (TEXT, "trout or charr", False),
        (WATER, "H₂O", True),
        (WATER, "H_2O", True),
        (WATER, r"\ce{H2O}", True),
        (WATER, r"$\mathrm{H_{2}O}$", True),
        (WATER, "H₂O₂", False),
        (WATER, "H²O", False),
        ({"type": "text", "values": ["X-ray"]}, "X‑ray", True),
        ({"type": "text", "values": ["Aa"]}, "aa", False),
        ({"type": "text", "values": ["AaBb"]}, "AABb", False),
        ({"type": "text", "values": ["AaBb"]}, "$AaBb$.", True),
        ({"type": "text", "values": ["NO"]}, "no", True),
        ({"type": "text", "values": ["no"]}, "on", False),
        ({"type": "text", "values": ["Ohm's law"]}, "Ohm’s law", True),
        ({"type": "text", "values": ["α particle"]}, r"$\alpha$ particle", True),
        ({"type": "text", "values": ["α particle"]}, r"$\beta$ particle", False),
        (TEXT, "", False),
        (CHOICE, "**B.** a photon", True),
        (CHOICE, "**B**", True),
        (CHOICE, "`B`", True),
        (CHOICE, "$B$", True),
        (CHOICE, r"$\mathbf{B}$", True),
        (CHOICE, "**B. a photon**", True),
        (CHOICE, "**A** or **B**", False),
        (CHOICE, "**B.** a proton", False),
        (CHOICE, "$A$ $B$", False),
        (NUMBER, "**3e8** m/s", True),
        (NUMBER, "**3e8 m/s**", True),
        (NUMBER, r"$3.0 \times 10^8$ m/s", True),
        (NUMBER, r"$3.0 \times 10^8\ \text{m/s}$", True),
        (NUMBER, r"$3.0 \times 10^8$ $\mathrm{m/s}$", True),
        (NUMBER, r"3.0 \times 10^8\,\mathrm{m\,s^{-1}}", True),
        (NUMBER, r"3.0 \times 10^8~\mathrm{~m/s}", True),
        (NUMBER, r"$3 \cdot 10^8$ m / s", True),
        (NUMBER, "3e8 s / m", False),
        (NUMBER, "v = 3e8 m/s", True),
        (NUMBER, "about 3e8 m/s", True),
        (NUMBER, "v = 3e8 = 4e8 m/s", False),
        (NUMBER, r"3e8\ \frac{\text{m}}{\text{s}}", True),
        ({**NUMBER, "units": ["μm"]}, r"3e8\,\mu\text{m}", True),
        (
            {**NUMBER, "units": [r"$\mathrm{~kg} \cdot \mathrm{m}^{2} \mathrm{~K}^{-1}$"]},
            "3e8 kg·m^2 K^-1",
            True,
        ),
        ({"type": "number", "value": 10 / 3}, r"3\frac{1}{3}", True),
        ({"type": "number", "value": 31 / 3}, r"3\frac{1}{3}", False),
        ({"type": "number", "value": 10 / 3}, "3\x0crac{1}{3}", True),
        ({"type": "number", "value": 2**60 + 1, "rel_tol": 0}, str(2**60 + 1), True),
        ({"type": "number", "value": 2**60 + 1, "rel_tol": 0}, str(2**60), False),
        (NUMBER, r"$3\ \text{m/s}$", False),
        (NUMBER, r"$3e8\ \text{km/s}$", False),
        (NUMBER, "**3e8** or **4e8** m/s", False),
        (NUMBER, "$3$ $e8$", False),
        ({"type": "number", "value": 2.25}, "2 1/4", True),
        ({"type": "number", "value": 2.25}, "**2 1/4**", True),
        ({"type": "number", "value": 10}, "4 10/3", False),
        ({"type": "number", "value": 42}, "4 2", False),
        ({"type": "number", "value": 42}, "$4$$2$", False),
        ({"type": "number", "value": 1e-20}, "0", False),
        ({"type": "number", "value": 1e-20}, "1e-30", False),
        (TEXT, "**charr**", True),
        (TEXT, r"$\text{charr}$", True),
        (TEXT, "_the_ **arctic char**", True),
        ({"type": "text", "values": ["*E. coli*", r"$x^2$"]}, "E. coli", True),
        ({"type": "text", "values": ["*E. coli*", r"$x^2$"]}, "x^2", True),
        (TEXT, "**trout** or **charr**", False),
    ],
)
def test_right_and_wrong_answers_are_distinguished(answer: dict[str, Any], given: str, right: bool) -> None:
    assert is_right(task(answer), given) is right


@pytest.mark.parametrize("units", [["m", "km"], ["km", "m"]])
def test_a_unit_with_a_shorter_unit_as_its_end_is_read_whole(units: list[str]) -> None:
    length = {"type": "number", "value": 5, "units": units}
    assert is_right(task(length), "5 km") and is_right(task(length), "5 m")
    assert not is_right(task(length), "5 mm")


def test_a_text_shared_by_several_choices_chooses_none() -> None:
    row = {"id": "t", "instruction": "Which?", "answer": {"type": "choice", "value": "A"}}
    same = StemEnvironment.load({**row, "choices": ["the photon", "a photon", "a proton"]})
    assert not is_right(same, "photon") and is_right(same, "A. photon")
    assert chosen(same, "photon") == "" and chosen(same, "proton") == "C"


async def search(env: StemEnvironment, arguments: dict[str, Any]) -> ToolResult:
    return await env.call(ToolCall(id="s", name="search", arguments=arguments))


@pytest.mark.anyio
async def test_a_search_finds_pages_only(node: Node) -> None:
    async with StemEnvironment(node) as env:
        prompt = await env.init(task(CHOICE))
        assert prompt.messages[-1]["content"] == "Which?\n\nA. an ion\nB. a photon\nC. a proton"
        found = await search(env, {"query": "velmorite crystal"})
        assert found.ok and "orthorhombic" in found.text and found.data["sources"][0] == "velmorite.md#1"
        # operators of SQLite's query language are treated as words
        for query in (
            'velmorite" OR "x',
            "NEAR(velmorite crystal)",
            "title:velmorite",
            "velmorite*",
            "velmorite AND NOT x",
        ):
            assert "orthorhombic" in (await search(env, {"query": query})).text
        assert (await search(env, {"query": "zzzz"})).text == "Nothing was found."
        for wrong in ({}, {"query": 5}, {"query": ""}, {"query": "x" * 401}, {"query": "x", "limit": 10**9}):
            assert not (await search(env, wrong)).ok
        while (last := await search(env, {"query": "lake"})).ok:
            pass
        assert str(MAX_SEARCHES) in last.text


@pytest.mark.anyio
async def test_neither_pages_nor_answers_are_in_the_sandbox(node: Node) -> None:
    pages = "grep -rlsI 'velmorite' /workspace /home /tmp /run /etc"
    look = f"({pages}; find / -name '*.sqlite' -o -name 'velmorite*') 2>/dev/null"
    async with StemEnvironment(node) as env:
        await env.init(task(CHOICE))
        found = await env.call(ToolCall(id="b", name="bash", arguments={"command": f"{look} | head; true"}))
    assert "velmorite" not in found.text and "sqlite" not in found.text


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("words", "reward"),
    [
        (r"It is \boxed{B}", 1.0),
        ("Answer: B", 1.0),
        ("Answer: **B.** a photon", 1.0),
        ("\\boxed{E \\gg kT}\n**Answer: B**", 1.0),
        ("**Answer: B**\n\\boxed{C}", 0.0),
        ("B or C", 0.0),
    ],
)
async def test_answers_of_a_last_message(node: Node, words: str, reward: float) -> None:
    async with StemEnvironment(node) as env:
        await env.init(task(CHOICE))
        env.on_transcript([{"role": "assistant", "content": words}])
        assert (await env.eval()).reward == reward


def test_articles_on_their_own_are_words() -> None:
    the = task({"type": "text", "values": ["The"]})
    assert is_right(the, "the") and not is_right(the, "a")


@pytest.mark.parametrize("part", ["\t", r"\,", "0", "^ {", ", "])
@pytest.mark.parametrize("answer", [CHOICE, NUMBER, TEXT])
def test_hostile_answers_are_judged_quickly(answer: dict[str, Any], part: str) -> None:
    hostile = f"a{part * ((MAX_CHARS - 2) // len(part))}b"
    assert not any(is_right(task(answer), hostile) for _ in range(20))


def test_an_answer_that_is_too_long_is_wrong() -> None:
    assert is_right(task(CHOICE), "B".ljust(MAX_CHARS))
    assert not is_right(task(CHOICE), "B".ljust(MAX_CHARS + 1))
