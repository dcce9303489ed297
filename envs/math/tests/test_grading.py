"""Grading of answers, also of hostile texts."""

from collections.abc import Callable, Iterator

import pytest
from latex2sympy2_extended import latex2sympy2, math_normalization
from math_verify import grader, parser

from prorl_envs.env.audit.audit import validate
from prorl_envs.env.base import Grade
from prorl_envs.env.node import Node
from prorl_envs.env.registry import example_path, load_tasks
from prorl_envs.env.words import bare
from prorl_envs.envs.math import verifier
from prorl_envs.envs.math.answers import quick
from prorl_envs.envs.math.env import MathEnvironment
from prorl_envs.envs.math.notation import canonical, is_plain, with_log_of
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
    assert {verdict.task_id: verdict.findings for verdict in verdicts if not verdict.ok} == {}


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
        (r"\frac{1}{2}", r"\dfrac12", True),
        (r"\dfrac{1}{2}", r"\frac{1}{2}", True),
        (r"\text{Monday}", "Monday", True),
        (r"\text{no solution}", "No solution", True),
        (r"\text{no solution}", r"\text{No} \text{solutions}", False),
        (r"\text{east}", "East", True),
        (r"\text{east}", "seat", False),
        (r"\text{east}", "e", False),
        (r"\text{east}", "5", None),
        ("abcd", "bacd", None),
        ("abc", "ABC", True),
        ("x**2 - 1", "(x-1)*(x+1)", None),
        ("sqrt(8)", "2*sqrt(2)", None),
        ("42", "4 2", None),
        ("42", r"4\,2", None),
        ("1000", "1 000", True),
        ("1000000", r"1\,000\,000", True),
        ("-5", "−5", True),
        ("21/4", "2 1/4", None),
        (r"2\frac{1}{4}", "2 1/4", True),
        ("4 10/3", "4 10/3", True),
        ("101_2", "101_3", False),
        ("101_2", "101_{2}", True),
        ("2516_8", r"2516_{\text{eight}}", True),
        ("2516_8", r"2516_{\text{nine}}", False),
        ("101_2", "101₂", True),
        ("101_2", "101₃", False),
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
        ("42", "Final answer: **42**", 1),
        ("42", "42.", 1),
        (r"\frac{1}{2}", "0.5", 1),
        ("5", r"$\$5$", 1),
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


SMALL = [
    ("10^{-30}", "10^{-20}", 0),
    ("1/2^{98}", "1/2^{99}", 0),
    (r"\frac{1}{2006!}", r"\frac{1}{2004!}", 0),
    (r"\frac{1}{2006!}", r"\frac{1}{2006 \cdot 2005!}", 1),
    ("e^{-60}", "e^{-50}", 0),
    ("10^{-20}", "0", 0),
    ("0", "10^{-20}", 0),
    ("10^{-20}", "1 - 1", 0),
    ("10^{-20}", r"\sqrt{2} - \sqrt{2}", 0),
    ("10^{-7}", "0.0", 0),
    ("10^{-7}", "0.0000001", 1),
    ("10^{-7}", "1e-7", 1),
    (r"\frac{2}{10^7}", "0.0000001", 0),
    (r"2.0 \times 10^{-8}", r"1.0 \times 10^{-8}", 0),
    (r"2.0 \times 10^{-8}", "0.00000002", 1),
    (r"\sqrt{2}", r"\sqrt{2} + 10^{-20}", 0),
    ("2^100", "2^100 - 1", 0),
    ("10^{20}", "10^{20} + 1", 0),
    (r"\frac{x}{10^{30}}", r"\frac{x}{10^{20}}", 0),
    ("x", "x + 10^{-20}", 0),
    ("10^{-30} + i", "10^{-20} + i", 0),
    ("2f(x) + 2x", "2(f(x) + x)", 1),
    ("(10^{-30}, 1)", "(10^{-20}, 1)", 0),
    ("[0, 10^{-30}]", "[0, 10^{-20}]", 0),
    (r"\{10^{-30}\}", r"\{10^{-20}\}", 0),
    ("x = 10^{-30}", "x = 10^{-20}", 0),
    ("x < 10^{-30}", "x < 10^{-20}", 0),
    (r"\begin{pmatrix} 10^{-30} \\ 1 \end{pmatrix}", r"\begin{pmatrix} 10^{-20} \\ 1 \end{pmatrix}", 0),
    ("x^2 = -2", "x^2 = -1", 0),
    (r"\frac{1}{3}", "0.333333", 1),
    (r"\frac{1}{60}", "0.016667", 1),
    (r"\frac{1}{3}", "0.33333", 0),
    (r"\sqrt{2} - 1", "0.4142135623730951", 1),
    (r"1 + \sqrt{2}", r"\sqrt{3 + 2\sqrt{2}}", 1),
    (r"\frac{\pi}{2}", r"0.5\pi", 1),
    (r"\sin 2x", r"2 \sin x \cos x", 1),
]
WHOLE = [
    ("4", r"4\sqrt(2)", 0),
    (r"4\sqrt{2}", "4*sqrt(2)", 1),
    ("42", "42 +", 0),
    ("42", "42)", 0),
    ("42", "42?", 0),
    ("42", "42\n+1", 0),
    ("42", r"42\foo{3}", 0),
    ("42", r"42 \\ 43", 0),
    ("42", "42~43", 0),
    ("9", r"4\quad 5", 0),
    ("9", r"4\,5", 0),
    ("45", r"4\,5", 0),
    ("4", r"4\text{5}", 0),
    ("4", r"4\text{ or 5}", 0),
    ("4", r"4\text{ not}", 0),
    ("0.3", r"0.3\ldots", 0),
    ("4", "4√2", 0),
    ("5", r"\$5", 1),
    ("42", "43 = 42", 0),
    ("42", "x = 42", 1),
    ("2", "1 + 1 = 2", 1),
    ("4", r"4\frac", 0),
    (r"\frac{1}{2}", "x +\n\\frac{1}{2}", 0),
    ("6", "4 2", 0),
    ("42", "4 2", 0),
    ("42", r"42\%", 1),
    ("0.42", "42%", 1),
    ("43", "42%", 0),
    ("5", r"5 \text{ cm}", 1),
]
MIXED = [
    ("9/4", "2 1/4", 1),
    ("2.25", "2 1/4", 1),
    (r"\frac{9}{4}", r"2\frac14", 1),
    ("2 1/4", "9/4", 1),
    ("-9/4", "-2 1/4", 1),
    ("-7/4", "-2 1/4", 0),
    ("9/4", r"2\ 1/4", 1),
    ("x = 9/4", "x = 2 1/4", 1),
    ("9/4, 7/2", "2 1/4, 3 1/2", 1),
    ("100.5", "100 1/2", 1),
    ("2.75", "2.5 1/4", 0),
    ("(9/4, 1)", "(2 1/4, 1)", 1),
    ("21/4", "2 1/4", 0),
    ("1/2", "2 1/4", 0),
    ("3/4", "2 1/4", 0),
    ("10", "4 10/3", 0),
    ("14/3", "4 10/3", 0),
    ("22/3", "4 10/3", 0),
    ("40/3", "4 10/3", 0),
]
PLAIN = [
    ("x**2 - 1", "(x-1)*(x+1)", 1),
    ("x**2 - 1", "(x-1)*(x+2)", 0),
    ("sqrt(8)", "2*sqrt(2)", 1),
    (r"\frac{\pi}{2}", "pi/2", 1),
    (r"\sin^2 x", "sin(x)**2", 1),
    ("3", "log(8)/log(2)", 1),
    ("120", "factorial(5)", 1),
    ("e^2", "exp(2)", 1),
]

