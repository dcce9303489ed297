"""Retrieval and grading of answers, also of hostile texts, variables and files."""

from typing import Any

import pytest

from prorl_envs.env.base import Grade
from prorl_envs.env.node import Node
from prorl_envs.envs.ipython.env import IPythonEnvironment
from prorl_envs.envs.ipython.grading import judge
from prorl_envs.errors import EnvironmentFault
from prorl_envs.tools.types import ToolCall, ToolResult

NUMBER: dict[str, Any] = {"type": "number", "value": 42}


def row(check: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"id": "t", "instruction": "Find it.", "checks": [check], **more}


async def run(env: IPythonEnvironment, code: str) -> ToolResult:
    return await env.call(ToolCall(id="c", name="ipython", arguments={"code": code}), timeout_s=30)


async def play(
    node: Node, check: dict[str, Any], code: str = "", answer: object = None, **more: Any
) -> Grade:
    """Run an episode: run `code`, call finish with `answer` unless it is None, and grade."""
    async with IPythonEnvironment(node) as env:
        await env.init(IPythonEnvironment.load(row(check, **more)))
        if code:
            await run(env, code)
        if answer is not None:
            await env.call(ToolCall(id="f", name="finish", arguments={"answer": answer}))
        return await env.eval()


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("check", "answer", "reward"),
    [
        (NUMBER, "42", 1),
        (NUMBER, 42, 1),
        (NUMBER, "42.00001", 1),
        (NUMBER, "42.1", 0),
        (NUMBER, "", 0),
        (NUMBER, "6*7", 0),
        (NUMBER, "[42]", 0),
        ({"type": "numbers", "values": [1, 2]}, "{2, 1}", 1),
        ({"type": "numbers", "values": [1, 2], "ordered": True}, "2, 1", 0),
        ({"type": "expression", "value": "2*x", "variables": ["x"]}, "x + x", 1),
        ({"type": "expression", "value": "2*x", "variables": ["x"]}, "x*(9**9**9**9)", 0),
        ({"type": "text", "value": "the sea"}, "the\nsea ", 1),
    ],
)
async def test_answers_of_the_finish_call(
    node: Node, check: dict[str, Any], answer: object, reward: int
) -> None:
    assert (await play(node, check, answer=answer)).reward == reward


@pytest.mark.parametrize(
    ("value", "answer", "right"),
    [
        ("2*x", "2x", True),
        ("2*x", "2 x", True),
        ("2*x", "x2", False),
        ("2*x + 1", "1+2x", True),
        ("2*sin(x) - 3*(x + 1)", "2sin(x) - 3(x+1)", True),
        ("2.5*x**2", "2.5x^2", True),
        ("6*x", "3*2x", True),
        ("x/2", "1/2x", False),
        ("1/(2*x)", "1/2x", False),
        ("1/(2*x)", "1/  2x", False),
        ("1/(2*x)", "1/(2x)", True),
        ("x**2*y", "x^2y", False),
        ("x**(2*y)", "x**2y", False),
        ("2000*x", "2e3*x", True),
        ("abs(x - y)", "|x - y|", True),
        ("2*abs(x - y)", "2|x-y|", True),
        ("2*abs(x - y)", "x-y", False),
        ("abs(x) - abs(y)", "|x|-|y|", True),
        ("abs(x - y)", "|x|-|y|", False),
        ("abs(x - abs(y))", "|x-|y||", False),
        ("abs(x)", "|x", False),
        ("x", "x" + " " * 100_000 + "+ 1", False),
        ("x", "x" + "*" * 100_000, False),
    ],
)
def test_expressions_may_omit_multiplication_signs(value: str, answer: str, right: bool) -> None:
    check = {"type": "expression", "value": value, "variables": ["x", "y"]}
    (parsed,) = IPythonEnvironment.load(row(check)).checks
    assert judge("c", parsed, answer).passed is right


