"""Grading of answers, from agents that submit other things than answers."""

import pytest

from prorl_envs.env.base import Grade
from prorl_envs.env.node import Node
from prorl_envs.env.registry import example_path, load_tasks
from prorl_envs.env.validate import validate
from prorl_envs.envs.math.answers import quick
from prorl_envs.envs.math.env import MathEnvironment
from prorl_envs.envs.math.task import MathTask
from prorl_envs.errors import EnvironmentFault
from prorl_envs.tools.types import ToolCall


async def play(node: Node, right: str, answer: str | None = None, words: str = "") -> Grade:
    async with MathEnvironment(node) as env:
        await env.init(MathEnvironment.load({"id": "t", "instruction": "Find it.", "answer": right}))
        if answer is not None:
            await env.call(ToolCall(id="f", name="finish", arguments={"answer": answer}))
        if words:
            env.on_transcript([{"role": "assistant", "content": words}])
        return await env.eval()


@pytest.mark.anyio
@pytest.mark.thorough
@pytest.mark.timeout(600)
async def test_every_example_discriminates(node: Node) -> None:
    tasks = [task for task in load_tasks("math", example_path("math")) if isinstance(task, MathTask)]
    verdicts = await validate(MathEnvironment, node, tasks, concurrency=2)
    assert len(verdicts) == 12
    assert {verdict.task_id: verdict.problems for verdict in verdicts if not verdict.ok} == {}


@pytest.mark.parametrize(
    ("right", "answer", "verdict"),
    [
        ("42", "42", True),
        ("42", "42.0", True),
        ("1,234", "1234", True),
        ("42", "41", False),
        ("42", "42.00001", False),
        ("12345678901234567890", "12345678901234567891", False),
        ("1/3", "0.333333", None),
        (r"\frac{1}{2}", r"\dfrac12", None),
        (r"\dfrac{1}{2}", r"\frac{1}{2}", True),
        (r"\text{Monday}", "Monday", True),
        ("x**2 - 1", "(x-1)*(x+1)", True),
        ("x**2 - 1", "(x-1)*(x+2)", None),
        ("sqrt(8)", "2*sqrt(2)", True),
        ("42", "9**9**9**9", None),
        ("42", "(" * 1500, None),
    ],
)
def test_plain_answers_need_no_library(right: str, answer: str, verdict: bool | None) -> None:
    assert quick(answer, right) is verdict


@pytest.mark.anyio
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("right", "answer", "reward"),
    [
        ("42", "$42$", 1),
        ("42", r"\boxed{42}", 1),
        ("42", "42.", 1),
        (r"\frac{1}{2}", "0.5", 1),
        (r"\{1, 2\}", r"\{2, 1\}", 1),
        ("[0, 1)", r"\left[0, 1\right)", 1),
        (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", r"\begin{bmatrix} 1 & 2 \\ 3 & 4 \end{bmatrix}", 1),
        ("[0, 1)", "[0, 1]", 0),
        ("42", "41 or 42", 0),
        ("42", "41, 42", 0),
        ("42", r"$41$ $42$", 0),
        ("42", r"\boxed{41} \boxed{42} \boxed{43}", 0),
        ("42", "", 0),
        ("42", "the answer", 0),
        ("42", "x", 0),
        (r"\frac{1}{2}", r"\int_0^1 x dx", 0),
        (r"\frac{1}{2}", "__import__('os').system('touch /tmp/x')", 0),
        pytest.param("42", r"9^{9^{9^{9^{9}}}}", 0, marks=pytest.mark.thorough),
        pytest.param("42", "9!" + "!" * 30, 0, marks=pytest.mark.thorough),
        ("42", "\\sqrt{" * 300 + "42" + "}" * 300, 0),
        ("42", "4" * 19_000, 0),
        ("x^2", "\x00\x01\\\\\\{{{", 0),
    ],
)
async def test_answers_of_the_finish_call(node: Node, right: str, answer: str, reward: int) -> None:
    grade = await play(node, right, answer)
    assert grade.reward == reward, grade.evidence


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("words", "reward"),
    [
        (r"So it is \boxed{42}.", 1),
        (r"<think>\boxed{41}</think> It is \boxed{42}", 1),
        (r"First \boxed{41}, no: \boxed{ 42 }", 1),
        ("It is clear.\n**Answer:** 42", 1),
        ("The final answer is: $42$.", 1),
        (r"<think>It is \boxed{42}", 0),
        (r"It is \boxed{42", 0),
        ("It is 42", 0),
        (r"\boxed{42} or \boxed{43}", 0),
    ],
)
async def test_answers_of_a_last_message(node: Node, words: str, reward: int) -> None:
    grade = await play(node, "42", words=words)
    assert grade.reward == reward, grade.evidence


@pytest.mark.anyio
async def test_the_finish_call_takes_precedence_over_the_message(node: Node) -> None:
    assert (await play(node, "42", "41", words=r"\boxed{42}")).reward == 0.0


@pytest.mark.anyio
async def test_a_missing_library_is_named_with_its_remedy(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prorl_envs.envs.math.env._PACKAGES", ("no_such_library",))
    with pytest.raises(EnvironmentFault, match="no_such_library") as caught:
        await play(node, "42", "42")
    assert "pip install" in caught.value.hint
