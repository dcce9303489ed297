"""Notation of mathematical answers: the spellings of people and models, converted to that of the grammar.

Pure and bounded. The grammar is math-verify's, of LaTeX, or that of `prorl_envs.env.expressions`.
"""

import re
import unicodedata
from itertools import pairwise

from prorl_envs.env.answers import RAISED, plain_digits
from prorl_envs.env.expressions import ExpressionError, parse_expression
from prorl_envs.envs.math.units import split_unit

_LETTER = re.compile(r"[A-Za-z_]\w*")
_NAMES = frozenset(("pi", "e", "E", "I"))
SPACE = r"(?:\s|~|(?<!\\)\\(?:[,;:! ]|q?quad\b))+"
_WIDE_SPACE = re.compile(r"(?:~|(?<!\\)\\(?:[,;: ]|q?quad\b))+")
_THOUSANDS = re.compile(rf"(?<![\w.,])\d{{1,3}}(?:(?:{SPACE}|\{{,\}})\d{{3}})+(?![\d/])")
_MIXED = re.compile(rf"(?<![\w.^_{{\\])(\d+){SPACE}(\d+)\s*/\s*(\d+)(?![\w.^({{/])")
BASE = re.compile(r"(?=[^_]*\d)[\dA-F.,\s]*[\dA-F]\s*_\s*\{?\s*(?:\\text\{)?(\d+|[a-z]+)\}*")
_NO_SPACE = re.compile(r"(?<!\\)\\!\s*")
_ROOT_OF_DIGIT = re.compile(r"\\sqrt\s*(\[[^\[\]]*\])\s*([0-9A-Za-z])")
_NATURAL = re.compile(r"\\log\s*_\s*(?:e(?![A-Za-z])|\{\s*e\s*\})")
_ANGLES = re.compile(r"(?:\\left\s*)?\\langle(?![A-Za-z])([^,\n]*,.*?)(?:\\right\s*)?\\rangle(?![A-Za-z])")
_CASES = re.compile(r"\\begin\{cases\}([^&]*)\\end\{cases\}")
_REPEATING = re.compile(r"(?<![\w.])(\d*)\.(\d*)\\(?:overline|bar)\s*\{?(\d+)\}?(?![\w.])")
_REPEATED = re.compile(r"(?<![\w.])(\d+)\.()\((\d+)\)(?![\w.(])")
_ELLIPTIC = re.compile(r"(?<![\w.])(\d*)\.(\d{0,20}?)(\d{1,6})\3{2,40}\s*(?:\.{3}|…|\\[lc]?dots)(?!\w)")
_PERCENT_TEXT = re.compile(r"\\(?:text|mathrm)\s*\{\s*(?:percent|%|\\%)\s*\}")
_QUOTED = re.compile(r"([\"'])(.*)\1|“(.*)”|‘(.*)’", re.DOTALL)
_PRIME = re.compile(r"\^\s*\{?\s*\\prime\s*\}?|′")
RELATION = re.compile(r"[<>≤≥≠]|\\(?:[lg]eq?|[lg]t|ne|neq)(?![a-z])")
_NUMERALS = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven"),
    *("twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty"),
)
_BASES = {_NUMERALS[base]: str(base) for base in (*range(2, 13), 16)}
#: The set of the real numbers with a property.
_BUILDER = re.compile(
    r"(?:\\left\s*)?\\\{\s*[A-Za-z]\s*(?:\\in\s*\\mathbb\s*\{?R\}?\s*)?(?:\||:|\\mid(?![A-Za-z]))"
    r"([^{}|:]+?)(?:\\right\s*)?\\\}"
)
#: Signs and commands that the grammar does not know, and those that it knows.
_SIGNS = str.maketrans(
    {"−": "-", "·": r"\cdot ", "∙": r"\cdot ", "⁄": "/", "∞": r"\infty ", "∈": r"\in ", "±": r"\pm "}
    | {chr(0xFEE0 + code): chr(code) for code in range(0x21, 0x7F)}  # the full-width characters of East Asia
    | {"∩": r"\cap ", "∪": r"\cup ", "∖": r"\setminus ", "¬": r"\neg ", "∧": r"\land ", "∨": r"\lor "}
    | {"→": r"\to ", "∀": r"\forall ", "∃": r"\exists ", "∣": "|", "º": "°", "、": ", "}
    | {"⌊": r"\lfloor ", "⌋": r"\rfloor ", "⌈": r"\lceil ", "⌉": r"\rceil "}
)
_COMMANDS = {
    "varnothing": r"\emptyset",
    "lg": r"\log_{10}",
    "tg": r"\tan",
    "ctg": r"\cot",
    "bmod": r"\mod",
} | {f"var{name}": rf"\{name}" for name in ("phi", "epsilon", "theta")}
_COMMAND = re.compile(rf"\\(?:operatorname\s*\{{\s*)?({'|'.join(_COMMANDS)})(?![A-Za-z])(?:\s*\}})?")
_SCRIPT = re.compile(rf"([{RAISED}]+)|([₀₁₂₃₄₅₆₇₈₉₊₋]+)")
_ROOT = re.compile(r"([√∛∜])\s*(?:\(([^()]*)\)|\{([^{}]*)\}|(\d+(?:\.\d+)?|[A-Za-z]))")
_ROOTS = {"√": r"\sqrt", "∛": r"\sqrt[3]", "∜": r"\sqrt[4]"}
#: Names that people write without a backslash, and their commands.
_HYPERBOLIC, _CIRCULAR = ("sinh", "cosh", "tanh"), ("sin", "cos", "tan", "sec", "csc", "cot")
#: Functions that the grammar does not know, and their reciprocals.
_RECIPROCALS = {"coth": "tanh", "sech": "cosh", "csch": "sinh"}
_FUNCTIONS = {
    **{name: name for name in (*_HYPERBOLIC, *_RECIPROCALS, *_CIRCULAR, "ln", "exp", "gcd", "lcm")},
    **{f"{arc}{name}": f"arc{name}" for name in (*_HYPERBOLIC, *_CIRCULAR) for arc in ("a", "ar", "arc")},
    **{"log": "ln", "lg": "log_{10}", "tg": "tan", "ctg": "cot"},
}
_SYMBOLS = {
    **{name: name for name in ("pi", "alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta")},
    **{name: name for name in ("kappa", "lambda", "rho", "sigma", "tau", "phi", "chi", "psi", "omega")},
    **{"inf": "infty", "infinity": "infty", "Infinity": "infty", "oo": "infty"},
}
_SYMBOL = rf"\\(?:{'|'.join(sorted(_SYMBOLS.values()))})(?![A-Za-z])"
_CALL = rf"\\(?:log|{'|'.join(_FUNCTIONS)})(?![A-Za-z])"
_PLACE = rf"\s*(?:(\d|{_SYMBOL})|\{{([^{{}}]*)\}})"
#: Fractions of digits and symbols without braces, perhaps beside a part in braces.
_UNBRACED = re.compile(rf"\\([dt]?frac|[dt]?binom){_PLACE}{_PLACE}")
#: A function without parentheses that is divided by another: the grammar takes the ratio for its argument.
_DIVIDED = re.compile(
    rf"({_CALL}\s*(?:[\^_]\s*(?:\w|\{{[^{{}}]*\}})\s*)*(?:\{{[^{{}}]*\}}|\d+(?:\.\d+)?|[A-Za-z]|{_SYMBOL})\s*)"
    rf"/(?=\s*{_CALL})"
)
_NAME = re.compile(r"\\(?:begin|end|text\w*|math\w+|mbox|operatorname)\s*\{[^{}]*\}|\\[A-Za-z]+|([A-Za-z]+)")
#: Names and letters in a row, as in `xsinx`.
_PART = re.compile("|".join((*sorted({**_FUNCTIONS, **_SYMBOLS}, key=len, reverse=True), "[A-Za-z]")))
_ARGUMENT = re.compile(r"\s*[\w({|^\\]")
_UPRIGHT = re.compile(
    rf"\\(?:operatorname|mathrm|text(?!\s*\{{\s*sec\s*\}}))\s*\{{\s*({'|'.join(_FUNCTIONS)})\s*\}}(?=\s*\S)"
)
#: A function of `_RECIPROCALS`, its exponent, and its argument.
_RECIPROCAL = re.compile(
    rf"\\({'|'.join(_RECIPROCALS)})(?![A-Za-z])\s*(?:\^\s*\{{?\s*(\d+)\s*\}}?)?\s*(\{{[^{{}}]*\}}"
    r"|(?:\\left\s*)?\((?:[^()]|\([^()]*\))*\)|\\[dt]?frac\s*\{[^{}]*\}\s*\{[^{}]*\}"
    rf"|\d*\s*(?:[A-Za-z]|{_SYMBOL})|\d+)"
)
#: The definition of a function, and the statement that it holds for all arguments.
_FOR_ALL = (
    r"\A(\s*[A-Za-z]\((\w)\)\s*=[^=]+?)(?:[\s,;~]|\\[,;:! ]|\\q?quad(?![a-z]))*"
    r"(?:\\forall\s*|(?:\\text\s*\{\s*,?\s*)?\bfor (?:all|every|each)\b[\w\s-]*?(?:\}\s*|\s))\2"
    r"\s*(?:\\in\s*\\mathbb\s*\{?\s*[A-Z]\s*\}?(?:[_^]\S+)?\s*)?\Z"
)
#: Notations that the grammar does not know, or takes for others. `C(5,2)` may be a point, `5C2` a number.
_REWRITTEN = (
    (r"(?<![\\\w.])(?:math\.)?(?:comb|binom(?:ial)?|nCr)\(\s*([^(),]+),\s*([^(),]+)\)", r"\\binom{\1}{\2}"),
    (r"(?<![\\\w])C\(\s*((?=[^,]*[a-z])[^(),]+),(?!\s*0)\s*([^(),]+)\)", r"\\binom{\1}{\2}"),
    (r"(?<![\\\w.)}\]])([a-z])C([\drk]+)(?![\w_^'(])", r"\\binom{\1}{\2}"),
    (
        r"(?<![\w)}\]])(?:\{\s*\})?[\^_]\s*\{?(\w+)\}?\s*C\s*_\s*\{?(\w+)\}?(?!\w)",
        r"\\binom{\1}{\2}",
    ),
    (r"(?<=[)\]])\s*U\s*(?=[(\[][^()\[\],]*,)", r"\\cup "),
    # Not the transpose, which the grammar ignores if no matrix precedes it; and an inverse, no reciprocal.
    (r"(?<!matrix\})\^\s*(?:T(?![A-Za-z])|\\top(?![A-Za-z])|\{\s*(?:T|\\top)\s*\})", "^{(T)}"),
    (r"(?<![A-Za-z\\])([fgh])\s*\^\s*\{\s*-\s*1\s*\}(?=\s*\()", r"\1_{-1}"),
    (r"\\sqrt\s*\[\s*([3579])\s*\]\s*\{\s*-([^{}+-]*)\}", r"(-\\sqrt[\1]{\2})"),
    (r"\\mathrm\s*(?:\{\s*([ei])\s*\}|([ei])(?![A-Za-z]))", r"\1\2"),
    (r"\A\s*(?:≈|\\approx(?![A-Za-z]))\s*", ""),
    (_FOR_ALL, r"\1"),
    # Without the space, the grammar would join two numbers; and without the comma, it cannot read two points.
    (r"(\\(?:text|mbox|mathrm)\s*\{\s*,?\s*(?:and|or)\s*\})(?=\S)", r"\1 "),
    (r"(\([^(),]*+,[^()]*+\))\s*(?=(?:\\left\s*)?\([^(),]*+,[^()]*+\))", r"\1, "),
    (r"\\mathbb\s*([A-Z])", r"\\mathbb{\1}"),
    (r"\\mathcal\s*(?:\{\s*([A-Z])\s*\}|([A-Z]))", r"\1\2"),
)
_EXTREMUM = re.compile(r"(?<![\\A-Za-z])(max|min)(?=\s*\()")
_BASE_OF_LOG = re.compile(r"(?<!\\)(log)(?:(2|10)(?=\s*\()|(?=\s*_))")
_PLAIN_ROOT = re.compile(r"(?<!\\)sqrt\s*(?:\(((?:[^()]|\([^()]*\))*)\)|(\d+|[A-Za-z](?![A-Za-z])))")
_LOG = re.compile(r"\\log(?![A-Za-z])(?!\s*_)")
_PLAIN_LOG = re.compile(r"(?<![\\A-Za-z])[A-Za-z]?log(?![A-Za-z])")
_LARGE = re.compile(
    r"(?<![\w.,])(\d[\d,]*(?:\.\d+)?)\s*(?:\\text\s*\{\s*)?(thousand|million|billion|trillion)(?![A-Za-z])(?:\s*\})?"
)
_ZEROS = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_NUMERAL = re.compile(rf"(?:\\text\s*\{{\s*)?({'|'.join(_NUMERALS)})(?:\s*\}})?", re.IGNORECASE)
#: A ratio of more than two parts: the grammar divides them one after the other.
_RATIO = re.compile(r"[^:()\[\],]+(?::[^:()\[\],]+){2,}")
_ROUNDED = re.compile(r"(?<![\\A-Za-z])(floor|ceil)(?:ing)?\s*\(((?:[^()]|\([^()]*\))*)\)")
_PLAIN_POWER = re.compile(r"\s*\*\*\s*(?:(\d+)(?!\.?\d)|(?=[(A-Za-z]))")
_SIGNED_POWER = re.compile(r"\^\s*([-+])\s*(\d+(?:\.\d+)?|[A-Za-z])(?![\w.({])")
_TIMES_TEN = re.compile(r"(?<=\d)\s*x\s*(?=10\s*\^)")
#: The modulus of a congruence, in the spellings that the grammar does not know, and the variable before it.
_MOD = (
    r"(?:\\(?:text|mathrm|operatorname)\s*\{\s*mod\s*\}|\\b?mod(?![A-Za-z])|(?<![\\A-Za-z])mod(?![A-Za-z]))"
)
_MODULUS = re.compile(rf"\s*(?:\(\s*{_MOD}\s*\{{?(\w+)\}}?\s*\)|\\pmod\s*\{{?(\w+)\}}?)")
_OPEN_MODULUS = re.compile(rf"(?<=[\s\d}}])\s*{_MOD}\s*\{{?(\d+)\}}?\s*\Z")
_CONGRUENT = re.compile(r"\A\s*(?:[A-Za-z]\s*)?(?:\\equiv(?![A-Za-z])|≡)\s*(?=.*\\pmod)")
#: A matrix as Python writes it.
_ROWS = re.compile(
    r"(?:(?:\w+\.)?(?:[Mm]atrix|array)\s*\(\s*)?\[\s*(\[[^\[\]]*\](?:\s*,\s*\[[^\[\]]*\])*)\s*\]\s*\)?"
)
_VULGAR = re.compile("[¼½¾⅐⅑⅒⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞]")


