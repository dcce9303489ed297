"""Rows of programming problems in our format and those of public data sets are read, or refused by field."""

import base64
import json
import math
import pickle
import zlib
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prorl_envs.env.audit.audit import validate
from prorl_envs.env.node import Node
from prorl_envs.envs.code.compare import same_output, same_result
from prorl_envs.envs.code.env import CodeEnvironment
from prorl_envs.envs.code.task import FunctionCase, FunctionTests, StdioTests
from prorl_envs.errors import InputError

TESTS: dict[str, Any] = {"type": "stdio", "cases": [{"input": "1", "output": "1"}]}
GOOD: dict[str, Any] = {"id": "a", "instruction": "Do it.", "tests": TESTS}
CALL: dict[str, Any] = {"type": "function", "entry_point": "f", "cases": [{"args": [1], "expected": 1}]}


def packed(value: object) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


CASES = [{"input": "2\n", "output": "4\n", "testtype": "stdin"}]
CALLS = [{"input": '"ab"\n2', "output": '"abab"', "testtype": "functional"}]
REPEAT = "class Solution:\n    def repeat(self, text, n):\n        return text * n\n"

PUBLIC: dict[str, dict[str, Any]] = {
    "apps": {
        "problem_id": 7,
        "question": "Double it.",
        "solutions": json.dumps(["print(int(input()) * 2)"]),
        "input_output": json.dumps({"inputs": ["2\n", "5\n"], "outputs": ["4\n", "10\n"]}),
        "difficulty": "easy",
    },
    "apps-function": {
        "problem_id": "8",
        "question": "Repeat it.",
        "solutions": json.dumps([REPEAT]),
        "starter_code": "class Solution:\n    pass\n",
        "input_output": json.dumps(
            {"fn_name": "repeat", "inputs": [["ab", 2], ["x", 0]], "outputs": [["abab"], ""]}
        ),
    },
    "taco": {
        "question": "Join them.",
        "solutions": ["print(' '.join(input() for _ in range(2)))"],
        "time_limit": "2.0 seconds",
        "memory_limit": "256.0 megabytes",
        "input_output": {"inputs": [["a", "b"]], "outputs": [["a b"]]},
    },
    "livecodebench": {
        "question_id": "q1",
        "question_content": "Double it.",
        "public_test_cases": json.dumps(CASES),
        "metadata": "{}",
        "private_test_cases": packed(json.dumps(CASES)),
        "reference_solution": "print(int(input()) * 2)",
    },
    "livecodebench-function": {
        "question_id": "q2",
        "question_content": "Repeat it.",
        "public_test_cases": json.dumps(CALLS),
        "private_test_cases": "[]",
        "metadata": json.dumps({"func_name": "repeat"}),
        "reference_solution": REPEAT,
        "starter_code": "",
    },
    "humaneval": {
        "task_id": "Own/0",
        "entry_point": "shift_back",
        "canonical_solution": "    return ''.join(chr(ord(c) - 1) for c in text)\n",
        "prompt": 'def shift(text: str) -> str:\n    return "".join(chr(ord(c) + 1) for c in text)\n\n\n'
        'def shift_back(text: str) -> str:\n    """The inverse of shift."""\n',
        "test": "METADATA = {}\n\n\ndef check(candidate):\n    for text in ('abc', '', 'x y'):\n"
        "        assert candidate(shift(text)) == text\n",
    },
    "mbpp": {
        "task_id": 11,
        "text": "Write a function to double the numbers of a list.",
        "code": "def doubled(xs):\n    return [x * 2 for x in xs]",
        "test_list": ["assert doubled([1, 2]) == [2, 4]", "assert math.isclose(sum(doubled([0.1])), 0.2)"],
        "test_setup_code": "import math",
        "challenge_test_list": [],
    },
    "eurus": {
        "data_source": "taco",
        "prompt": json.dumps([{"role": "user", "content": "Double it."}]),
        "reward_model": json.dumps(
            {"style": "rule", "ground_truth": json.dumps({"inputs": ["2\n"], "outputs": ["4\n"]})}
        ),
        "extra_info": {"index": 3},
        "solutions": json.dumps(["print(int(input()) * 2)"]),
    },
    "deepcoder": {
        "prompt": [{"role": "user", "content": "Double it."}],
        "reward_model": {"ground_truth": [{"type": "stdin_stdout", "input": "2\n", "output": "4\n"}]},
        "reference_solution": "print(int(input()) * 2)",
    },
    "deepcoder-function": {
        "prompt": [{"role": "user", "content": "Repeat it."}],
        "reward_model": {
            "ground_truth": [
                {"fn_name": "repeat", "input": ["ab", 2], "output": ["abab"], "type": "function_call"}
            ]
        },
        "solutions": [REPEAT],
    },
    "deepcoder-livecodebench": {
        "prompt": [{"role": "user", "content": "Repeat it."}],
        "reward_model": {"ground_truth": [{**CALLS[0], "metadata": {"func_name": "repeat"}}]},
        "reference_solution": REPEAT,
    },
}