@pytest.mark.parametrize(
    ("check", "answer", "right"),
    [
        ({"type": "number", "value": 1e-12}, "1e-12", True),
        ({"type": "number", "value": 1e-12}, "0", False),
        ({"type": "number", "value": 1e-12}, "5e-10", False),
        ({"type": "number", "value": 0}, "1e-17", True),
        ({"type": "number", "value": 0}, "1e-8", False),
        ({"type": "number", "value": 1e-12, "abs_tol": 1e-9}, "0", True),
        ({"type": "number", "value": 2.25}, "2 1/4", True),
        ({"type": "number", "value": 2**60 + 1, "rel_tol": 0}, str(2**60 + 1), True),
        ({"type": "number", "value": 2**60 + 1, "rel_tol": 0}, str(2**60), False),
        ({"type": "numbers", "values": [0.3, 1], "rel_tol": 0, "abs_tol": 0.1}, "[0.4, 1]", True),
        ({"type": "numbers", "values": [0, 1e-12]}, "1e-17, 1e-12", True),
        ({"type": "numbers", "values": [0, 1e-12]}, "0, 2e-12", False),
        ({"type": "expression", "value": "10**-20"}, "10**-30", False),
        ({"type": "expression", "value": "10**-20"}, "1/10**20", True),
    ],
)
def test_very_small_numbers_are_distinguished(check: dict[str, Any], answer: str, right: bool) -> None:
    ((name, loaded),) = IPythonEnvironment.load(row(check)).named_checks()
    assert judge(name, loaded, answer).passed is right


NUMBERS: dict[str, Any] = {"type": "numbers", "values": [1, 2, 3, 4], "ordered": True}
EXPRESSION: dict[str, Any] = {"type": "expression", "value": "2*x - 1/cos(x)", "variables": ["x"]}
TEXT: dict[str, Any] = {"type": "text", "value": "the sea"}


@pytest.mark.parametrize(
    ("check", "answer", "right"),
    [
        (NUMBER, "**42**", True),
        (NUMBER, "`42`", True),
        (NUMBER, "'42'", True),
        (NUMBER, r"\boxed{42}", True),
        (NUMBER, "Answer: 42.", True),
        (NUMBER, "**41**", False),
        (NUMBER, r"\boxed{42} or \boxed{43}", False),
        (NUMBER, "np.float64(42.0)", True),
        (NUMBER, "numpy.int64(41)", False),
        (NUMBER, "x = 42", True),
        (NUMBER, "x == 42", False),
        (NUMBER, "4.2*10**1", True),
        (NUMBER, "4.2 × 10^1", True),
        (NUMBER, "4.2 × 10^(−1)", False),
        (NUMBER, "4.2 × 11^1", False),
        ({**NUMBER, "source": "file:out.txt"}, "**42**", False),
        (NUMBERS, "[np.float64(1.0), np.float64(2.0), np.float64(3.0), np.float64(4.0)]", True),
        (NUMBERS, "array([1., 2., 3., 4.])", True),
        (NUMBERS, "np.array([[1, 2],\n       [3, 4]], dtype=np.int32)", True),
        (NUMBERS, "[[1, 3], [2, 4]]", False),
        (NUMBERS, "(1, 2), (3, 4)", True),
        (NUMBERS, "1, 2, 3 and 4", True),
        (NUMBERS, "**1, 2, 3, and 4**", True),
        (NUMBERS, "1(2) 3(4)", False),
        (NUMBERS, "[1, 2, 3]", False),
        (EXPRESSION, "2*x - sec(x)", True),
        (EXPRESSION, "f(x) = 2*x - 1/np.cos(x)", True),
        (EXPRESSION, "`2*x - 1/cos(x)`", True),
        (EXPRESSION, "2·x − sec(x)", True),
        (EXPRESSION, "2*x - csc(x)", False),
        (EXPRESSION, "2 *x* 1 - sec(x)", True),
        (TEXT, "**the sea**", True),
        (TEXT, "'the sea'", True),
        (TEXT, "**The sea**", False),
        ({**TEXT, "source": "file:out.txt"}, "**the sea**", False),
    ],
)
def test_decoration_and_what_python_adds_do_not_count(
    check: dict[str, Any], answer: str, right: bool
) -> None:
    ((name, loaded),) = IPythonEnvironment.load(row(check)).named_checks()
    assert judge(name, loaded, answer).passed is right


