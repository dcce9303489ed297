"""Conversion of public data sets of mathematical problems to our rows.

    GSM8K               question, answer (a solution that ends in `#### 42`)
    MATH                problem, solution (with a boxed answer), perhaps answer
    AIME and the like   Problem, Answer, ID
    DAPO, verl, Eurus   prompt (chat messages), reward_model (ground_truth), extra_info (index); prompt and
                        reward_model perhaps as JSON texts
    Nemotron, OpenMath  problem, expected_answer

Formats are recognised by their fields; a row with `instruction` is in our own format.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

from prorl_envs.env.columns import decoded, user_text
from prorl_envs.env.words import last_boxed, with_backslashes
from prorl_envs.errors import InputError

_PROBLEM = ("problem", "question", "prompt")
_ANSWER = ("expected_answer", "final_answer", "answer", "ground_truth")
_ID = ("id", "unique_id", "problem_id", "index")
_GSM8K = "####"


def convert_row(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Convert `row` to our format; return a row of no known format unchanged.

    Raises:
        InputError: a field of a known format is wrong.
    """
    lower = {key.lower(): value for key, value in row.items()}
    if "instruction" in row or not any(field in lower for field in _PROBLEM):
        return row
    problem, answer = _problem(lower), _answer(lower)
    own_fields = {key: row[key] for key in ("alternatives", "reference") if key in row}
    finish = {"tool": "finish", "arguments": {"answer": answer}}
    return {
        "id": _id(lower, problem),
        "instruction": problem,
        "answer": answer,
        "reference": [finish],
        **own_fields,
    }


def _problem(row: Mapping[str, Any]) -> str:
    field = next(field for field in _PROBLEM if field in row)
    return user_text(row[field], field)


def _answer(row: Mapping[str, Any]) -> str:
    reward_model = decoded(row.get("reward_model"))
    if isinstance(reward_model, Mapping):
        return _bare(reward_model.get("ground_truth"), "reward_model.ground_truth")
    for field in _ANSWER:
        if row.get(field) is not None:
            return _bare(row[field], field)
    solution = row.get("solution")
    if isinstance(solution, str) and (boxed := last_boxed(solution)):
        return boxed
    raise InputError("answer: missing, and solution contains no boxed answer")


def _bare(value: Any, field: str) -> str:
    if isinstance(value, list | tuple) and len(value) == 1:
        value = value[0]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise InputError(f"{field}: neither a text nor a number")
    text = with_backslashes(str(value))
    if _GSM8K in text:
        text = text.rpartition(_GSM8K)[2]
    elif boxed := last_boxed(text):
        text = boxed
    if not text.strip():
        raise InputError(f"{field}: empty")
    return text.strip()


def _id(row: Mapping[str, Any], problem: str) -> str:
    """Return the row's id, or else a digest of the problem."""
    extra = row.get("extra_info")
    for source in (row, extra if isinstance(extra, Mapping) else {}):
        for field in _ID:
            if (value := source.get(field)) is not None and str(value):
                return str(value)[:200]
    return hashlib.sha256(problem.encode("utf-8", "replace")).hexdigest()[:16]
