"""Row format of Python data files."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from prorl_envs.env.base import Task
from prorl_envs.env.columns import WITHOUT_NULLS
from prorl_envs.env.scoring import CheckModel, Scoring, check_names
from prorl_envs.envs.ipython.answers import same_expression

type _FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}$")]
type _FileText = Annotated[str, Field(max_length=4_000_000)]
type Number = Annotated[float, Field(allow_inf_nan=False)]
#: Source of an answer: the finish call, a variable of the session, or a file of the workspace.
type Source = Annotated[
    str,
    Field(pattern=r"^(finish|variable:[A-Za-z_][A-Za-z0-9_]{0,99}|file:[A-Za-z0-9_][A-Za-z0-9_./-]{0,199})$"),
]


class AnswerCheck(CheckModel):
    """Common fields of all checks of an answer.

    Args:
        source: `finish` (the argument of the finish call), `variable:NAME`, or `file:PATH`.
    """

    source: Source = "finish"


class _Tolerance(AnswerCheck):
    """Tolerance of a comparison.

    Args:
        rel_tol, abs_tol: maximum difference from the right value: `abs_tol`, or `rel_tol` times the right
            value, whichever is larger. The default of `abs_tol` is 1e-9 for the right value 0, else 0.
    """

    rel_tol: float = Field(default=1e-6, ge=0, le=1)
    abs_tol: float | None = Field(default=None, ge=0, allow_inf_nan=False)


class NumberCheck(_Tolerance):
    """Check that the answer is this number."""

    type: Literal["number"]
    value: int | Number


class NumbersCheck(_Tolerance):
    """Check that the answer consists of these numbers, equally often; in this order if `ordered`."""

    type: Literal["numbers"]
    values: tuple[int | Number, ...] = Field(min_length=1, max_length=10_000)
    ordered: bool = False


class ExpressionCheck(AnswerCheck):
    """Check that the answer is this function of `variables`, in any form.

    Args:
        value: the right expression, in the notation of sympy's `str`.
        variables: names of the variables that an expression may use.
        domain: interval of the random values of each variable; both expressions must be defined on it.
    """

    type: Literal["expression"]
    value: str = Field(min_length=1, max_length=2_000)
    variables: tuple[Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_]{0,30}$")], ...] = ()
    domain: tuple[Number, Number] = (0.5, 2.0)

    @model_validator(mode="after")
    def _readable(self) -> "ExpressionCheck":
        # An expected expression that cannot be parsed raises ExpressionError, a ValueError.
        if not same_expression(self.value, self.value, variables=self.variables, domain=self.domain):
            raise ValueError("the expression is not equal to itself on its domain")
        return self


class TextCheck(AnswerCheck):
    """Check that the answer is this text; runs of white space count as one space."""

    type: Literal["text"]
    value: str = Field(min_length=1, max_length=20_000)
    ignore_case: bool = False


type Check = Annotated[NumberCheck | NumbersCheck | ExpressionCheck | TextCheck, Field(discriminator="type")]


class IPythonTask(Task):
    """One task for a Python session.

    Args:
        files: initial contents of the workspace: text by file name.
        setup: Python code that runs in the session before the episode. The names that it defines remain.
        checks: the graded checks.
        scoring: `all` (default): 1 if every check passes, else 0; `weighted`: share of passed weights.
    """

    files: Annotated[dict[_FileName, _FileText], WITHOUT_NULLS] = Field(default_factory=dict, max_length=100)
    setup: str = Field(default="", max_length=100_000)
    checks: tuple[Check, ...] = Field(min_length=1, max_length=50)
    scoring: Scoring = Scoring.ALL

    @model_validator(mode="after")
    def _consistent(self) -> "IPythonTask":
        self.named_checks()
        return self

    def named_checks(self) -> list[tuple[str, Check]]:
        """Return the checks with unique names."""
        names = check_names(self.checks, [check.type for check in self.checks])
        return list(zip(names, self.checks, strict=True))
