"""Grading of short answers. Pure, total and bounded."""

import re
import unicodedata
from collections.abc import Mapping, Sequence

from prorl_envs.env.answers import RAISED, is_close, parse_number, plain_digits
from prorl_envs.env.words import bare
from prorl_envs.envs.stem.task import ChoiceAnswer, NumberAnswer, StemTask, TextAnswer

#: Longest answer that is judged.
MAX_CHARS = 4_000

_CHOICE = (
    r"(?:(?:[Tt]he\s+)?(?:(?:correct|final|right)\s+)?[Aa]nswer\s+is:?\s+)?(?:(?:[Oo]ption|[Cc]hoice)\s+)?"
)
_LETTER = re.compile(
    rf"{_CHOICE}(?:([A-Za-z])|\(([A-Za-z])\)|\[([A-Za-z])\]|\{{([A-Za-z])\}}|<([A-Za-z])>)[.:),]?"
)
_LETTER_FIRST = re.compile(rf"{_CHOICE}\(?([A-Z])(?:\)|\)?[.:,]|\)?\s+[-–—])\s+(.+)", re.DOTALL)
#: White space around the signs of a unit, such as `m / s`.
_TIGHT = re.compile(r"\s*([/^·])\s*")
_POWER = re.compile(r"\s*(?:\\times|\\cdot|×|·|x|\*)\s*10\s*(?:\^|\*\*)\s*\{?\s*([+-]?\d{1,4})\s*\}?")
_ONLY_POWER = re.compile(r"^([+-]?)10\s*(?:\^|\*\*)\s*\{?\s*([+-]?\d{1,4})(?!\d)\s*\}?")
_GROUPS = re.compile(r"(?<![\d.,])\d{1,3}(?:(?: |\{,\})\d{3})+(?!\d)")
_TEXT = re.compile(r"\\(?:(?:text|math)(?:rm|bf|it)?|ce|mbox)\s*\{([^{}]*)\}")
_FRACTION = re.compile(r"\\[dt]?frac\s*(?:\{([^{}]*)\}\s*\{([^{}]*)\}|(\d)\s*(\d))")
_NAMED = re.compile(r"\A[A-Za-z]\w{0,19}\s*=\s*")
_ABOUT = re.compile(r"\A(?:[≈~∼]|\\(?:approx|sim)(?![A-Za-z])|(?:about|approximately)\b)\s*")
_DEGREES = re.compile(r"\^?\s*\{?\s*\\(?:circ|degree)(?![A-Za-z])\s*\}?\s*")
_SUPERSCRIPT = re.compile(f"[{RAISED}]+")
_SUBSCRIPT = re.compile(r"_(?:\{(\w+)\}|(\w))")
_SIGNS = str.maketrans({"−": "-", "‐": "-", "‑": "-", "’": "'", "⁄": "/"})
_COMMANDS = {
    r"\%": "%", r"\cdot": "·", r"\mu": "μ", r"\Omega": "Ω", r"\alpha": "α", r"\beta": "β", r"\gamma": "γ",
    r"\delta": "δ", r"\lambda": "λ", r"\pi": "π", r"\theta": "θ", r"\sigma": "σ",
}  # fmt: skip
_COMMAND = re.compile(r"\\(?:%|[A-Za-z]+)")
_PUNCTUATION = ".,;:()"
_SPACE = re.compile(r"\\(?:[,;:! ]|q?quad\b)|~")
_EXPONENT = re.compile(r"\^\{([+-]?\d+)\}")
#: A genotype, such as `AaBb`, in which the case of letters counts.
_GENOTYPE = re.compile(r"(?:([A-Za-z])(?i:\1))+")
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
        return match[match.lastindex or 0].upper()
    letters = {letter: _words(text) for letter, text in task.lettered}
    if (match := _LETTER_FIRST.fullmatch(answer)) and _is_choice(match[1], match[2], letters):
        return match[1]
    same = [letter for letter, words in letters.items() if words == _words(answer)]
    return same[0] if len(same) == 1 else ""


def _is_choice(letter: str, text: str, choices: Mapping[str, list[str]]) -> bool:
    """Return true if a text names a letter's choice and no other. It may be cut off, or go on."""
    own, given = (
        [word.strip(_PUNCTUATION) for word in words] for words in (choices.get(letter, []), _words(text))
    )
    if own == given or not own or not given:
        return own == given != []
    named = set(re.findall(r"(?<![\w'])[B-Z](?![\w'])", text)) & choices.keys() - {letter}
    others = [words for other, words in choices.items() if other != letter]
    if named or any(words == given or (_has(given, words) and not _has(own, words)) for words in others):
        return False
    return given[: len(own)] == own or own[: len(given)] == given


def _has(words: Sequence[str], part: Sequence[str]) -> bool:
    return any(words[at : at + len(part)] == part for at in range(len(words) - len(part) + 1))


def _plain(text: str) -> str:
    """Return a text without the decoration of Markdown and the commands of LaTeX, and with plain signs."""
    # Single spaces first: on long white space, the time of the patterns below would grow by its cube.
    text = " ".join(_SPACE.sub(" ", bare(text).replace("$", " ")).split())
    text = _DEGREES.sub("°", text)
    text = _EXPONENT.sub(r"^\1", _SUPERSCRIPT.sub(lambda match: f"^{plain_digits(match[0])}", text))
    text = _COMMAND.sub(lambda match: _COMMANDS.get(match[0], match[0]), text)
    text = _FRACTION.sub(_slashed, _TEXT.sub(r"\1", text))
    text = _TEXT.sub(r"\1", _SUBSCRIPT.sub(lambda match: match[1] or match[2], text))
    return " ".join(unicodedata.normalize("NFKC", text).translate(_SIGNS).split())


def _slashed(match: re.Match[str]) -> str:
    mixed = match.string[match.start() - 1 : match.start()].isdecimal()  # `3\frac{1}{3}` is not 31/3
    return f"{' ' * mixed}{match[1] or match[3]}/{match[2] or match[4]}"


def _number(answer: str, right: NumberAnswer) -> bool:
    text = _GROUPS.sub(lambda match: re.sub(r"\D", "", match[0]), _ABOUT.sub("", _NAMED.sub("", answer)))
    text = _ONLY_POWER.sub(r"\g<1>1e\2", _POWER.sub(r"e\1", text, count=1), count=1)
    text = _TIGHT.sub(r"\1", text)
    for unit in sorted((_TIGHT.sub(r"\1", _plain(unit)) for unit in right.units), key=len, reverse=True):
        if text.endswith(unit):
            text = text.removesuffix(unit).rstrip()
            break
    value = parse_number(text)
    return value is not None and is_close(value, right.value, rel_tol=right.rel_tol, abs_tol=right.abs_tol)


def _words(text: str) -> list[str]:
    plain = _plain(text).strip().strip(".\"'“”").split()
    words = [word if _GENOTYPE.fullmatch(word) else word.casefold() for word in plain]
    return [word for word in words if word not in _ARTICLES] or words
