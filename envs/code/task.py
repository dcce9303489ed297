"""Row format of code data files; `rows.py` converts public data sets to it."""

import ast
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from prorl_envs.env.base import Task
from prorl_envs.env.columns import RowModel
from prorl_envs.env.scoring import Scoring

#: Maximum bytes of a solution that is graded.
MAX_SOLUTION_BYTES = 1_000_000
#: Path of the solution.
SOLUTION = "/workspace/solution.py"

type Tolerance = Annotated[float, Field(ge=0, allow_inf_nan=False)]
type Source = Annotated[str, Field(max_length=2_000_000)]
type Name = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,99}$")]


class TextRule(StrEnum):
    """Comparison of a program's output with the expected one."""

    EXACT = "exact"
    LINES = "lines"
    NUMBERS = "numbers"
    TOKENS = "tokens"
    FLOATS = "floats"


class ValueRule(StrEnum):
    """Comparison of a function's result with the expected one."""

    EQUAL = "equal"
    FLOATS = "floats"
    UNORDERED = "unordered"


class StdioCase(RowModel):
    """Input of the program, and its expected output."""

    input: str
    output: str = ""


class StdioTests(RowModel):
    """Tests of a program that reads stdin and prints to stdout.

    Args:
        cases: inputs and expected outputs.
        compare: `exact`: the same text; `lines`: the same lines, ignoring white space at the end of a line
            and of the text; `numbers`: like `lines`, but numbers in a line of numbers may be written
            differently (`4.0` for `4`), and decimals may differ by the tolerance; `tokens`: the same words
            between white space; `floats`: like `tokens`, but numbers may differ by the tolerance.
        rel_tol, abs_tol: tolerances of `numbers` and `floats`. Two integers have only the absolute tolerance.
        checker: Python code that defines `check(input, output, expected)`, which returns true if the output
            is right. It replaces `compare`, and runs in a sandbox in which the solution never ran.
    """

    type: Literal["stdio"]
    cases: tuple[StdioCase, ...] = Field(min_length=1, max_length=5_000)
    compare: TextRule = TextRule.LINES
    rel_tol: Tolerance = 1e-6
    abs_tol: Tolerance = 1e-6
    checker: Source = ""

    @model_validator(mode="after")
    def _checker_defines_check(self) -> "StdioTests":
        if self.checker and "check" not in _defined_functions(self.checker, "checker"):
            raise ValueError("checker: defines no function check(input, output, expected)")
        return self


class FunctionCase(RowModel):
    """One call, and its expected result; the results in `alternatives` are also right."""

    args: tuple[Any, ...] = ()
    kwargs: dict[Name, Any] = Field(default_factory=dict)
    expected: Any
    alternatives: tuple[Any, ...] = ()


class FunctionTests(RowModel):
    """Tests of a function, or of a method of the class `Solution`.

    Args:
        entry_point: name of the function or method.
        cases: calls with their results. A tuple equals a list with the same items, 1 equals 1.0, and NaN
            equals NaN. A set equals no list, except with `unordered`.
        compare: `equal`, `floats` (numbers within the tolerance), or `unordered` (the items of a list or set
            in any order; each item as with `equal`).
        rel_tol, abs_tol: tolerances of `floats`; of two integers, only the absolute one.
    """

    type: Literal["function"]
    entry_point: Name
    cases: tuple[FunctionCase, ...] = Field(min_length=1, max_length=5_000)
    compare: ValueRule = ValueRule.EQUAL
    rel_tol: Tolerance = 1e-6
    abs_tol: Tolerance = 1e-6


class ScriptCase(RowModel):
    """Test code, which passes if it raises nothing. If it defines `check`, `check(function)` is called."""

    code: Source = Field(min_length=1)

    @model_validator(mode="after")
    def _parses(self) -> "ScriptCase":
        _defined_functions(self.code, "code")
        return self


class ScriptTests(RowModel):
    """Tests by code that calls the solution's functions.

    The test code and the solution run in separate processes. Arguments and results are transferred as plain
    values (numbers, texts, lists, tuples, dicts, sets, bytes, None), so the tests see the results of a
    function, but not its changes to arguments.

    Args:
        functions: the solution's functions that the tests call. `check` is called with the first.
        prelude: code that runs before each case, such as imports and helpers.
        cases: the tests.
    """

    type: Literal["script"]
    functions: tuple[Name, ...] = Field(min_length=1, max_length=50)
    prelude: Source = ""
    cases: tuple[ScriptCase, ...] = Field(min_length=1, max_length=1_000)

    @model_validator(mode="after")
    def _parses(self) -> "ScriptTests":
        _defined_functions(self.prelude, "prelude")
        return self


type Tests = Annotated[StdioTests | FunctionTests | ScriptTests, Field(discriminator="type")]


class CaseLimits(RowModel):
    """Limits of the solution; all but `total_s` are per case.

    Args:
        time_s: seconds of processor time. Wall time has a much higher limit, for programs that wait.
        memory_mb: megabytes of address space of each process.
        total_s: seconds that all cases together may take.
    """

    time_s: float = Field(default=5.0, ge=0.1, le=600)
    memory_mb: int = Field(default=1024, ge=64, le=65_536)
    total_s: float = Field(default=300.0, ge=1, le=3_600)


class CodeTask(Task):
    """One programming problem.

    Args:
        starter: initial content of the solution file; if empty, there is no file.
        tests: the graded tests, which are never in the agent's sandbox.
        limits: limits of the solution.
        scoring: `all` (default): 1 if every case passes, else 0; `weighted`: the share that passed.
    """

    starter: Source = ""
    tests: Tests
    limits: CaseLimits = CaseLimits()
    scoring: Scoring = Scoring.ALL


def _defined_functions(source: str, field: str) -> set[str]:
    """Return the names of the functions that `source` defines at its top level.

    Raises:
        ValueError: `source` is not Python; the message names `field`.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{field}: not Python: {error}") from error
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
