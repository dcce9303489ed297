"""Retrieval of an answer from its source, and grading of the answer.

The answer is retrieved in the agent's own sandbox. That is safe, because an answer may be any text of the
agent's choice. It is graded on the host, as text, by pure bounded functions that evaluate no code.
"""

import re

from prorl_envs.env.answers import is_close, parse_number
from prorl_envs.env.expressions import MAX_CHARS
from prorl_envs.env.sandboxed import MAX_ANSWER_CHARS
from prorl_envs.env.scoring import CheckResult
from prorl_envs.env.words import bare
from prorl_envs.envs.ipython.answers import parse_numbers, same_expression, same_numbers, same_text
from prorl_envs.envs.ipython.task import Check, ExpressionCheck, NumberCheck, NumbersCheck, TextCheck
from prorl_envs.tools.pool.sandbox_session import SandboxSession

#: Timeout for the session to print a variable, in seconds.
VARIABLE_TIMEOUT_S = 30.0
_EVIDENCE_CHARS = 2_000
#: Longest answer whose decoration is left out.
_DECORATED_CHARS = 2_000
#: What Python adds to a value: numpy's types in a representation, the module of a function, a name.
_SCALAR = re.compile(r"\b(?:np|numpy)\.(?:float|u?int)\d+\(([^()]*)\)")
_ARRAY = re.compile(r"(?:(?:np|numpy)\.)?array\((.*?)(?:,\s*dtype=[\w.]+)?\)", re.DOTALL)
_MODULE = re.compile(r"\b(?:np|numpy|math|sp|sympy)\.(?=[A-Za-z])")
_NAMED = re.compile(r"\A\s*[A-Za-z]\w*(?:\(\s*\w+\s*\))?\s*=(?!=)")
_SIGNS = str.maketrans("−·×", "-**")
_POWER = re.compile(r"(?:(?<!\s)\s++)?[*x]\s*+10\s*+(?:\^|\*\*)\s*+\(?\s*+([-+]?\d++)\s*+\)?")
#: A number before a factor, as in `2x`, and the operator before it: `1/2x` and `x^2y` have two meanings.
_COEFFICIENT = re.compile(
    r"(?:(?<![*/^])([*/^]++)\s*+)?(?<![\w.)])(\d++(?:\.\d++)?)\s*+(?![eE][-+]?\d)(?=[A-Za-z(])"
)
_SIZE = re.compile(r"\|([^|]+)\|")

# Convert numpy's and pandas' containers to plain lists, so that numbers do not print as np.float64(...).
_PRINT = """
def __show(value):
    value = value.tolist() if hasattr(value, "tolist") else value
    many = isinstance(value, (list, tuple, set, frozenset))
    print(*value, sep=" ") if many else print(value)
__show({name})
"""


async def fetch_answer(source: str, *, finish: str | None, session: SandboxSession) -> str | None:
    """Return the answer at `source`, or None if it is missing, unreadable or too long.

    Args:
        source: `finish`, `variable:NAME` or `file:PATH`.
        finish: argument of the finish call; None without a call.
        session: the agent's sandbox.

    Raises:
        SandboxError, ToolError: our infrastructure failed.
    """
    kind, _, name = source.partition(":")
    if kind == "finish":
        return finish
    if kind == "variable":
        result = await session.tools.python(_PRINT.format(name=name), timeout_s=VARIABLE_TIMEOUT_S)
        usable = result.ok and not result.truncated_bytes and not result.data.get("error")
        return result.text if usable else None
    try:
        content = await session.tools.read(
            f"{session.sandbox.spec.workdir}/{name}", limit=4 * MAX_ANSWER_CHARS + 1
        )
    except OSError:
        return None  # missing, or not a file: caused by the agent
    text = content.decode(errors="replace")
    return text if len(text) <= MAX_ANSWER_CHARS else None


def judge(name: str, check: Check, answer: str | None) -> CheckResult:
    """Return one check's verdict on an answer. Pure and total."""
    readings = [] if answer is None else [answer]
    if answer and check.source == "finish" and len(answer) <= _DECORATED_CHARS:
        readings.append(bare(answer).strip("'\""))
    passed = any(_is_right(check, reading) for reading in readings)
    shown = None if answer is None else answer[:_EVIDENCE_CHARS]
    detail = {"type": check.type, "source": check.source, "answer": shown}
    return CheckResult(name=name, passed=passed, weight=check.weight, detail=detail)


def _is_right(check: Check, answer: str) -> bool:
    plain = _MODULE.sub("", _NAMED.sub("", _SCALAR.sub(r"\1", answer))).translate(_SIGNS)
    match check:
        case NumberCheck():
            value = parse_number(_POWER.sub(r"e\1", plain))
            return value is not None and is_close(
                value, check.value, rel_tol=check.rel_tol, abs_tol=check.abs_tol
            )
        case NumbersCheck():
            array = _ARRAY.fullmatch(plain.strip())
            values = parse_numbers(array[1] if array else plain)
            return values is not None and same_numbers(
                values, check.values, ordered=check.ordered, rel_tol=check.rel_tol, abs_tol=check.abs_tol
            )
        case ExpressionCheck():
            plain = plain[: MAX_CHARS + 1]  # longer expressions are refused
            plain = _COEFFICIENT.sub(_multiplied, _SIZE.sub(r"abs(\1)", plain))
            return same_expression(plain, check.value, variables=check.variables, domain=check.domain)
        case TextCheck():
            return same_text(answer, check.value, ignore_case=check.ignore_case)


def _multiplied(match: re.Match[str]) -> str:
    return f"{match[1] or ''}{match[2]}*" if match[1] in (None, "*") else match[0]