UNITS = [
    ("5 m", "5 cm", 0),
    ("5 m", "5 metres", 1),
    ("5 m", "5", 1),
    ("5", "5 km/h", 1),
    (r"5 \text{ cm}^2", r"5 \text{ cm}^3", 0),
    (r"5 \text{ cm}^2", "5 square centimeters", 1),
    (r"\frac{5}{2}\text{ cm}", r"2.5\text{ mm}", 0),
    (r"25\pi \text{ m}^2", r"25\pi \text{ cm}^2", 0),
    (r"\text{5 cm}", "5 m", 0),
    ("5", r"\text{5 cm}", 1),
    ("60 mph", "60 miles per hour", 1),
    ("60 mph", "60 km/h", 0),
    (r"5\text{ hours}", r"5\text{ minutes}", 0),
    (r"30^\circ", "30 degrees", 1),
    (r"30^\circ", "30 radians", 0),
    (r"20^\circ\text{C}", "20 degrees Fahrenheit", 0),
    (r"20^\circ\text{C}", "20 degrees Celsius", 1),
    (r"\$5", "$5", 1),
    (r"\$5", "5 dollars", 1),
    (r"\$5", "5 cents", 0),
    (r"\$1,000.50", "1000.5", 1),
    (r"3:45\text{ PM}", "3:45 a.m.", 0),
    (r"3:45\text{ PM}", "3:45 p.m.", 1),
    (r"x = 3 \text{ cm}", r"x = 3 \text{ m}", 0),
    (r"5 \frac{\text{m}}{\text{s}}", r"5 \frac{\text{m}}{\text{h}}", 0),
    (r"5 \frac{\text{m}}{\text{s}}", "5 m/s", 1),
    (r"5\,\mathrm{m\,s^{-2}}", r"5\,\mathrm{m/s^2}", 1),
    (r"2 \text{ hours } 30 \text{ minutes}", r"2 \text{ hours}", 0),
    (r"2 \text{ hours } 30 \text{ minutes}", r"2\text{ hours }30\text{ minutes}", 1),
    (r"5\%", r"5 \text{ cm}", 0),
    (r"5\text{ percent}", "0.05", 1),
    (r"7^{\text{th}}", "7th", 1),
    ("2x", "2x cm", 1),
    ("5", "5 units", 1),
    ("5 students", "5", 1),
    # variables, not units
    ("2m", "2", 0),
    ("6t", "6", 0),
    ("6", "6t", 0),
    ("2ab", "2", 0),
    (r"2\pi h", r"2\pi", 0),
    (r"\frac{1}{2}t", r"\frac{1}{2}", 0),
    ("3x + 2t", "3x + 2", 0),
    # quantities, not units
    ("5", r"5\text{ million}", 0),
    ("5", r"5\text{ at least}", 0),
    ("5", r"5\text{ dozen}", 0),
]
IGNORED = [
    ("4", "4'", 0),
    ("4", "'4'", 1),
    ("f'(x)", "f(x)", 0),
    ("f'(x)", r"f^{\prime}(x)", 1),
    ("5", "5_2", 0),
    ("5", "5_{10}", 1),
    ("101_2", "101", 1),
    ("A3_{16}", "A3_{15}", 0),
    ("123,456", "123, 456", 0),
    ("123,456", "123456", 1),
    ("(1,234)", "(1, 234)", 1),
    (r"10,\! 000", "10000", 1),
    (r"x<1 \text{ or } x>2", r"x<1 \text{ and } x>2", 0),
    (r"x<1 \text{ or } x>2", r"x>2 \text{ or } x<1", 1),
    ("2.5%", "2.5", 1),
    ("2.5%", "0.025", 1),
    ("2.5%", "0.25", 0),
    ("2.5%", "25%", 0),
    (r"28\%", "28 pct", 1),
    (r"0.\overline{3}", r"\frac{1}{3}", 1),
    (r"0.1\overline{6}", "1/6", 1),
    (r"1.\overline{36}", r"\frac{15}{11}", 1),
    (r"0.\overline{3}", "0.3", 0),
]


