"""Parsers that return the status of each test in a log; one parser per kind of test runner. Pure.

Rows name their parser. The parsers here give the same results as those of the `swebench` package, version 5,
with its quirks, because the lists of expected tests were made with them. Rows that name another parser need
that package, or a package with an entry point: see `foreign`.

A log is hostile: the tested code writes it. All functions here take time linear in the log's length.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from io import StringIO

from prorl_envs.envs.swebench.verdict import Status, Statuses

type Parser = Callable[[str], Statuses]

_WORDS = tuple(Status)
#: Maximum characters of a line that are read; far above the length of any test's name.
MAX_LINE = 64 * 1024


def lines_of(log: str) -> Iterator[str]:
    """Yield the lines of a log; a list of all lines would take many times the memory of the log."""
    return (line.removesuffix("\n")[:MAX_LINE] for line in StringIO(log, newline="\n"))


def _summary_words(line: str) -> list[str] | None:
    """Return the words of a `STATUS test ...` line of pytest's short summary; None for any other line."""
    if not line.startswith(_WORDS):
        return None
    words = line.split()
    if len(words) < 2 or words[0] not in _WORDS:
        return None
    # `SKIPPED [2] file:line: reason` gives a number of tests, but no name. Similar lines of other statuses
    # count: some expected lists contain `[100%]`, from a wrapped progress line.
    if words[0] == Status.SKIPPED and re.fullmatch(r"\[\d+\]", words[1]):
        return None
    return words


def parse_pytest(log: str) -> Statuses:
    """Parse pytest's short summary (`-rA`)."""
    statuses: Statuses = {}
    for line in lines_of(log):
        if words := _summary_words(line):
            statuses[words[1]] = Status(words[0])
    return statuses


def parse_pytest_options(log: str) -> Statuses:
    """Parse like `parse_pytest`; shorten a parameter that is a path, which differs between machines."""
    return {short_option(test): status for test, status in parse_pytest(log).items()}


def short_option(test: str) -> str:
    """Return the name of a test; if its parameter is a path, only the path's last part is kept."""
    # The parameter ends at the last bracket. A regular expression would take cubic time on many brackets.
    start, end = test.find("["), test.rfind("]")
    if not 0 <= start < end:
        return test
    name, option = test[:start], test[start + 1 : end]
    if option.startswith("/") and not option.startswith("//") and "*" not in option:
        option = "/" + option.rpartition("/")[2]
    return f"{name}[{option}]"


_CONTROL = dict.fromkeys(range(1, 32))


def parse_pytest_v2(log: str) -> Statuses:
    """Parse pytest's short summary with colours, names with spaces, and the older `test STATUS` lines."""
    statuses: Statuses = {}
    for coloured in lines_of(log):
        line = re.sub(r"\[(\d+)m", "", coloured).translate(_CONTROL)
        if line.startswith(_WORDS):
            if words := _summary_words(line.split(" - ", 1)[0] if line.startswith("FAILED") else line):
                statuses[" ".join(words[1:])] = Status(words[0])
        elif line.endswith(_WORDS):
            words = line.split()
            if len(words) > 1 and words[-1] in _WORDS:
                statuses[" ".join(words[:-1])] = Status(words[-1])
    return statuses


def parse_matplotlib(log: str) -> Statuses:
    """Parse like `parse_pytest`; replace two parameters that earlier versions of Python print differently."""
    return parse_pytest(log.replace("MouseButton.LEFT", "1").replace("MouseButton.RIGHT", "3"))


def parse_verbose(log: str) -> Statuses:
    """Parse pytest's progress lines with `--verbose`: `file::test STATUS [ 50%]`."""
    statuses: Statuses = {}
    for line in lines_of(log):
        words = line.split(maxsplit=2)
        if len(words) > 1 and not line[0].isspace():
            for status in Status:
                if words[1].startswith(status):
                    statuses[words[0]] = status
    return statuses


def parse_seaborn(log: str) -> Statuses:
    """Parse pytest's short summary, and the older `test PASSED` lines; only passed and failed tests."""
    statuses: Statuses = {}
    for line in lines_of(log):
        words = line.split(maxsplit=2)
        if len(words) < 2:
            continue
        if line.startswith(Status.FAILED):
            statuses[words[1]] = Status.FAILED
        elif f" {Status.PASSED} " in line:
            if words[1] == Status.PASSED:
                statuses[words[0]] = Status.PASSED
        elif line.startswith(Status.PASSED):
            statuses[words[1]] = Status.PASSED
    return statuses


_SYMPY_ENDINGS = ((" E", Status.ERROR), (" F", Status.FAILED), (" ok", Status.PASSED))