def in_latex(text: str) -> str:
    """Return a text with the grammar's commands for signs such as `√`, `²` and `½`."""
    text = _COMMAND.sub(lambda match: _COMMANDS[match[1]], text.translate(_SIGNS))
    text = _ROOT.sub(lambda match: f"{_ROOTS[match[1]]}{{{match[2] or match[3] or match[4]}}}", text)
    text = _SCRIPT.sub(lambda match: f"{'^' if match[1] else '_'}{{{plain_digits(match[0])}}}", text)
    return _VULGAR.sub(_vulgar, text)


def _vulgar(match: re.Match[str]) -> str:
    above, _, below = unicodedata.normalize("NFKC", match[0]).partition("\N{FRACTION SLASH}")
    return rf"\frac{{{above}}}{{{below}}}"


def with_commands(spelling: str) -> str:
    """Return the canonical form of a result of `spelled`."""
    return _DIVIDED.sub(r"{\1}/", _RECIPROCAL.sub(_reciprocal, _in_commands(spelling)))


def _reciprocal(match: re.Match[str]) -> str:
    name, power, argument = match.groups()
    return rf"{{(\frac{{1}}{{\{_RECIPROCALS[name]} {argument}}})^{{{power or 1}}}}}"


def _in_commands(text: str) -> str:
    r"""Return a text with commands for names without a backslash, as in `2pi` and `xsin(2x)`.

    The grammar takes these for products of letters. Prose and expressions of the plain grammar stay.
    """
    if is_plain(text) and "i" not in _LETTER.findall(text):
        return text
    prose = text
    text = _UPRIGHT.sub(lambda match: rf"\{_FUNCTIONS[match[1]]} ", text)
    for _ in range(3):  # roots of roots
        text = _PLAIN_ROOT.sub(lambda match: rf"\sqrt{{{match[1] or match[2]}}}", text)
    text = _EXTREMUM.sub(r"\\\1", _SIGNED_POWER.sub(r"^{\1\2}", text))
    text = _PLAIN_POWER.sub(lambda match: f"^{{{match[1]}}}" if match[1] else "^", text)
    text = _ROUNDED.sub(lambda match: rf"\l{match[1]} {match[2]}\r{match[1]} ", text)
    text = _BASE_OF_LOG.sub(lambda match: r"\log" + (f"_{{{match[2]}}}" if match[2] else ""), text)
    written, at = [], 0
    for letters in _NAME.finditer(text):
        parts = _PART.findall(letters[1] or "")
        if len(parts) > 2 and any(len(one + other) == 2 for one, other in pairwise(parts)):
            if letters[1] == "and":
                continue
            return prose  # a word
        if not parts or (parts[-1] in _FUNCTIONS and not _ARGUMENT.match(text, letters.end())):
            continue
        names = [_FUNCTIONS.get(part) or _SYMBOLS.get(part) for part in parts]
        written.append(text[at : letters.start()])
        written += [rf"\{name} " if name else part for name, part in zip(names, parts, strict=True)]
        at = letters.end()
    return "".join([*written, text[at:]])