COMPLEX = [
    ("14 - i", "14.0 + -1.0i", 1),
    ("14 - i", "14 + 1i", 0),
    ("-1", "i^2", 1),
    ("-1", "i^3", 0),
    ("2i", "(1+i)^2", 1),
    ("2i", "2*I", 1),
    ("1 + 2*I", "1+2i", 1),
    (r"\frac{3}{2}i", "1.5i", 1),
    (r"-\frac{1}{2}+\frac{\sqrt3}{2}i", "-1/2 + sqrt(3)*I/2", 1),
    (r"e^{i\pi}", "-1", 1),
    (r"\cos x + i\sin x", "e^{ix}", 1),
    (r"\cos x + i\sin x", "e^{-ix}", 0),
    ("x+iy", "x+yi", 1),
    ("x+iy", "x-iy", 0),
    (r"1 \pm i", "1-i, 1+i", 1),
    (r"1 \pm i", "1-i", 0),
    (r"\begin{pmatrix} 0 & -i \\ i & 0 \end{pmatrix}", r"\begin{pmatrix} 0 & -1i \\ 1i & 0 \end{pmatrix}", 1),
    (r"\begin{pmatrix} 0 & -i \\ i & 0 \end{pmatrix}", r"\begin{pmatrix} 0 & i \\ -i & 0 \end{pmatrix}", 0),
    ("x = i", "x = -i", 0),
    ("a_i + 1", "1 + a_i", 1),
    (r"\sum_{i=1}^{n} i^2 + i", r"i + \sum_{i=1}^{n} i^2", 1),
    ("3i", "3", 0),
]
INEQUALITIES = [
    (r"x \in [-2,7]", r"-2 \le x \le 7", 1),
    (r"x \in [-2,7]", r"-2 \le x < 7", 0),
    (r"x \in [-2,7]", r"-2 \le y \le 7", 0),
    ("(0, 12.5)", "0 < x < 12.5", 1),
    (r"(-\infty, 3)", "x < 3", 1),
    ("x < 3", r"(-\infty, 3)", 1),
    (r"(-\infty, 3)", "3 > x", 1),
    (r"(-\infty,3)\cup(3,\infty)", r"x \ne 3", 1),
    (r"(-\infty,3)\cup(3,\infty)", r"x \ne 4", 0),
    (r"(-\infty,1)\cup(2,\infty)", r"x<1 \text{ or } x>2", 1),
    (r"(-\infty,1)\cup(2,\infty)", "x<1 or x>=2", 0),
    (r"(-\infty,1)\cup(2,\infty)", "x<1 and x>2", 0),
    ("x<1 or x>2", r"(-\infty,1)\cup(2,\infty)", 1),
    ("x<1 or x>2", "x<1, x>2", 1),
    ("x<1, x>2", r"x<1 \lor x>2", 1),
    ("x<1 or x>2", "y<1 or y>2", 0),
    ("1<x<2", r"x>1 \text{ and } x<2", 1),
    ("x<2", "x>1 and x<2", 0),
    ("x=1 or x>2", r"\{1\}\cup(2,\infty)", 1),
    ("x=1 or x>2", "x>2", 0),
    ("x>2 and y>3", "y>3 and x>2", 1),
    ("x>2", r"\{x \mid x > 2\}", 1),
    (r"\{x | x > 2\}", r"(2,\infty)", 1),
    ("x>2", r"\left\{x \in \mathbb{R} : x \ge 2\right\}", 0),
    # not solved
    ("(-3, 3)", "x^2 < 9", 0),
    ("(-3, 3)", "|x| < 3", 0),
    ("(-3, 3)", "x^2 < 9 and x < 3", 0),
]
SIGNS = [
    (r"2\sqrt{2}", "2√2", 1),
    (r"2\sqrt{2}", "2√3", 0),
    (r"\sqrt{x+1}", "√(x+1)", 1),
    ("2", "∛8", 1),
    ("x^2+1", "x²+1", 1),
    ("10^{-3}", "10⁻³", 1),
    ("10^{-3}", "10³", 0),
    ("x_{12}", "x₁₂", 1),
    (r"3\frac13", "3⅓", 1),
    (r"\frac{3}{4}", "¾", 1),
    (r"\frac{3}{4}", "½", 0),
    ("6", "2·3", 1),
    ("0.5", "1⁄2", 1),
    (r"(-\infty,3]", "(−∞, 3]", 1),
    (r"x \in [1,2]", "x ∈ [1,2]", 1),
    (r"5\text{ cm}^2", "5 cm²", 1),
    (r"5\text{ cm}^2", "5 cm³", 0),
    (r"2\sqrt{3}\text{ cm}", "2√3 m", 0),
    (r"\emptyset", r"\varnothing", 1),
    (r"\lg 100", "2", 1),
    (r"\lg 100", "3", 0),
    (r"\tg x", r"\tan x", 1),
    (r"\cot x", r"\operatorname{ctg} x", 1),
]
REAL = [
    ("602000000000000000000000", r"6.02\times10^{23}", 1),
    (r"6.02 \times 10^{23}", "602000000000000000000000", 1),
    (r"2.5\cdot 10^{-7}", "0.00000025", 1),
    ("602000000000000000000000", r"6.03\times10^{23}", 0),
    (r"\sqrt{1/n}", r"\frac{1}{\sqrt{n}}", 1),
    (r"\frac{1}{\sqrt{n}}", r"\sqrt{1/n}", 1),
    (r"2\ln x", r"\ln x^2", 1),
    (r"\ln x^2", r"2\ln x", 0),
    (r"\ln a - \ln b", r"\ln\frac{a}{b}", 1),
    (r"\sqrt{x}\sqrt{y}", r"\sqrt{xy}", 1),
    ("a^{bc}", "(a^b)^c", 1),
    (r"x^{3/2}", r"x^2\sqrt{x}", 0),
    ("x", r"\sqrt{x^2}", 0),
    ("|x|", "x", 0),
    (r"\sqrt{x}", r"-\sqrt{x}", 0),
    (r"\lfloor x \rfloor", "x", 0),
    ("(-1)^n", "1", 0),
    ("0", r"\sin(\pi n)", 0),
    ("0.333x", r"\frac{x}{3}", 0),
    ("f(x)", "g(x)", 0),
]
#: Powers without braces, congruences, and matrices as Python writes them.
SPELLINGS = [
    ("x^{-2}", "x^-2", 1),
    ("2e^{-x}", "2e^-x", 1),
    ("2e^{-x}", "2e^x", 0),
    ("e^{-2x}", "e^-2*x", 0),
    (r"\frac{1}{4}", "2^-2", 1),
    (r"3\cdot10^{-3}", "3 x 10^-3", 1),
    (r"3\cdot10^{-3}", "3 x 10^3", 0),
    (r"\sin^{-2}x", "sin(x)^-2", 1),
    (r"3\pmod{5}", "3 (mod 5)", 1),
    (r"3\pmod{5}", r"x\equiv 3\pmod 5", 1),
    (r"x\equiv 3\pmod{5}", "x ≡ 3 (mod 5)", 1),
    (r"x\equiv 3\pmod{5}", r"3\ (\text{mod }5)", 1),
    (r"x\equiv 3\pmod{5}", r"x\equiv 3\ (\bmod\ 5)", 1),
    (r"x\equiv 3\pmod{5}", r"x\equiv 3 \mod 5", 1),
    (r"x\equiv 3\pmod{5}", r"x\equiv 3\pmod{7}", 0),
    (r"x\equiv 3\pmod{5}", r"x\equiv 2\pmod{5}", 0),
    (r"n\equiv 1,3\pmod 4", "1, 3 (mod 4)", 1),
    ("3", r"8 \bmod 5", 1),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", "[[1, 2], [3, 4]]", 1),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", "[[1, 3], [2, 4]]", 0),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", "Matrix([[1, 2], [3, 4]])", 1),
    (r"\begin{pmatrix}\pi/2\\x\end{pmatrix}", "[[pi/2], [x]]", 1),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", "[[1, 2]]", 0),
    ("[1,2]", "[[1],[2]]", 0),
    ("[[1,2],[3]]", "[[1, 2], [3]]", 1),
    ("(x-1)^2+y^{10}=9", "(x - 1)**2 + y**10 = 9", 1),
    ("(x-1)^2+y^{10}=9", "(x - 1)**10 + y**2 = 9", 0),
    ("y=2^{n+1}", "y = 2**(n + 1)", 1),
    (r"\lfloor n/2\rfloor", "floor(n/2)", 1),
    (r"\lfloor n/2\rfloor", "ceil(n/2)", 0),
    ("O(n^2)", r"\mathcal{O}(n^2)", 1),
    ("O(n^2)", r"\mathcal{O}(n)", 0),
    ("（1，2）", "(1,2)", 1),
    ("(1,2)", "（2，1）", 0),
    ("1:2:3", "1 : 2 : 3", 1),
    ("1:2:3", "2:4:6", 1),
    ("1:2:3", "1:3:2", 0),
    (r"\sqrt{2}:1:x", r"2:\sqrt{2}:\sqrt{2}x", 1),
    (r"A\cap B", "A ∩ B", 1),
    (r"A\cap B", "A ∪ B", 0),
    (r"p\to q", "p → q", 1),
    (r"p\land q", "p ∧ q", 1),
    (r"p\land q", "p ∨ q", 0),
    (r"\lfloor x\rfloor", "⌊x⌋", 1),
    (r"\lfloor x\rfloor", "⌈x⌉", 0),
    (r"90^\circ", "90º", 1),
    (r"2\phi", r"2\varphi", 1),
    ("12", "Twelve", 1),
    (r"\text{twelve}", "12", 1),
    (r"\text{twelve}", "Twelve", 1),
    ("12", r"\text{eleven}", 0),
    ("10", "tent", 0),
    ("2500000", "2.5 million", 1),
    (r"2.5 \text{ million}", "2.5 million dollars", 1),
    ("2.5", "2.5 million", 0),
    (r"2.5 \text{ million}", "2.5 billion", 0),
]
#: Names of functions and letters without a backslash, and fractions without braces.
NAMES = [
    (r"2\pi", "2pi", 1),
    (r"2\pi", "2ip", 0),
    ("6.28", "2pi", 0),
    (r"2\pi", "-2pi", 0),
    (r"\pi r^2 h", "pi r^2 h", 1),
    (r"4\pi", "4pi cm", 1),
    (r"4\pi\text{ cm}^2", "4pi cm", 0),
    (r"36\pi", "36pi square units", 1),
    (r"\left(2,\frac{\pi}{3}\right)", "(2, pi/3)", 1),
    (r"[0,2\pi)", "[0, 2pi)", 1),
    (r"[0,2\pi)", "[0, 2pi]", 0),
    (r"(-\infty,2\pi)", "(-inf, 2pi)", 1),
    (r"n\pi", "npi", 1),
    (r"x=\pi \text{ or } x=2\pi", "x = pi or x = 2pi", 1),
    (r"\{\pi,2\pi\}", "pi and 2pi", 1),
    (r"e^{i\pi/3}", "exp(i*pi/3)", 1),
    (r"e^{i\pi/3}", "e^(-i*pi/3)", 0),
    (r"\frac{\lambda}{2}", "lambda/2", 1),
    (r"\cos^2\theta", "cos(theta)^2", 1),
    (r"\cos^2\theta", "cos(theta^2)", 0),
    (r"\sin x", "sin x", 1),
    (r"\cos 2x", "cos(2x)", 1),
    (r"\cos 2x", "cos(2)x", 0),
    (r"2\sin x\cos x", "2sinxcosx", 1),
    (r"x\ln x-x", "xln(x)-x", 1),
    (r"x\ln x-x", "xln(x)+x", 0),
    (r"\ln|x|+C", "ln|x| + C", 1),
    (r"e^x\sin x", "e^x cos x", 0),
    (r"\max(1,x)", "max(1,x)", 1),
    (r"\max(1,x)", "min(1,x)", 0),
    (r"\arcsin x", "arcsin(x)", 1),
    (r"\arcsin x", "asin(x)", 1),
    (r"\arcsin x", "arccos(x)", 0),
    (r"\arcsin(2x)", r"\operatorname{arcsin} 2x", 1),
    (r"\sec x", "sec(x)", 1),
    (r"\sec^2 x", "sec^2(x)", 1),
    (r"\sec x", "csc(x)", 0),
    (r"\log_2 x", "log2(x)", 1),
    (r"\log_2 x+1", "log_2(x) + 1", 1),
    (r"\log_{10} 2x", "log10(2x)", 1),
    (r"\log_2 x", "log10(x)", 0),
    (r"\log 2x", "log(2x)", 1),
    (r"\ln 2x", "log(2x)", 1),
    (r"\ln 2x", "log(3x)", 0),
    (r"2\sqrt{3}", "2 sqrt 3", 1),
    (r"x\sqrt{2+\sqrt{3}}", "x sqrt(2 + sqrt(3))", 1),
    (r"2\sqrt[3]{3}", "2 sqrt(3)", 0),
    (r"\frac{\ln 2}{\ln 3}", r"\ln 2/\ln 3", 1),
    (r"\frac{\ln 2}{\ln 3}", "log 2/log 3", 1),
    (r"\frac{\sin^2 x}{\cos x}", r"\sin^2 x/\cos x", 1),
    (r"\frac{\ln 2}{\ln 3}", r"\ln 3/\ln 2", 0),
    (r"1+\frac{\pi}{3}", r"1+\frac\pi3", 1),
    (r"1+\frac{\pi}{3}", r"1+\frac3\pi", 0),
    (r"\text{tank}", "tank", 1),
    (r"\tan k", r"\text{tank}", 0),
    (r"\text{beta decay}", "Beta decay", 1),
    (r"\text{pin}", "pin", 1),
    ("5", "5 sec", 1),
    (r"9.8\text{ m/sec}^2", "9.8 m/sec", 0),
]
COMMANDS = [
    (r"\sqrt[3]{2}", r"\sqrt[3]2", 1),
    ("2", r"\sqrt[3]8", 1),
    (r"\sqrt[3]{2}", r"\sqrt[4]2", 0),
    ("0.(3)", "1/3", 1),
    (r"\frac{4}{33}", "0.(12)", 1),
    ("0.(3)", "0.3", 0),
    ("2.5(3)", "7.5", 1),
    (r"\ln 2", r"\log_e 2", 1),
    (r"\ln 2", r"\log_{e}(2)", 1),
    (r"\ln 2", r"\log_2 2", 0),
    (r"\left\langle 1,2 \right\rangle", "(1,2)", 1),
    (r"\langle 1,2 \rangle", r"\langle 2,1 \rangle", 0),
    (r"\begin{cases} x=1 \\ y=2 \end{cases}", "x=1, y=2", 1),
    (r"\begin{cases} x=1 \\ y=2 \end{cases}", "x=2, y=1", 0),
    (r"\begin{cases} 1 & x>0 \\ 0 & x \le 0 \end{cases}", "1", 0),
    (r"x = \frac{-1 \pm \sqrt{5}}{2}", r"\frac{-1+\sqrt5}{2}, \frac{-1-\sqrt5}{2}", 1),
    (r"\frac{-1 \pm \sqrt{5}}{2}", r"\frac{±\sqrt5-1}{2}", 1),
    (r"\frac{-1 \pm \sqrt{5}}{2}", r"\frac{-1+\sqrt5}{2}", 0),
    (r"\frac{-1+\sqrt5}{2}", r"\frac{-1 \pm \sqrt{5}}{2}", 0),
    (r"\sqrt{2 \pm \sqrt3} \mp 1", r"\sqrt{2+\sqrt3} - 1, \sqrt{2-\sqrt3} + 1", 1),
    (r"(-\infty, -8)\cup (-8, 8) \cup (8, \infty)", r"x \neq \pm 8", 1),
    (r"(-\infty, -8)\cup (-8, 8) \cup (8, \infty)", r"x \neq \pm 7", 0),
]
DIVISORS = [
    (r"\gcd(a,b)", "1", 0),
    ("1", r"\gcd(a,b)", 0),
    (r"\gcd(a,b)", r"\gcd(a,c)", 0),
    (r"\gcd(a,b)", r"\gcd(b, a)", 1),
    (r"\gcd(a,b)", "gcd(a,b)", 1),
    (r"\operatorname{lcm}(a,b)", "ab", 0),
    (r"\operatorname{lcm}(a,b,c)", "abc", 0),
    (r"\operatorname{lcm}(a,b)", r"\text{lcm}(b,a)", 1),
    (r"\operatorname{lcm}(a,b)", r"\frac{ab}{\gcd(a,b)}", 1),
    (r"m+n-\gcd(m,n)", "m + n - gcd(n, m)", 1),
    (r"m+n-\gcd(m,n)", "m+n-1", 0),
    (r"2^{\gcd(m,n)}-1", "1", 0),
    ("5", "gcd(10,15)", 1),
    ("30", "lcm(10,15)", 1),
]
CASE = [
    (r"\pi(R^2-r^2)", "0", 0),
    (r"\pi(R^2-r^2)", "pi*(R^2-r^2)", 1),
    (r"\frac{Mm}{M+m}", r"\frac{m}{2}", 0),
    (r"\frac{Mm}{M+m}", r"\frac{mM}{m+M}", 1),
    ("R^2", "r^2", 0),
    ("R", "r", 0),
    ("Mm", "mm", 0),
    (r"\Omega", r"\omega", 0),
    (r"\frac{x^2}{2}+C", "x^2/2 + c", 1),
    (r"\frac{x^2}{2}+C", "x^2/2", 0),
    ("cx+C", "Cx+c", 0),
    ("x = 2", "X = 2", 1),
    ("No", "no", 1),
    ("A", "a", 1),
    ("XI", "IX", 0),
    ("DNA", "AND", 0),
    ("AB", "BA", 1),
]
BINOMIALS = [
    (r"\binom{n}{2}", "C(n,2)", 1),
    (r"\frac{n(n-1)}{2}", "C(n, 2)", 1),
    (r"\binom{n}{2}", "C(n,3)", 0),
    (r"\binom{2n}{n}", "C(2n,n)", 1),
    (r"\binom{n}{2}", r"{n \choose 2}", 1),
    (r"\binom{n}{2}", "nC2", 1),
    (r"\binom{n}{2}-n", "nCr", 0),
    (r"\binom{n}{r}", "^nC_r", 1),
    (r"\binom{n}{r}", "{}_{n}C_{r}", 1),
    (r"\binom{n}{2}", "nC_2", 0),
    (r"\binom{n}{2}", "2^nC_2", 0),
    ("210", "math.comb(10,4)", 1),
    ("C(3,1)", "C(3,2)", 0),
    ("C(0,5)", "C(0,6)", 0),
    ("C(a,0)", "C(b,0)", 0),
    ("5C2", "5C3", 0),
]
HYPERBOLIC = [
    (r"\coth x", "coth(x)", 1),
    (r"\coth x", r"\frac{\cosh x}{\sinh x}", 1),
    (r"\coth x", r"\cot hx", 0),
    (r"\coth x", r"\tanh x", 0),
    (r"\coth^2 x-1", r"\operatorname{csch}^2 x", 1),
    (r"\coth^2 x-1", r"\operatorname{csch} x", 0),
    (r"\coth\left(\frac{x}{2}\right)", "1/tanh(x/2)", 1),
    (r"2\operatorname{sech}^{2}(2x)", r"\frac{2}{\cosh^2(2x)}", 1),
    (r"\operatorname{sech} 2x", r"\frac{x}{\cosh 2}", 0),
]
INFINITE = [
    (r"-\infty", "-oo", 1),
    (r"\infty", "-oo", 0),
    (r"\infty", "00", 0),
    (r"(-\infty, 3)", "(-oo, 3)", 1),
    (r"(-\infty,-1]\cup[1,\infty)", "(-inf,-1] U [1,inf)", 1),
    (r"(-\infty,-1]\cup[1,\infty)", "(-inf,-1) U [1,inf)", 0),
    ("(3, 4)", "U(3, 4)", 0),
    (r"\frac{1}{6}", "0.1666...", 1),
    (r"\frac{4}{33}", r"0.121212\ldots", 1),
    (r"\frac{1}{3}", "0.33...", 0),
    (r"\frac{1}{3}", "0.3334...", 0),
    (r"\sqrt{2}", "1.414...", 0),
]
LISTS = [
    ("(0,1)", r"\{0,1\}", 0),
    (r"\left(0,1\right)", r"\left\{0, 1\right\}", 0),
    (r"(0,1)\cup(2,3)", r"\{0,1\}\cup\{2,3\}", 0),
    (r"(\frac{1}{2},1)", r"\lbrace\frac{1}{2},1\rbrace", 0),
    (r"\{1,2\}", r"\{2,1\}", 1),
    ("(0,1)", r"x \in (0,1)", 1),
    ("x=1, y=2", "1, 2", 1),
    ("x=1, y=2", "2, 1", 0),
    ("x=1, y=2", "(2, 1)", 0),
    ("x=1, y=2", "y=2, x=1", 1),
    ("y=2, x=1", "1, 2", 1),
    ("x=1, x=2", "2, 1", 1),
    ("2, 2, 3", "2, 3, 2", 1),
    ("2, 2, 3", "3, 2", 0),
    ("1,000,000", "1 million", 1),
    (r"\textbf{(A)}\ 5", "A", 1),
    (r"\textbf{(A)}\ 5", "(B)", 0),
    (r"\text{(E) None of these}", "E", 1),
    (r"\angle ABC", r"\angle CBA", 1),
    (r"\angle ABC", r"\angle ACB", 0),
]
#: Verdicts with an explanation, and texts that the library takes for units or joins.
TEXTS = [
    ("Yes", r"\text{Yes, such an } n \text{ exists.}", 1),
    (r"\text{No.}", "No; the sum is odd", 1),
    ("No", "Yes, it can", 0),
    ("Yes", "Yes, no, both", 0),
    ("No", "no-one", 0),
    ("No", r"\text{No such } n \text{ exists}", 1),
    ("No", "No such proof, so yes", 0),
    (r"\text { Cubes. }", "cubes", 1),
    ("True", "Yes, true", 0),
    (r"\text{ All cubes. }", r"\text{all cubes}", 1),
    (r"n \text{ is even}", r"n \text{ is odd}", 0),
    (r"n \text{ is even}", r"n \text{ is even.}", 1),
    (r"2 \text{ if } n \text{ is odd}", r"2 \text{ if } n \text{ is even}", 0),
    (r"A \text{ wins}", r"A \text{ loses}", 0),
    (r"2x \text{ cm}", r"2x \text{ centimeters}", 1),
    (r"2x \text{ cm}", r"2x \text{ m}", 0),
    ("7", r"7 \text{ ways}", 1),
    ("4, -3", r"-3 \text{ and }4", 1),
    ("1234", r"12 \text{ and }34", 0),
    (r"\frac{3}{4}", "\x0crac{3}{4}", 1),
    (r"\binom{5}{2} \times \theta", "\x08inom{5}{2} \times \theta", 1),
    (r"\frac{3}{4}", "\x0crac{3}{5}", 0),
]
#: Both values of `\pm`, both sides of an identity, names of arguments, points, and numbers close to others.
FORMS = [
    ("(0,2), (0,-2)", r"(0, \pm 2)", 1),
    ("(0,-2,2)", r"(0, \pm 2)", 0),
    (r"3, \frac{1+\sqrt{5}}{2}, \frac{1-\sqrt{5}}{2}", r"\{3, \frac{1 \pm \sqrt{5}}{2}\}", 1),
    (r"3, \frac{1+\sqrt{5}}{2}", r"\{3, \frac{1 \pm \sqrt{5}}{2}\}", 0),
    (r"\binom{6}{2} = 15", "15", 1),
    (r"\binom{n}{2} = \frac{n(n-1)}{2}", "n(n-1)/2", 1),
    (r"\binom{n}{2} = \frac{n(n-1)}{2}", "n(n+1)/2", 0),
    ("x^2 + y^2 = 4", "4", 0),
    ("f(x) = 2x + c", "f(t) = 2t + c", 1),
    ("f(x) = 2x", "f(t) = 2x", 0),
    ("f(x) = 2x", "g(t) = 2t", 0),
    ("f(x) = 2x", r"f(x) = 2x \text{ for all real } x", 1),
    (r"f(n) = 2n, \quad \forall n \in \mathbb{N}", "f(x)=2x for every x", 1),
    ("f(x) = 2x", r"f(x) = 3x \text{ for all } x", 0),
    ("f(x) = cx", r"f(x) = cx \text{ for all } c", 0),
    ("[2,2]", "2", 0),
    ("[2,2]", "[2, 2]", 1),
    ("(2,3)(5,7)", "(5,7), (2,3)", 1),
    ("(2,3)(5,7)", "(2,5), (3,7)", 0),
    ("3:4", r"3\:  : \:4", 1),
    ("20", r"2\binom{5}{2}", 1),
    ("12", r"2\binom{5}{2}", 0),
    (r"\binom{4}{2}^2", r"\binom{4}{2}\binom{4}{2}", 1),
    ("6", "2(3)", 1),
    ("5", "2(3)", 0),
    ("2.5", r"2\frac{1}{2}", 1),
    ("-2.5", r"-2\frac{1}{2}", 1),
    (r"\frac{2^{400}}{2^{400}+1}", r"\frac{2^{400}}{2^{400}+2}", 0),
    (r"\frac{2^{400}}{2^{400}+1}", r"1 - \frac{1}{2^{400}+1}", 1),
]
OPERATORS = [
    ("(1+r)^T", "1+r", 0),
    ("(1+r)^T", "(r+1)^{T}", 1),
    (r"A^\top", "A", 0),
    (r"\begin{pmatrix} 1 & 2 \end{pmatrix}^T", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", 1),
    ("f^{-1}(x)", r"\frac{1}{f(x)}", 0),
    (r"f^{-1}(x)=\frac{x-1}{2}", "(x-1)/2", 1),
    ("f(2)=5", "5", 1),
    ("f(2)=5", "6", 0),
    (r"-\sqrt[3]{2}", r"\sqrt[3]{-2}", 1),
    (r"\sqrt[3]{2}", r"\sqrt[3]{-2}", 0),
    (r"1-\frac{1}{\mathrm{e}}", "1 - 1/e", 1),
    (r"1-\frac{1}{\mathrm{e}}", "1 + 1/e", 0),
    (r"P(A\mid B)", "P(A|B)", 1),
    ("3.14", r"\approx 3.14", 1),
    ("3.14", r"\approx 3.15", 0),
]
#: Notations with two meanings, of which one is chosen.
AMBIGUOUS = [
    (r"\log 2", r"\ln 2", 0),
    (r"\ln 2", r"\log 2", 0),
    (r"\log x", r"\log(x)", 1),
    (r"\frac{1}{2\pi}", "1/2pi", 1),
    (r"\frac{\pi}{2}", "1/2pi", 0),
    (r"\frac{\pi}{2}", "1/2*pi", 1),
    (r"\overline{AB}", "AB", 0),
    (r"\overline{AB}", r"\overline{AB}", 1),
    (r"0.\overline{12}", r"\overline{12}", 0),
]


@pytest.fixture(scope="module")
def library_verdict() -> Iterator[Callable[[str, str], bool]]:
    """Return the grader without its sandbox, so that one process imports the library for all cases."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grader, "sympy_numeric_eq", grader.sympy_numeric_eq)
        patch.setattr(grader, "sympy_solve_and_compare", grader.sympy_solve_and_compare)
        patch.setattr(parser, "latex2sympy", parser.latex2sympy)
        converter = latex2sympy2._Latex2Sympy
        patch.setattr(converter, "handle_gcd_lcm", converter.handle_gcd_lcm)
        for name in ("units_regex", "unit_superscript_regex"):
            patch.setattr(math_normalization, name, getattr(math_normalization, name))
        verifier.refine()

        def verdict(right: str, answer: str) -> bool:
            if (plain := quick(bare(answer), bare(right))) is not None:
                return plain
            texts = [canonical(text) for text in (with_log_of(bare(answer), bare(right)), bare(answer))]
            return verifier.is_equal(*(verifier.read(text, plain=is_plain(text)) for text in texts))

        yield verdict


@pytest.mark.parametrize(
    ("right", "answer", "reward"),
    [
        *SMALL,
        *WHOLE,
        *MIXED,
        *PLAIN,
        *UNITS,
        *IGNORED,
        *COMPLEX,
        *INEQUALITIES,
        *SIGNS,
        *REAL,
        *COMMANDS,
        *SPELLINGS,
        *NAMES,
        *DIVISORS,
        *CASE,
        *BINOMIALS,
        *HYPERBOLIC,
        *INFINITE,
        *LISTS,
        *TEXTS,
        *FORMS,
        *OPERATORS,
        *AMBIGUOUS,
    ],
)
def test_answers_that_the_library_judges(
    library_verdict: Callable[[str, str], bool], right: str, answer: str, reward: int
) -> None:
    assert library_verdict(right, answer) is bool(reward)


@pytest.mark.anyio
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("right", "answer", "reward"), [SMALL[0], SMALL[2], WHOLE[0], MIXED[0], MIXED[1], PLAIN[2]]
)
async def test_the_sandboxed_judge_gives_the_same_verdicts(
    node: Node, right: str, answer: str, reward: int
) -> None:
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
        ("Answer: **42**", 1),
        ("**Answer:**\n42", 1),
        ("The answer is **42**.", 1),
        ("\\boxed{12}\nAnswer: 42", 1),
        ("\\boxed{42}\n**Answer: 12**", 0),
        ("Answer: $4$ $2$", 0),
    ],
)
async def test_answers_of_a_last_message(node: Node, words: str, reward: int) -> None:
    grade = await play(node, "42", words=words)
    assert grade.reward == reward, grade.evidence


@pytest.mark.anyio
async def test_an_alternative_that_is_ruled_out_is_not_compared_again(node: Node) -> None:
    async with MathEnvironment(node) as env:
        row = {"id": "t", "instruction": "Find it.", "answer": "x + 5", "alternatives": ["5 m"]}
        await env.init(MathEnvironment.load(row))
        await env.call(ToolCall(id="f", name="finish", arguments={"answer": "5 cm"}))
        assert (await env.eval()).reward == 0


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


@pytest.mark.parametrize("start", ["", "0", r"\langle", r"\text{", r"\coth ^ "])
@pytest.mark.parametrize("part", ["0", ",", "],", " ", r"\,", "a_", "1/"])
def test_hostile_answers_are_compared_quickly(start: str, part: str) -> None:
    hostile = start + part * ((2_000 - len(start)) // len(part))
    assert not any(quick(hostile, "42") for _ in range(20))