@pytest.mark.parametrize("part", [" ", "*", "x 10 ^ ", "4 ", "| ", "array(", ", dtype="])
@pytest.mark.parametrize("check", [NUMBER, NUMBERS, EXPRESSION, TEXT])
def test_hostile_answers_are_judged_quickly(check: dict[str, Any], part: str) -> None:
    ((name, loaded),) = IPythonEnvironment.load(row({**check, "source": "file:out.txt"})).named_checks()
    for _ in range(50):  # a task may have 50 checks
        assert not judge(name, loaded, part * (20_000 // len(part)) + "y").passed


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("source", "code", "reward"),
    [
        ("variable:a", "a = 42", 1),
        ("variable:a", "import numpy; a = numpy.float64(42)", 1),
        ("variable:a", "import sympy; a = sympy.Integer(42)", 1),
        ("variable:a", "b = 42", 0),
        ("variable:a", "class A:\n def __str__(self): raise SystemExit\na = A()", 0),
        ("variable:a", "class A:\n def __str__(self):\n  import os; os._exit(1)\na = A()", 0),
        ("variable:a", "a = '42\\n' * 100_000", 0),
        ("variable:a", "print = lambda *a, **k: None\na = 42", 0),
        ("file:out.txt", "open('out.txt', 'w').write('42\\n')", 1),
        ("file:out.txt", "open('/tmp/out.txt', 'w').write('42\\n')", 0),
        ("file:out.txt", "import os; os.mkfifo('out.txt')", 0),
        ("file:out.txt", "import os; os.symlink('/dev/zero', 'out.txt')", 0),
        ("file:out.txt", "open('out.txt', 'w').truncate(2**32)", 0),
    ],
)
async def test_answers_left_in_the_sandbox(node: Node, source: str, code: str, reward: int) -> None:
    assert (await play(node, {**NUMBER, "source": source}, code)).reward == reward


@pytest.mark.anyio
async def test_several_numbers_in_a_variable(node: Node) -> None:
    check = {"type": "numbers", "values": [1.5, 2.5], "source": "variable:a"}
    assert (await play(node, check, "import numpy; a = numpy.array([2.5, 1.5])")).reward == 1.0
    assert (await play(node, check, "import pandas; a = pandas.Series({'x': 1.5, 'y': 2.5})")).reward == 1.0
    assert (await play(node, check, "a = {2.5, 1.5}")).reward == 1.0


@pytest.mark.anyio
async def test_an_answer_is_submitted_once(node: Node) -> None:
    async with IPythonEnvironment(node) as env:
        await env.init(IPythonEnvironment.load(row(NUMBER)))
        for arguments in (
            {"answer": ["42"]},
            {"answer": "4" * 30_000},
            {"answer": float("nan")},
            {"other": 1},
        ):
            refused = await env.call(ToolCall(id="f", name="finish", arguments=arguments))
            assert not refused.ok
        assert (await env.call(ToolCall(id="f", name="finish", arguments={"answer": "41"}))).ok
        late = await env.call(ToolCall(id="f", name="finish", arguments={"answer": "42"}))
        assert not late.ok
        assert (await env.eval()).reward == 0.0


@pytest.mark.anyio
async def test_setup_creates_its_names_and_files(node: Node) -> None:
    check = {**NUMBER, "source": "variable:a"}
    code = "a = start + int(open('data.txt').read())"
    grade = await play(node, check, code, setup="start = 40", files={"data.txt": "2"})
    assert grade.reward == 1.0


@pytest.mark.anyio
async def test_a_setup_that_fails_is_an_error(node: Node) -> None:
    with pytest.raises(EnvironmentFault, match="no luck"):
        await play(node, NUMBER, setup="raise ValueError('no luck')")


@pytest.mark.anyio
async def test_the_session_sees_neither_graders_nor_reference_solutions(node: Node) -> None:
    """The interpreter is the host's own, but the content of this package must not be visible."""
    search = """
import importlib, os, sys
found = []
for name in ("prorl_envs.envs.ipython.grading", "prorl_envs.env.answers", "prorl_envs.env.base"):
    try:
        importlib.import_module(name)
        found.append(name)
    except ImportError:
        pass
for root in {sys.prefix, sys.base_prefix, "/usr", "/home", "/tmp", "/workspace", *sys.path}:
    for folder, _, files in os.walk(root):
        found += [os.path.join(folder, f) for f in files if f == "example.jsonl"]
found += [name for name in sys.modules if name.startswith("prorl_envs.env")]
print(found)
"""
    async with IPythonEnvironment(node) as env:
        await env.init(IPythonEnvironment.load(row(NUMBER)))
        result = await run(env, search)
    assert result.text.strip() == "[]"
