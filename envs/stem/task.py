"""Row format of STEM data files; `rows.py` converts public data sets to it."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from prorl_envs.env.base import Task
from prorl_envs.env.columns import RowModel

type Text = Annotated[str, Field(min_length=1, max_length=4_000)]
#: The letters of choices.
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


class ChoiceAnswer(RowModel):
    """The letter of one of the choices."""

    type: Literal["choice"]
    value: Annotated[str, Field(pattern="^[A-Z]$")]


class NumberAnswer(RowModel):
    """A number, within either tolerance, optionally followed by one of the `units`."""

    type: Literal["number"]
    value: int | Annotated[float, Field(allow_inf_nan=False)]
    rel_tol: float = Field(default=1e-2, ge=0, le=1)
    abs_tol: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    units: tuple[Annotated[str, Field(min_length=1, max_length=100)], ...] = ()


class TextAnswer(RowModel):
    """One of these texts; letter case, articles and white space do not count."""

    type: Literal["text"]
    values: tuple[Text, ...] = Field(min_length=1, max_length=50)


type Answer = Annotated[ChoiceAnswer | NumberAnswer | TextAnswer, Field(discriminator="type")]


class StemTask(Task):
    """One question.

    Args:
        choices: texts of the choices, shown as A, B, ...; empty for a question with a short answer.
        answer: the right answer.
    """

    choices: tuple[Text, ...] = Field(default=(), max_length=len(LETTERS))
    answer: Answer

    @model_validator(mode="after")
    def _consistent(self) -> "StemTask":
        if isinstance(self.answer, ChoiceAnswer) and LETTERS.index(self.answer.value) >= len(self.choices):
            raise ValueError(f"answer.value: there is no choice {self.answer.value}")
        if self.choices and not isinstance(self.answer, ChoiceAnswer):
            raise ValueError("answer.type: must be `choice`, because the question has choices")
        return self

    @property
    def lettered(self) -> list[tuple[str, str]]:
        """The choices with their letters."""
        return list(zip(LETTERS, self.choices, strict=False))
