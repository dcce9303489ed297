"""Conversion of public data sets of questions to our rows.

    MMLU       question, choices (a list), answer (a number from 0, or a letter)
    MMLU-Pro   question, options, answer (a letter) or answer_index
    ARC        question, choices (text, label), answerKey
    GPQA       Question, Correct Answer, Incorrect Answer 1, 2, 3 (shuffled with a seed from the question)
    otherwise  question or problem, answer: a number or a text

Formats are recognised by their fields; a row with `instruction` is in our own format.
"""

import hashlib
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

from prorl_envs.env.answers import parse_number
from prorl_envs.envs.stem.task import LETTERS
from prorl_envs.errors import InputError
from prorl_envs.tools.types import JsonObject

_CORRECT = "Correct Answer"
_INCORRECT = tuple(f"Incorrect Answer {number}" for number in (1, 2, 3))

#: Integers from which the default tolerance would accept the next one, and which no trailing zeros round.
_COUNT = re.compile(r"[-+−]?[\d,]*[1-9]", re.ASCII)
_LARGE = 100


def convert_row(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Convert `row` to our format; return a row of no known format unchanged.

    Raises:
        InputError: a field of a known format is wrong.
    """
    field = next((name for name in ("question", "problem", "Question") if name in row), "")
    if "instruction" in row or not field:
        return row
    question = row[field]
    if not isinstance(question, str) or not question.strip():
        raise InputError(f"{field}: not a text, or empty")
    digest = hashlib.sha256(question.encode("utf-8", "replace")).hexdigest()[:16]
    if _CORRECT in row:
        fields = _gpqa(row, digest)
    elif "choices" in row or "options" in row:
        fields = _choices(row)
    else:
        fields = _short(row)
    right = fields["answer"]
    answer = str(right["value"] if "value" in right else right["values"][0])
    reference = [{"tool": "finish", "arguments": {"answer": answer}}]
    name = next((row[key] for key in ("id", "question_id", "Record ID") if row.get(key) is not None), digest)
    return {"id": str(name)[:200], "instruction": question, "reference": reference, **fields}


def _gpqa(row: Mapping[str, Any], digest: str) -> JsonObject:
    wrong = [str(row[name]) for name in _INCORRECT if row.get(name)]
    if not wrong:
        raise InputError(f"{_INCORRECT[0]}: missing")
    choices = [str(row[_CORRECT]), *wrong]
    random.Random(digest).shuffle(choices)
    return _answered(choices, LETTERS[choices.index(str(row[_CORRECT]))])


def _choices(row: Mapping[str, Any]) -> JsonObject:
    field = "choices" if "choices" in row else "options"
    texts, labels = row[field], list(LETTERS)
    if isinstance(texts, Mapping):
        labels, texts = [str(label) for label in texts.get("label") or []], texts.get("text")
    if not isinstance(texts, Sequence) or isinstance(texts, str) or not 2 <= len(texts) <= len(LETTERS):
        raise InputError(f"{field}: not a list of 2 to {len(LETTERS)} texts")
    right = next(
        (row[key] for key in ("answerKey", "answer", "answer_index") if row.get(key) is not None), None
    )
    if isinstance(right, str) and right in labels[: len(texts)]:
        right = labels.index(right)
    if isinstance(right, bool) or not isinstance(right, int) or not 0 <= right < len(texts):
        raise InputError(f"answer: {right!r} is none of the {field}")
    return _answered([str(text) for text in texts], LETTERS[right])


def _answered(choices: list[str], letter: str) -> JsonObject:
    return {"choices": choices, "answer": {"type": "choice", "value": letter}}


def _short(row: Mapping[str, Any]) -> JsonObject:
    right = row.get("answer")
    if isinstance(right, Mapping):
        return {"answer": dict(right)}
    if isinstance(right, bool) or not isinstance(right, str | int | float) or not str(right).strip():
        raise InputError("answer: not a number or a text, or empty")
    if (number := parse_number(str(right))) is not None:
        answer: JsonObject = {"type": "number", "value": number}
        # A count or a year: one more is another answer, however large it is.
        if _COUNT.fullmatch(str(right).strip()) and abs(number) >= _LARGE:
            answer |= {"rel_tol": 0, "abs_tol": 0.49}
        return {"answer": answer}
    return {"answer": {"type": "text", "values": [str(right)]}}
