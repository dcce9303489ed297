"""Grading of short answers. Pure, total and bounded."""

import re

from prorl_envs.env.answers import is_close, parse_number
from prorl_envs.env.words import bare
from prorl_envs.envs.stem.task import ChoiceAnswer, NumberAnswer, StemTask, TextAnswer

#: Longest answer that is judged.
MAX_CHARS = 4_000

_CHOICE = r"(?:(?:[Oo]ption|[Cc]hoice)\s+)?"
_LETTER = re.compile(rf"{_CHOICE}\(?([A-Za-z])\)?[.:)]?")
_LETTER_FIRST = re.compile(rf"{_CHOICE}\(?([A-Z])(?:[).:,]\s+|\)?\s+[-–—]\s+)(.+)", re.DOTALL)
_POWER = re.compile(r"\s*(?:\\times|\\cdot|×|·|x|\*)\s*10\s*(?:\^|\*\*)\s*\{?\s*([+-]?\d{1,4})\s*\}?")
_ONLY_POWER = re.compile(r"^([+-]?)10\s*(?:\^|\*\*)\s*\{?\s*([+-]?\d{1,4})(?!\d)\s*\}?")
_GROUPS = re.compile(r"(?<![\d.,])\d{1,3}(?:(?: |\{,\})\d{3})+(?!\d)")
_TEXT = re.compile(r"\\(?:text|math)(?:rm|bf|it)?\s*\{([^{}]*)\}")
_SPACE = re.compile(r"\\(?:[,;:! ]|q?quad\b)|~")
_EXPONENT = re.compile(r"\^\{([+-]?\d+)\}")
_ARTICLES = frozenset(("a", "an", "the"))


def is_right(task: StemTask, answer: str) -> bool:
    """Return true if an answer is right. Decoration of Markdown and LaTeX does not count."""
    if not answer.strip() or len(answer) > MAX_CHARS:
        return False
    answer = _plain(answer)
    match task.answer:
        case ChoiceAnswer(value=letter):
            return chosen(task, answer) == letter
        case NumberAnswer():
            return _number(answer, task.answer)
        case TextAnswer(values=values):
            return _words(answer) in [_words(value) for value in values]


def chosen(task: StemTask, answer: str) -> str:
    """Return the letter of the chosen choice, or "" if the answer chooses none or several.

    An answer may be the letter, the letter with the text of the choice, or the text alone.
    """
    answer = _plain(answer)
    if match := _LETTER.fullmatch(answer):
        return match[1].upper()
    letters = dict(task.lettered)
    if (match := _LETTER_FIRST.fullmatch(answer)) and _words(match[2]) == _words(letters.get(match[1], "")):
        return match[1]
    same = [letter for letter, text in letters.items() if _words(text) == _words(answer)]
    return same[0] if len(same) == 1 else ""


def _plain(text: str) -> str:
    """Return a text without the decoration of Markdown, and without LaTeX's commands for text and spaces."""
    text = _EXPONENT.sub(r"^\1", _SPACE.sub(" ", bare(text).replace("$", " ")))
    return " ".join(_TEXT.sub(r"\1", text).split())


def _number(answer: str, right: NumberAnswer) -> bool:
    text = _GROUPS.sub(lambda match: re.sub(r"\D", "", match[0]), answer.replace("−", "-"))
    text = _ONLY_POWER.sub(r"\g<1>1e\2", _POWER.sub(r"e\1", text, count=1), count=1)
    for unit in sorted((_plain(unit) for unit in right.units), key=len, reverse=True):
        if text.endswith(unit):
            text = text.removesuffix(unit).rstrip()
            break
    value = parse_number(text)
    return value is not None and is_close(value, right.value, rel_tol=right.rel_tol, abs_tol=right.abs_tol)


def _words(text: str) -> list[str]:
    words = _plain(text).casefold().strip().strip(".\"'“”").split()
    return [word for word in words if word not in _ARTICLES] or words