def with_log_of(answer: str, right: str) -> str:
    r"""Return a right answer with natural logarithms for `\log`, if the answer has a `log` without a
    backslash, which may be either."""
    return _LOG.sub(r"\\ln", right) if _PLAIN_LOG.search(answer) else right


def canonical(answer: str) -> str:
    r"""Return an answer in canonical form: without quotes and units, and with one spelling of numbers.

    `1 000` becomes `1000`, `2 1/4` becomes `2\frac{1}{4}`, `0.\overline{3}` becomes `\frac{3}{9}`,
    and `2pi` becomes `2\pi`.
    """
    return with_commands(spelled(answer))


def spelled(answer: str) -> str:
    """Return an answer with one spelling of signs and numbers, without its unit. Names stay as they are."""
    text = _PERCENT_TEXT.sub("%", answer)
    text = _NO_SPACE.sub("", _PRIME.sub("'", in_latex(text.strip())))
    if quoted := _QUOTED.fullmatch(text):
        text = next(filter(None, quoted.groups()[1:]), "")
    if numeral := _NUMERAL.fullmatch(text):
        return str(_NUMERALS.index(numeral[1].lower()))
    text = _LARGE.sub(lambda match: rf"{match[1]}\cdot10^{{{_ZEROS[match[2]]}}}", text)
    for pattern, replacement in _REWRITTEN:
        text = re.sub(pattern, replacement, text)
    text = _TIMES_TEN.sub(r" \\cdot ", _matrix(_congruence(text)))
    if _RATIO.fullmatch(spaced := _WIDE_SPACE.sub(" ", text)):
        first, *others = spaced.split(":")
        text = f"(1,{','.join(rf'\frac{{{part.strip()}}}{{{first.strip()}}}' for part in others)})"
    text = _ELLIPTIC.sub(_repeating, text)
    text = _REPEATING.sub(_repeating, _UNBRACED.sub(_braced, split_unit(text)[0]))
    text = _NATURAL.sub(r"\\ln ", _ROOT_OF_DIGIT.sub(r"\\sqrt\1{\2}", _REPEATED.sub(_repeating, text)))
    text = _CASES.sub(lambda match: match[1].replace(r"\\", ", "), _ANGLES.sub(r"(\1)", text))
    if (builder := _BUILDER.fullmatch(text)) and RELATION.search(builder[1]):
        text = builder[1].strip()
    if base := BASE.fullmatch(text):
        text = f"{text.partition('_')[0].strip()}_{_BASES.get(base[1], base[1])}"
    text = _THOUSANDS.sub(lambda match: re.sub(r"\D", "", match[0]), text)
    return _MIXED.sub(_mixed, _WIDE_SPACE.sub(" ", text))