@pytest.mark.anyio
@pytest.mark.timeout(300)
async def test_public_formats_are_read_and_discriminate(node: Node) -> None:
    tasks = [CodeEnvironment.load(row) for row in PUBLIC.values()]
    verdicts = await validate(CodeEnvironment, node, tasks, concurrency=2)
    problems = {name: verdict.findings for name, verdict in zip(PUBLIC, verdicts, strict=True)}
    assert {name: found for name, found in problems.items() if found} == {}
    assert [task.id for task in (*tasks[:2], tasks[-4])] == ["7", "8", "3"]
    assert (tasks[2].limits.time_s, tasks[2].limits.memory_mb) == (2.0, 512)


@pytest.mark.parametrize(
    ("row", "field"),
    [
        ({**GOOD, "id": ""}, "id"),
        ({**GOOD, "tests": {"type": "magic"}}, "tests"),
        ({**GOOD, "tests": {**TESTS, "cases": []}}, "tests.stdio.cases"),
        ({**GOOD, "tests": {**TESTS, "compare": "close"}}, "tests.stdio.compare"),
        ({**GOOD, "tests": {**TESTS, "checker": "def check(:"}}, "tests.stdio"),
        ({**GOOD, "tests": {**TESTS, "checker": "def judge(): pass"}}, "tests.stdio"),
        ({**GOOD, "tests": {**CALL, "entry_point": "f()"}}, "tests.function.entry_point"),
        ({**GOOD, "tests": {**CALL, "cases": [{"args": [1]}]}}, "tests.function.cases.0.expected"),
        (
            {**GOOD, "tests": {"type": "script", "functions": [], "cases": [{"code": "1"}]}},
            "tests.script.functions",
        ),
        (
            {**GOOD, "tests": {"type": "script", "functions": ["f"], "cases": [{"code": "("}]}},
            "tests.script.cases.0",
        ),
        ({**GOOD, "limits": {"time_s": 0}}, "limits.time_s"),
        ({**GOOD, "scoring": "most"}, "scoring"),
        ({**GOOD, "solution": "x"}, "solution"),
        ({"id": "a", "instruction": "Do it."}, "tests"),
        ({**PUBLIC["apps"], "input_output": "{"}, "input_output"),
        ({**PUBLIC["apps"], "input_output": "[]"}, "input_output"),
        ({**PUBLIC["apps"], "input_output": {"inputs": ["1"], "outputs": []}}, "input_output"),
        ({**PUBLIC["apps"], "input_output": {"inputs": [], "outputs": []}}, "input_output"),
        ({**PUBLIC["apps"], "question": " "}, "question"),
        (
            {**PUBLIC["apps-function"], "input_output": {"fn_name": "f", "inputs": ["1"], "outputs": [1]}},
            "input_output.inputs.0",
        ),
        ({**PUBLIC["livecodebench"], "private_test_cases": "???"}, "private_test_cases"),
        ({**PUBLIC["livecodebench"], "private_test_cases": packed([1])}, "private_test_cases"),
        (
            {**PUBLIC["livecodebench"], "private_test_cases": packed(json.dumps([{"input": "x"}]))},
            "private_test_cases.0",
        ),
        ({**PUBLIC["humaneval"], "test": None}, "test"),
        ({**PUBLIC["eurus"], "reward_model": "{}"}, "reward_model.ground_truth"),
        ({**PUBLIC["eurus"], "prompt": []}, "prompt"),
        ({**PUBLIC["deepcoder"], "reward_model": {"ground_truth": []}}, "public_test_cases"),
        ({**PUBLIC["deepcoder"], "reward_model": {"ground_truth": ["4"]}}, "reward_model.ground_truth"),
        ({**PUBLIC["mbpp"], "test_list": ["assert ("]}, "test_list"),
        ({**PUBLIC["mbpp"], "test_list": ["assert 1"]}, "test_list"),
        ({**PUBLIC["mbpp"], "test_list": "assert f()"}, "test_list"),
    ],
)
def test_a_wrong_row_names_its_field(row: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError) as caught:
        CodeEnvironment.load(row)
    assert caught.value.message.startswith(field)


