"""Row format of mathematics data files; `rows.py` converts public data sets to it."""

from typing import Annotated

from pydantic import Field

from prorl_envs.env.base import Task

type Answer = Annotated[str, Field(min_length=1, max_length=2_000)]


class MathTask(Task):
    r"""One problem.

    Args:
        answer: the right answer, in LaTeX or as plain text: `42`, `\frac{1}{2}`, `x**2 + 1`, `(1, 2]`.
        alternatives: other right answers.
    """

    answer: Answer
    alternatives: tuple[Answer, ...] = Field(default=(), max_length=20)
