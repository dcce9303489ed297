"""Comparison of answers without the math-verify library, for cases that need none. Pure and bounded."""

import re
from collections.abc import Sequence
from fractions import Fraction

from prorl_envs.env.answers import parse_number
from prorl_envs.envs.math.notation import BASE, RELATION, SPACE, in_latex, spelled, with_commands
from prorl_envs.envs.math.units import split_unit

#: Longest answer that is judged.
MAX_CHARS = 2_000
_OPERATORS = (r"\int", r"\iint", r"\oint", r"\sum", r"\prod", r"\lim", r"\det", r"\partial", r"\frac{d}{d")
_GROUPED = re.compile(r"[+-]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_NAMED = re.compile(r"\A\s*[A-Za-z](?:_\w)?\s*=(?=[^=]*$)")
_TEXT = re.compile(r"\\(?:text|mathrm|textbf)\s*\{([^{}]*)\}")
#: A text of words, as opposed to a product of variables.
_WORDS = re.compile(r"(?=.*[a-z]{4})[a-z]+(?: [a-z]+)*")
#: Words, names of points in order, and Roman numerals, which are no products of variables.
_ONLY_TEXT = re.compile(r"\\(?:text|mathrm|textbf)\{[A-Za-z][A-Za-z ]*\}|[A-Z]{3,}|[IVXLCDM]{2,}")
#: A choice with its text, `(A) 5` with a command around the letter, and a letter.
_CHOICE = re.compile(r"\\text(?:bf)?\s*\{\s*\(([A-Z])\)[^{}]*\}.*", re.DOTALL)
_LETTER = re.compile(r"\(?([A-Z])\)?")
_LETTERS = re.compile(r"[a-z][a-z ]*")
#: A verdict with an explanation, and the verdict that the explanation must not mention.
_EXPLAINED = re.compile(r"(yes|no|true|false)(?:\s*[,.;:–—]|\s-\s|(?<=no)(?=\s+such\b))(.*)", re.DOTALL)
_OPPOSITE = {"yes": "no", "no": "yes", "true": "false", "false": "true"}
#: A text at the end, which the library takes for a unit; and what precedes it.
_FINAL_TEXT = re.compile(r"(.*)\\(?:text|mathrm|mbox)\s*\{([^{}]*[A-Za-z][^{}]*)\}[.\s]*", re.DOTALL)
_ANGLE = re.compile(r"\\angle\s*\{?([A-Z]{3})\}?")
_ITEMS = re.compile(r"\s*(?:,|;|\band\b|\\text\s*\{\s*,?\s*and\s*\})\s*")
#: A list without brackets; and a named value of a list.
_LIST = re.compile(r"[\w\s,;.=+*/^-]*")
_VALUE = re.compile(r"([A-Za-z](?:_\{?\w+\}?)?)\s*=\s*([^=]+)")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_AND, _OR = (
    re.compile(rf"(?<![A-Za-z])(?:{words})(?![A-Za-z])")
    for words in (r"and|\\land|\\wedge", r"or|\\lor|\\vee")
)
_SCIENTIFIC = re.compile(r"([^\\]+)\\(?:times|cdot)10\^\{?([+-]?\d{1,3})\}?")
#: An interval or a pair; a pair that the library takes for an interval of one point; the content of a set;
#: and a mark of a set that is no list of numbers.
_PAIR = re.compile(r"\([^()]*,[^()]*\)")
_POINT = re.compile(r"\[\s*([^,\[\]]+?)\s*,\s*\1\s*\]")
_SET = re.compile(r"\\(?:\{|lbrace\b)(.*?)\\(?:\}|rbrace\b)", re.DOTALL)
_NO_LIST = re.compile(r"[(\[<>|:=]|\\(?:in|mid|[lg]eq?|ldots|dots)(?![A-Za-z])")
_PERCENT = re.compile(r"([+-]?(?:[\d,]*+\.\d++|[\d,]*\d))\s*(?:\\?%|(?:percent(?:age)?|pct)\b)")


def quick(answer: str, right: str) -> bool | None:
    """Return whether an answer is right, or None if only the library can decide.

    Two numbers are compared exactly: a problem says so if its answer is to be rounded.

    Args:
        answer: the agent's answer.
        right: a right answer.
    """
    units = [split_unit(_NAMED.sub("", in_latex(text)))[1] for text in (answer, right)]
    spellings = [spelled(text) for text in (answer, right)]
    answer, right = map(with_commands, spellings)
    if _different(answer, right, units):
        return False
    if _squeezed(answer) == _squeezed(right):
        return bool(_GROUPED.fullmatch(answer)) == bool(_GROUPED.fullmatch(right))  # `1, 234` is not 1234
    words = [" ".join(_TEXT.sub(r" \1 ", text).split()).casefold().rstrip(" .") for text in spellings]
    if words[1] in _OPPOSITE and (verdict := _EXPLAINED.fullmatch(words[0])):
        return verdict[1] == words[1] and _OPPOSITE[words[1]] not in re.findall(r"\w+", verdict[2])
    if words[0] == words[1] and _WORDS.fullmatch(words[0]):
        return True
    if words[0] == words[1] and _is_in_one_case(answer) and _is_in_one_case(right):
        return True
    if (choice := _CHOICE.fullmatch(spellings[1])) and (letter := _LETTER.fullmatch(answer)):
        return letter[1] == choice[1]
    if _ONLY_TEXT.fullmatch(right) and _LETTERS.fullmatch(words[0]):
        return words[0] == words[1]  # the library takes words for products of letters
    if (ordered := _in_order(answer, right)) is not None:
        return ordered
    value, expected = _exact(answer), _exact(right)
    if value is not None and expected is not None:
        return value == expected
    value, expected = (_power_of_ten(_squeezed(text)) for text in (answer, right))
    if value is not None and value == expected:
        return True  # the library reads `6.02` as a binary number, whose product with 10^23 is another one
    percents = [_PERCENT.fullmatch(text) for text in (answer, right)]
    value, expected = (
        _exact(percent[1] if percent else text)
        for percent, text in zip(percents, (answer, right), strict=True)
    )
    if any(percents) and value is not None and expected is not None:
        # Like the library, accept `28` for `28%`, in addition to `0.28`.
        factor = Fraction(100) if percents[0] else Fraction(1, 100)
        return value == expected or (not all(percents) and value == expected * factor)
    return None


def _different(answer: str, right: str, units: Sequence[str | None]) -> bool:
    """Return true if two answers differ in a part that the library ignores.

    Such parts are the brackets of an interval or a pair, repeated items of a list, the vertex of an angle,
    the unit, the base, primes, the case of a Greek letter, a text after variables, and whether inequalities
    are joined by `and` or `or`.

    Args:
        answer, right: in canonical form.
        units: the units of both, as `split_unit` returns them.
    """
    units = [
        unit or ("%" if _PERCENT.fullmatch(text) else "")
        for unit, text in zip(units, (answer, right), strict=True)
    ]
    if all(units) and units[0] != units[1]:
        return True
    base, right_base = (match and match[1] for match in (BASE.fullmatch(answer), BASE.fullmatch(right)))
    if base and base != right_base:  # an answer may omit the base, which the problem then names
        is_ten = base.isdecimal() and int(base) == 10
        if right_base or not is_ten:
            return True
    if answer.count("'") != right.count("'"):
        return True
    ends = [_end(text) for text in (answer, right)]
    if None not in ends and ends[0] != ends[1]:
        return True
    sets = _SET.findall(answer)
    if (sets and _PAIR.search(right) and not _SET.search(right)) and all(
        "," in content and not _NO_LIST.search(content) for content in sets
    ):
        return True
    if ("," in answer) != ("," in right) and (_POINT.fullmatch(answer) or _POINT.fullmatch(right)):
        return True
    angle, right_angle = _ANGLE.fullmatch(answer), _ANGLE.fullmatch(right)
    if angle and right_angle and right_angle[1] not in (angle[1], angle[1][::-1]):
        return True
    items, right_items = _ITEMS.split(answer), _ITEMS.split(right)
    if (
        _LIST.fullmatch(right)
        and not _GROUPED.fullmatch(right)
        and len(set(right_items)) < len(right_items) != len(items)
    ):
        return True
    if _COMMAND.fullmatch(answer) and answer != right and answer.lower() == right.lower():
        return True  # `\omega` is not `\Omega`
    related = RELATION.search(answer) and RELATION.search(right)
    return bool(
        related
        and ((_AND.search(answer) and _OR.search(right)) or (_OR.search(answer) and _AND.search(right)))
    )


def _end(text: str) -> str | None:
    r"""Return the unit or the words at the end of a text with variables, such as `n \text{ is odd}`."""
    match = _FINAL_TEXT.fullmatch(text)
    if not match or not re.search("[A-Za-z]", _COMMAND.sub("", match[1])):
        return None
    unit = split_unit(f"1 {match[2].strip()}")[1]
    return unit or " ".join(re.findall(r"\w+", match[2].casefold()))


def unfinished(answer: str, right: Sequence[str]) -> bool:
    """Return true if each right answer lacks an operator (integral, sum, limit) of the answer.

    Such an answer only restates the problem.
    """
    operators = {name for name in _OPERATORS if name in answer}
    return not any(operators <= {name for name in _OPERATORS if name in text} for text in right)


def _in_order(answer: str, right: str) -> bool | None:
    """Compare a list with a list of named values, `x=1, y=2`, whose order the library ignores.

    None if the names are not in alphabetical order, or the values must be compared by the library.
    """
    named = [_VALUE.fullmatch(item) for item in _ITEMS.split(right)]
    items = _ITEMS.split(answer.removeprefix("(").removesuffix(")"))
    names = [value[1] for value in named if value]
    if not 1 < len(named) == len(names) == len(items) or names != sorted(set(names)) or "=" in answer:
        return None
    verdicts = [quick(item, value[2]) for item, value in zip(items, named, strict=True) if value]
    return None if None in verdicts and False not in verdicts else all(verdicts)


def _is_in_one_case(text: str) -> bool:
    """Return true for a word such as `no`, `No` or `NO`, and for the letter of a choice. Products (`Mm`) and
    variables (`r`) are neither."""
    one_case = text.islower() or text.isupper() or text.istitle()
    word = len(text) > 1 or text.casefold() <= "j"
    return text.isalpha() and one_case and word and len(set(text)) == len(set(text.casefold()))


def _exact(text: str) -> Fraction | None:
    """Return a decimal number with all its digits, so that long numbers are distinguished.

    None for a text that is not a decimal number, and for a fraction: the library compares fractions, and
    decides how many digits of a decimal suffice.
    """
    if "/" in text or parse_number(text) is None:
        return None
    return Fraction(text.strip().replace(",", ""))


def _power_of_ten(text: str) -> Fraction | None:
    """Return the value of a decimal number, also of `6.02\\times10^{23}`; None for other texts."""
    product = _SCIENTIFIC.fullmatch(text)
    value = _exact(product[1] if product else text)
    return value if value is None or product is None else value * Fraction(10) ** int(product[2])


def _squeezed(text: str) -> str:
    text = text.replace(r"\left", "").replace(r"\right", "").replace(r"\mid", "|")
    text = re.sub(rf"(?<=\d){SPACE}(?=\d)", "\0", text)  # `4 2` is not 42
    text = re.sub(SPACE, "", text)
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    return _TEXT.sub(r"\1", text)