def is_plain(text: str) -> bool:
    """Return true if a text is an expression of `prorl_envs.env.expressions` with one-letter variables."""
    letters = {name for name in _LETTER.findall(text) if len(name) == 1} - _NAMES
    try:
        parse_expression(text, sorted(letters))
    except ExpressionError:
        return False
    return True


def _congruence(text: str) -> str:
    """Return the class of a congruence, without its variable."""
    text = re.sub(r"\\[ ,;:]", " ", text) if "mod" in text else text
    if r"\equiv" in text or "≡" in text:
        text = _OPEN_MODULUS.sub(r"\\pmod{\1}", text)
    return _CONGRUENT.sub("", _MODULUS.sub(lambda match: rf"\pmod{{{match[1] or match[2]}}}", text))


def _matrix(text: str) -> str:
    if not (matrix := _ROWS.fullmatch(text.strip())):
        return text
    rows = [row.split(",") for row in re.findall(r"\[([^\[\]]*)\]", matrix[1])]
    if len({len(row) for row in rows}) > 1:
        return text
    return rf"\begin{{pmatrix}}{r'\\'.join('&'.join(row) for row in rows)}\end{{pmatrix}}"


def _braced(match: re.Match[str]) -> str:
    return rf"\{match[1]}{{{match[2] or match[3]}}}{{{match[4] or match[5]}}}"


def _mixed(match: re.Match[str]) -> str:
    integer, numerator, denominator = match.groups()
    proper = int(numerator) < int(denominator)
    return rf"{integer}\frac{{{numerator}}}{{{denominator}}}" if proper else match[0]


def _repeating(match: re.Match[str]) -> str:
    integer, once, repeated = match.groups()
    numerator = int(integer + once + repeated) - int(f"0{integer}{once}")
    return rf"\frac{{{numerator}}}{{{'9' * len(repeated)}{'0' * len(once)}}}"