def parse_sympy(log: str) -> Statuses:
    """Parse sympy's own runner with `--verbose`: `test_name ok` lines, and `___ file.py:test_name ___`
    headings."""
    statuses: Statuses = {}
    for line in lines_of(log):
        first, last = line.find(" "), line.rfind(" ")
        # A heading's name is between the first and the last space, regardless of the text outside.
        if 0 <= first < last and line.rfind(".py:", first + 1, last) > 0:
            statuses[line[first + 1 : last]] = Status.FAILED
    for line in lines_of(log):
        line = line.strip()
        if line.startswith("test_"):
            for ending, status in _SYMPY_ENDINGS:
                if line.endswith(ending):
                    statuses[line.split(maxsplit=1)[0]] = status
    return statuses


_DJANGO_PASSED = (" ... ok", " ... OK", " ...  OK")
_DJANGO_FAILED = ((" ... FAIL", "FAIL:", Status.FAILED), (" ... ERROR", "ERROR:", Status.ERROR))
_DJANGO_MIGRATION = "Applying sites.0002_alter_domain_unique...test_no_migrations"
_DJANGO_VERSION = "--version is equivalent to version"


def parse_django(log: str) -> Statuses:
    """Parse Django's runner with `--verbosity 2`: `test ... ok` lines, which other output may interrupt."""
    statuses: Statuses = {}
    previous: str | None = None
    for unstripped in lines_of(log):
        line = unstripped.strip()
        if _DJANGO_VERSION in line:
            statuses[_DJANGO_VERSION] = Status.PASSED
        if " ... " in line:
            previous = line.partition(" ... ")[0]
        if passed := next((ending for ending in _DJANGO_PASSED if line.endswith(ending)), None):
            if line.startswith(_DJANGO_MIGRATION):
                line = line.partition("...")[2].strip()
            statuses[line.removesuffix(passed)] = Status.PASSED
        if " ... skipped" in line:
            statuses[line.partition(" ... skipped")[0]] = Status.SKIPPED
        for ending, heading, status in _DJANGO_FAILED:
            if line.endswith(ending):
                statuses[line.partition(ending)[0]] = status
            if line.startswith(heading) and len(words := line.split(maxsplit=2)) > 1:
                statuses[words[1]] = status
        if line.startswith("ok") and previous is not None:
            statuses[previous] = Status.PASSED
    statuses.update(dict.fromkeys(_interrupted(log), Status.PASSED))
    return statuses


def _interrupted(log: str) -> Iterator[str]:
    """Yield the tests of Django whose line one of three messages interrupts, with `ok` on the next line."""
    name: str | None = None
    started: str | None = None
    for line in lines_of(log):
        if line == "ok" and name is not None:
            yield name
            started = None
        name = None
        test, _, message = line.partition(" ... ")
        if started is None and message.startswith("Testing against Django installed in "):
            started = test
        if started is not None and line.endswith(" silenced)."):
            name = started
        elif message == "System check identified no issues (0 silenced)" or (
            message.startswith("Internal Server Error: /")
            and message.endswith("/")
            and message.count("/") > 1
        ):
            name = test


#: In the heading of pytest's short summary.
SUMMARY = "short test summary info"


def parse_r2e(log: str) -> Statuses:
    """Parse pytest's short summary; name tests as R2E-Gym does, by class and function: `TestA.test_b`."""
    statuses: Statuses = {}
    clean = re.sub(r"\x1b\[[0-9;]*m|\r", "", log)
    for line in lines_of(clean.partition(SUMMARY)[2].partition(SUMMARY)[0]):
        for status in (Status.PASSED, Status.FAILED, Status.ERROR):
            if status in line:
                statuses[".".join(line.split("::")[1:]).partition(" - ")[0]] = status
                break
    return statuses


#: Parsers by their names in the rows.
PARSERS: Mapping[str, Parser] = {
    **dict.fromkeys(
        (
            *("parse_log_pytest", "parse_log_astroid", "parse_log_flask", "parse_log_marshmallow"),
            *("parse_log_pvlib", "parse_log_pyvista", "parse_log_sqlfluff", "parse_log_xarray"),
        ),
        parse_pytest,
    ),
    **dict.fromkeys(
        ("parse_log_pytest_options", "parse_log_requests", "parse_log_pydicom", "parse_log_pylint"),
        parse_pytest_options,
    ),
    **dict.fromkeys(
        ("parse_log_pytest_v2", "parse_log_astropy", "parse_log_scikit", "parse_log_sphinx"), parse_pytest_v2
    ),
    "parse_log_django": parse_django,
    "parse_log_matplotlib": parse_matplotlib,
    "parse_log_seaborn": parse_seaborn,
    "parse_log_sympy": parse_sympy,
    "pytest_verbose": parse_verbose,
    "r2e": parse_r2e,
}
