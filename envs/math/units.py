"""Units of quantities: separates the number and the unit of a text. Pure and bounded."""

import re
from collections import Counter

_ALIASES = {
    "mm": "mm millimeter millimetre",
    "cm": "cm centimeter centimetre",
    "m": "m meter metre",
    "km": "km kilometer kilometre",
    "in": "in inch inche",
    "ft": "ft foot feet",
    "yd": "yd yard",
    "mi": "mi mile",
    "ms": "ms millisecond",
    "s": "s sec second",
    "min": "min minute",
    "h": "h hr hour",
    "day": "day",
    "week": "week wk",
    "month": "month",
    "year": "year yr",
    "am": "am a.m",
    "pm": "pm p.m",
    "mg": "mg milligram",
    "g": "g gram gm",
    "kg": "kg kilogram",
    "oz": "oz ounce",
    "lb": "lb pound £",
    "ton": "ton tonne",
    "ml": "ml milliliter millilitre",
    "l": "l L liter litre",
    "gal": "gal gallon",
    "$": "$ dollar usd",
    "¢": "¢ cent",
    "€": "€ euro",
    "°": "° deg degree",
    "rad": "rad radian",
    "C": "C celsius",
    "F": "F fahrenheit",
    "N": "N newton",
    "J": "J joule",
    "W": "W watt",
    "V": "V volt",
    "A": "A ampere amp",
    "Hz": "Hz hertz",
    "mi/h": "mph",
    "km/h": "kph kmph kmh",
    "dm": "dm decimeter decimetre",
    "cc": "cc",
    "rupee": "rupee rs",
    "": "unit st nd rd th",
}
_NAMES = {alias: unit for unit, aliases in _ALIASES.items() for alias in aliases.split()}
_POWERS = {"square": 2, "sq": 2, "squared": 2, "cubic": 3, "cu": 3, "cubed": 3}
#: A number without letters: in `2x m`, the letter after a variable may be another variable.
_NUMBER = re.compile(
    r"(?:[-+\d.,:\s{}()/*^]|(?:\\(?:[dt]?frac|cdot|times)|\\?(?:sqrt|pi))(?![A-Za-z])|\\[,;:! ]"
    r"|(?<=\d)[eE](?=[-+\d]))*(?:(?<=[\d})])|(?<=pi))"
)
_CURRENCY = re.compile(r"\s*(?:([-+])\s*)?(?:\\text\{\s*\\?\$\s*\}|\\?([$£€]))\s*(?=[\d.])")
_TOKEN = re.compile(
    r"\s*(?:(?P<by>/|per\b)|\\cdot|[*·]|(?P<name>[^\W\d_²³]+(?:\.m)?|[$£€¢°])\.?\s*"
    r"(?:\^\s*\{?(?P<power>-?\d)\}?|(?P<raised>[²³]))?)\s*"
)
_RAISED = {None: 1, "²": 2, "³": 3}
_TEXT = re.compile(r"\\(?:text(?:rm|bf|it)?|math(?:rm|bf|it)|mbox)\s*\{((?:[^{}]|\{[^{}]*\})*)\}")
_TEXT_COMMAND = re.compile(r"\s*\\(?:text|mbox|mathrm)\s*\{(?=[^{}]*\d)([^{}\\]*)\}\s*")
_DEGREES = re.compile(r"\^\s*\{?\s*\\circ\s*\}?")
_ORDINAL = re.compile(r"\^\s*\{?\s*\\(?:text|mathrm)\s*\{\s*(st|nd|rd|th)\s*\}\s*\}?")
_FRACTION = re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
_SPACES = re.compile(r"(?:~|\\[,;:! ]|\s)+")
_LETTER = re.compile(r"\s*[A-Za-z](?:\s*\^.*)?", re.DOTALL)
_MAX_UNIT = 60


def split_unit(text: str) -> tuple[str, str | None]:
    r"""Return the number of a quantity, and the canonical name of its unit.

    Returns:
        For `5 \text{ sq. cm}`: `5` and `cm^2`. For `5 units`: `5` and "". The text itself and None if it is
        not a number with a known unit.
    """
    if enclosed := _TEXT_COMMAND.fullmatch(text):
        text = enclosed[1]
    if money := _CURRENCY.match(text):
        number = text[money.end() :].strip()
        is_number = _NUMBER.fullmatch(number)
        return ((money[1] or "") + number, f"{_NAMES[money[2] or '$']}^1") if is_number else (text, None)
    match = _NUMBER.match(text)
    number = match[0] if match else ""
    tail = text[len(number) :]
    letter = _LETTER.fullmatch(tail) and (
        tail[0] != " " or "\\" in number or "pi" in number
    )  # a variable, as in `2m` and `\\pi r`
    if not number or not 0 < len(tail) <= _MAX_UNIT or letter:
        return text, None
    tail = _ORDINAL.sub(r" \1", _DEGREES.sub("°", tail))
    unit = _unit(_SPACES.sub(" ", _FRACTION.sub(r"\1/\2", _TEXT.sub(r" \1 ", tail))).strip())
    return (text, None) if unit is None else (number.strip(), unit)


def _unit(text: str) -> str | None:
    """Return the product of the named units, sorted by name; None if a part is unknown."""
    powers: Counter[str] = Counter()
    sign = raised = 1
    last_unit, position = "", 0
    while position < len(text):
        if (token := _TOKEN.match(text, position)) is None:
            return None
        position = token.end()
        word = (token["name"] or "").lower()
        if token["by"]:
            sign = -1
        elif word in _POWERS and word.endswith("ed"):
            powers[last_unit] *= _POWERS[word]
        elif word in _POWERS:
            raised = _POWERS[word]
        elif word:
            if (unit := _name(token["name"])) is None:
                return None
            last_unit, _, below = unit.partition("/")
            powers[last_unit] += sign * int(token["power"] or _RAISED[token["raised"]]) * raised
            powers[below] -= sign
            raised = 1
    for name in ("", "°") if powers.keys() & {"C", "F"} else ("",):
        powers.pop(name, None)
    return "·".join(f"{name}^{power}" for name, power in sorted(powers.items()))


def _name(word: str) -> str | None:
    lower = word.lower() if len(word) > 1 else word
    singular = lower[:-1] if len(lower) > 2 and lower.endswith("s") else lower
    return _NAMES.get(word, _NAMES.get(lower, _NAMES.get(singular)))