class Planted:
    """Pickle that executes code when loaded."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return exec, ("raise SystemExit('ran')",)


def test_a_packed_field_executes_nothing() -> None:
    with pytest.raises(InputError, match=r"private_test_cases.*exec"):
        CodeEnvironment.load({**PUBLIC["livecodebench"], "private_test_cases": packed(Planted())})


@pytest.mark.parametrize(
    ("compare", "output", "expected", "same"),
    [
        ("exact", "1\n", "1\n", True),
        ("exact", "1", "1\n", False),
        ("lines", "1 \n2\n\n", "1\n2", True),
        ("lines", "1 2", "1\n2", False),
        ("tokens", "1   2", "1\n2\n", True),
        ("lines", "a\r\nb\rc\n", "a\nb\nc", True),
        ("lines", "a\u2028b", "a\nb", False),
        ("lines", "a\x0cb", "a\nb", False),
        ("lines", "a\n\nb", "a\nb", False),
        ("tokens", "1.0 2", "1 2", False),
        ("floats", "1.0000001 x", "1 x", True),
        ("floats", "1.1 x", "1 x", False),
        ("floats", "1 2", "1", False),
        ("floats", "nan inf", "nan inf", True),
        ("floats", "inf", "1", False),
        ("floats", "+Infinity .5 1.e1", "inf 0.5 10", True),
        ("floats", "1_0", "10", False),
        ("floats", "١٠", "10", False),
        ("floats", "9" * 5000, "1", False),
        ("floats", "9" * 399, "1.5", False),
        # the relative tolerance is none of integers
        ("floats", "1000000006 x", "1000000007 x", False),
        ("floats", "1000000006.5", "1000000007", True),
        ("floats", "50000000000000000", "50000000000000001", False),
        ("floats", "1000000006", "1000000007.0", True),
        ("numbers", "4.0 2.50\n-0", "4 2.5\n0", True),
        ("numbers", " 4\t2 \n\n", "4 2", True),
        ("numbers", "\n4\n", "4", True),
        ("numbers", "0.333333", "0.333333333333", True),
        ("numbers", "0.33333", "0.333333333333", False),
        ("numbers", "1e3", "1000", True),
        ("numbers", "2.9999999", "3", False),
        ("numbers", "2.9999999", "3.0", True),
        ("numbers", "1000000.01", "1000000.02", False),
        ("numbers", "1000000006", "1000000007", False),
        ("numbers", "50000000000000000", "50000000000000001", False),
        ("numbers", "1_0", "10", False),
        ("numbers", "nan inf", "nan inf", True),
        ("numbers", "4 2", "4\n2", False),
        ("numbers", "42", "4 2", False),
        ("numbers", "4 x", "4.0 x", False),
        ("numbers", "Yes", "yes", False),
        ("numbers", "*  *", "* *", False),
        ("numbers", "  *\n * *", "*\n * *", False),
        ("numbers", "1" * 5000, "1" * 5000, True),
        ("numbers", "1e" + "9" * 300, "2", False),
        ("numbers", "1e999999999", "1.5", False),
    ],
)
def test_outputs_are_compared_as_configured(compare: str, output: str, expected: str, same: bool) -> None:
    tolerances = {"rel_tol": 1e-9} if compare == "numbers" else {}
    tests = StdioTests.model_validate({**TESTS, "compare": compare, **tolerances})
    assert same_output(output, expected, tests) is same


def test_an_absolute_tolerance_counts_for_integers_too() -> None:
    tests = StdioTests.model_validate({**TESTS, "compare": "floats", "rel_tol": 0, "abs_tol": 1})
    assert same_output("6", "7", tests) and not same_output("5", "7", tests)
    calls = FunctionTests.model_validate({**CALL, "compare": "floats", "abs_tol": 1})
    assert same_result([6], FunctionCase(expected=[7]), calls)
    assert not same_result([5], FunctionCase(expected=[7]), calls)


@pytest.mark.parametrize("name", ["apps", "taco", "livecodebench", "eurus", "deepcoder"])
def test_programs_of_public_rows_may_write_numbers_otherwise(name: str) -> None:
    tests = CodeEnvironment.load(PUBLIC[name]).tests
    assert isinstance(tests, StdioTests)
    assert same_output("4.00\n", "4\n", tests) and same_output("0.333333", "0.3333333333", tests)
    assert not same_output("4.01\n", "4\n", tests) and not same_output("1000000.01", "1000000.02", tests)


@pytest.mark.parametrize("name", ["apps-function", "livecodebench-function", "deepcoder-function"])
def test_functions_of_public_rows_may_have_rounding_errors(name: str) -> None:
    tests = CodeEnvironment.load(PUBLIC[name]).tests
    assert isinstance(tests, FunctionTests)
    assert same_result([0.1 + 0.2, 1], FunctionCase(expected=[0.3, 1]), tests)
    for value, expected in (([0.31], [0.3]), (1_000_000_006, 1_000_000_007), ("0.30000001", "0.3")):
        assert not same_result(value, FunctionCase(expected=expected), tests)


@pytest.mark.parametrize(
    ("compare", "value", "expected", "same"),
    [
        ("equal", (1, 2), [1, 2], True),
        ("equal", [1, 2], [2, 1], False),
        ("equal", {1: "a"}, {"1": "a"}, True),
        ("equal", "1", 1, False),
        ("equal", [[1, (2,)]], [[1, [2]]], True),
        ("floats", [1.0000001, {"a": 2}], [1, {"a": 2.0}], True),
        ("floats", [1.1], [1], False),
        ("floats", True, 1, True),
        ("unordered", [3, 1, 1], [1, 3, 1], True),
        ("unordered", [3, 1], [1, 3, 1], False),
        ("unordered", {1, 3}, [3, 1], True),
        ("unordered", {1, 2}, ["1", "2"], False),
        ("unordered", [2.0, 1.0], [1, 2], True),
        ("unordered", [{"b": 2, "a": 1}], [{"a": 1, "b": 2}], True),
        ("unordered", [0.0], [-0.0], True),
        ("unordered", [True, 0], [0, 1], True),
        ("unordered", [1 + 0j, [2j]], [[2j], 1], True),
        ("unordered", [(2, 1.0)], [[2, 1]], True),
        ("unordered", [(1, 2)], [[2, 1]], False),
        ("unordered", [2**53 + 1], [float(2**53)], False),
        ("unordered", [10**5000, 1], [1, 10**5000], True),
        ("unordered", [float("nan"), 1], [1.0, float("nan")], True),
        ("unordered", ["1", 2], [1, "2"], False),
        ("unordered", [b"a", "b'b'"], ["b'a'", b"b"], False),
        ("unordered", ["a,b"], ["a", "b"], False),
        ("unordered", "ab", ["a", "b"], False),
        ("unordered", {"b": 2, "a": 1.0}, {"a": 1, "b": 2}, True),
        # a set equals only a set, but is a list in any order
        ("equal", {1, 2}, ["1", "2"], False),
        ("equal", {1, 2}, [1, 2], False),
        ("equal", [{1, 2}], [["1", "2"]], False),
        ("equal", {1.0, 2}, frozenset([2, 1]), True),
        ("equal", {"a", 1}, {"a", "1"}, False),
        ("equal", set(), [], False),
        ("unordered", [{1, 2}], [[1, 2]], False),
        ("unordered", [{1.0, 2}, {3}], [{3}, {2, 1}], True),
        ("floats", {1, 2}, ["1", "2"], False),
        # keys are compared in their JSON form, and none is lost
        ("equal", {1: "x", "1": "a"}, {"1": "a"}, False),
        ("floats", {1: 2, "1": 1}, {"1": 1}, False),
        ("equal", {True: 1, None: 2, 1.5: 3}, {"true": 1, "null": 2, "1.5": 3}, True),
        ("floats", {True: 1.0}, {"true": 1}, True),
        ("equal", {(1, 2): 3}, {"(1, 2)": 3}, True),
        ("equal", {10**5000: 1, (10**5000,): 2}, {"1": 1}, False),
        ("floats", {10**5000: 1}, {"1": 1}, False),
        ("equal", {"a": 1}, [["a", 1]], False),
        # equal values are equal within any tolerance
        ("floats", [10**400], [10**400], True),
        ("floats", [10**400 + 1], [10**400], False),
        ("floats", [10**9 + 6], [10**9 + 7], False),
        ("floats", [10**9 + 6.5], [10**9 + 7], True),
        ("equal", [float("nan")], [float("nan")], True),
        ("equal", [float("inf")], [float("-inf")], False),
        ("equal", None, 0, False),
    ],
)
def test_results_are_compared_as_configured(compare: str, value: Any, expected: Any, same: bool) -> None:
    tests = FunctionTests.model_validate({**CALL, "compare": compare})
    assert same_result(value, FunctionCase(expected=expected), tests) is same


@pytest.mark.parametrize(
    ("args", "read"),
    [
        ([{"1": "a", "-2": {"3": 0}}], ({1: "a", -2: {"3": 0}},)),
        ([{"1": 0, "b": 1}], ({"1": 0, "b": 1},)),
        ([{"1": 0}, 2], ({"1": 0}, 2)),
        ([{}], ({},)),
        ([[{"1": 0}]], ([{"1": 0}],)),
    ],
)
def test_keys_that_were_integers_are_so_again(args: list[Any], read: tuple[Any, ...]) -> None:
    given = {"fn_name": "f", "inputs": [args], "outputs": [[0]]}
    tests = CodeEnvironment.load({**PUBLIC["apps-function"], "input_output": given}).tests
    assert isinstance(tests, FunctionTests)
    assert tests.cases[0].args == read


def test_arguments_of_a_call_end_at_line_feeds_only() -> None:
    odd = "a\u2028b\u2029c\x85d"
    case = {"input": f'"{odd}"\r\n2\n', "output": json.dumps(odd * 2, ensure_ascii=False)}
    row = {**PUBLIC["livecodebench-function"], "public_test_cases": "[]"}
    row["private_test_cases"] = packed(json.dumps([{**case, "testtype": "functional"}]))
    tests = CodeEnvironment.load(row).tests
    assert isinstance(tests, FunctionTests)
    assert [(case.args, case.expected) for case in tests.cases] == [((odd, 2), odd * 2)]


@pytest.mark.parametrize("odd", ["\u2028", "\x85", "\x0b", "\x0c", "\x1e"])
def test_lines_of_an_output_end_at_line_feeds_only(odd: str) -> None:
    tests = StdioTests.model_validate({**TESTS, "compare": "lines"})
    assert not same_output(f"1{odd}2\n", "1\n2\n", tests)
    assert same_output(f"1{odd}2 \r\n3\n\n", f"1{odd}2\n3", tests)


_NUMBERS = st.integers() | st.floats(allow_nan=False) | st.complex_numbers(allow_nan=False)
_SCALARS = st.none() | st.booleans() | _NUMBERS | st.text() | st.binary()
_HASHED = st.recursive(_SCALARS, lambda items: st.frozensets(items, max_size=3) | st.tuples(items, items))
_VALUES = st.recursive(
    _SCALARS | st.just(math.nan) | st.frozensets(_HASHED, max_size=3),
    lambda items: st.lists(items, max_size=4) | st.dictionaries(st.text(max_size=3), items, max_size=3),
    max_leaves=10,
)


def _rewritten(value: Any) -> Any:
    """Return an equal value: other types of numbers and of lists, and another order of keys."""
    if isinstance(value, list):
        return tuple(map(_rewritten, value))
    if isinstance(value, dict):
        return {key: _rewritten(value[key]) for key in reversed(value)}
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return complex(value) if isinstance(value, float) else value


@settings(deadline=None, derandomize=True)
@given(st.lists(_VALUES, max_size=6), st.randoms(use_true_random=False))
def test_equal_lists_are_equal_in_any_order(values: list[Any], random: Random) -> None:
    case = FunctionCase(expected=values)
    shuffled = list(map(_rewritten, values))
    assert same_result(shuffled, case, _tests("equal"))
    random.shuffle(shuffled)
    assert same_result(shuffled, case, _tests("unordered"))


@settings(deadline=None, derandomize=True)
@given(_SCALARS | _HASHED, _SCALARS | _HASHED)
def test_scalars_are_equal_as_in_python(left: Any, right: Any) -> None:
    assert same_result(left, FunctionCase(expected=right), _tests("equal")) is (left == right)


def _tests(compare: str) -> FunctionTests:
    return FunctionTests.model_validate({**CALL, "compare": compare})
