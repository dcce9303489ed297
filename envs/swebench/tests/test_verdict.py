"""Parsing of test logs, and verdicts."""

import re
from collections.abc import Mapping
from dataclasses import replace

import pytest

from prorl_envs.envs.swebench.failures import failed_condition, failed_tests
from prorl_envs.envs.swebench.foreign import missing, parse
from prorl_envs.envs.swebench.grade import read_log, script_for
from prorl_envs.envs.swebench.log_parsers import PARSERS
from prorl_envs.envs.swebench.schemas import END_MARKER, START_MARKER
from prorl_envs.envs.swebench.task import SwebenchTask
from prorl_envs.envs.swebench.verdict import Outcomes, ScriptRun, Status, common_condition, judge, judge_map
from prorl_envs.errors import GraderError
from prorl_envs.extras import install_extras

SUMMARY = """\
collected 5 items
tests/test_a.py ..s.F                                   [100%]
PASSED tests/test_a.py::test_one
PASSED tests/test_a.py::test_path[/home/somebody/test_a.py]
PASSED tests/test_a.py::test_url[//host/path]
SKIPPED [1] tests/test_a.py:7: no network
XFAIL tests/test_a.py::test_known - reason
FAILED tests/test_a.py::test_two - AssertionError: assert 1 == 2
ERROR tests/test_b.py - ImportError
PASSED
== 1 failed ==
"""


@pytest.fixture(scope="module")
def task(tasks: Mapping[str, SwebenchTask]) -> SwebenchTask:
    return tasks["marshmallow-code__marshmallow-1252"]


def log_of(tested: str, end: str = ">>>>> Test Exit Code: 1") -> str:
    return (
        f"before\n+ : '{START_MARKER}'\n{tested}\n+ : '{END_MARKER}'\n+ echo '{end}'\n{end}\nUpdated 1 path\n"
    )


def test_the_summary_is_parsed() -> None:
    assert PARSERS["parse_log_marshmallow"](SUMMARY) == {
        "tests/test_a.py::test_one": Status.PASSED,
        "tests/test_a.py::test_path[/home/somebody/test_a.py]": Status.PASSED,
        "tests/test_a.py::test_url[//host/path]": Status.PASSED,
        "tests/test_a.py::test_known": Status.XFAIL,
        "tests/test_a.py::test_two": Status.FAILED,
        "tests/test_b.py": Status.ERROR,
    }


def test_paths_as_parameters_are_cut_to_their_last_part() -> None:
    statuses = PARSERS["parse_log_requests"](SUMMARY)
    assert "tests/test_a.py::test_path[/test_a.py]" in statuses
    assert "tests/test_a.py::test_url[//host/path]" in statuses


def test_colours_spaces_and_the_older_order_are_parsed() -> None:
    log = "\x1b[32mPASSED\x1b[0m a.py::test[x y]\nb.py::test FAILED\nFAILED c.py::t[p - q] - E\n"
    assert PARSERS["parse_log_sphinx"](log) == {
        "a.py::test[x y]": Status.PASSED,
        "b.py::test": Status.FAILED,
        "c.py::t[p": Status.FAILED,
    }


DJANGO = """\
test_a (x.tests.T) ... ok
test_b (x.tests.T) ... skipped 'no'
test_c (x.tests.T) ... FAIL
test_d (x.tests.T) ... ERROR
test_e (x.tests.T) ... Testing against Django installed in '/x' with up to 2 processes
(0 silenced).
ok
test_f (x.tests.T) ... System check identified no issues (0 silenced)
ok
FAIL: test_g (x.tests.T)
"""


def test_djangos_lines_are_parsed_despite_interleaved_output() -> None:
    assert PARSERS["parse_log_django"](DJANGO) == {
        "test_a (x.tests.T)": Status.PASSED,
        "test_b (x.tests.T)": Status.SKIPPED,
        "test_c (x.tests.T)": Status.FAILED,
        "test_d (x.tests.T)": Status.ERROR,
        "test_e (x.tests.T)": Status.PASSED,
        "test_f (x.tests.T)": Status.PASSED,
        "test_g": Status.FAILED,
    }


def test_sympys_lines_and_headings_are_parsed() -> None:
    log = "test_a ok\ntest_b F\ntest_c E\n____ sympy/x/test_x.py:test_b ____\n"
    assert PARSERS["parse_log_sympy"](log) == {
        "sympy/x/test_x.py:test_b": Status.FAILED,
        "test_a": Status.PASSED,
        "test_b": Status.FAILED,
        "test_c": Status.ERROR,
    }


def test_other_formats_of_pytests_lines_are_parsed() -> None:
    older = "a.py::t PASSED [ 50%]\nFAILED a.py::u - why\nSKIPPED [1] a.py: no\nPASSED a.py::v\n"
    assert PARSERS["parse_log_seaborn"](older) == {
        "a.py::t": Status.PASSED,
        "a.py::u": Status.FAILED,
        "a.py::v": Status.PASSED,
    }
    verbose = "a.py::t PASSED [ 50%]\na.py::u FAILED\n  a.py::v PASSED\n"
    assert PARSERS["pytest_verbose"](verbose) == {"a.py::t": Status.PASSED, "a.py::u": Status.FAILED}
    summary = (
        "PASSED a::x\n= short test summary info =\n"
        "\x1b[32mPASSED\x1b[0m r2e/t.py::T::a\nFAILED r/t.py::b - c\n"
    )
    assert PARSERS["r2e"](summary) == {"T.a": Status.PASSED, "b": Status.FAILED}
    assert PARSERS["parse_log_matplotlib"]("PASSED t[MouseButton.LEFT]") == {"t[1]": Status.PASSED}


def test_another_packages_parser_runs_in_a_process_of_its_own() -> None:
    lacking = missing("parse_log_jest")
    if lacking:
        assert install_extras("swebench") in lacking
        with pytest.raises(GraderError, match="parse_log_jest"):
            parse("parse_log_jest", "x")
    else:
        assert parse("parse_log_jest", "  ✓ adds (1 ms)\n") == {"adds": Status.PASSED}
    assert missing("parse_log_pytest") == ""
    assert "multi-swe-bench" in missing("multi-swe:a/b#1")


def test_an_expected_map_must_match_exactly() -> None:
    expected = {"a": Status.PASSED, "b": Status.FAILED}
    assert judge_map(expected, dict(expected)).resolved
    assert not judge_map(expected, {**expected, "b": Status.PASSED}).resolved
    assert not judge_map(expected, {**expected, "c": Status.PASSED}).resolved
    assert not judge_map(expected, {"a": Status.PASSED}).resolved


def test_if_only_failures_are_named_the_others_passed() -> None:
    assert judge(["a"], ["b"], {}, fail_only=True).resolved
    assert not judge(["a"], ["b"], {"b": Status.FAILED}, fail_only=True).resolved
    assert judge(["a", "c"], ["b"], {"a": Status.PASSED}).shares == {"fail_to_pass": 0.5, "pass_to_pass": 0.0}


def test_a_truncated_name_stands_for_those_with_its_prefix() -> None:
    statuses = {"t[a(2)]": Status.XFAIL, "t[a(1)]": Status.PASSED, "t[b(1)]": Status.FAILED}
    outcomes = Outcomes(statuses)
    assert outcomes.status_of("t[a(") == Status.XFAIL
    assert outcomes.status_of("t[b(") == Status.FAILED
    assert outcomes.status_of("t[c(") is None
    assert outcomes.status_of("t[") is None
    assert outcomes.status_of("t") is None


@pytest.mark.parametrize("parser", sorted(PARSERS))
def test_parsing_any_log_takes_linear_time(parser: str) -> None:
    # Cubic or quadratic parsing of these would take practically forever.
    brackets = "PASSED t" + "[" * 1_000_000 + "\n" + "PASSED " + "]" * 1_000_000 + "[1" * 100_000
    assert len(PARSERS[parser](f"short test summary info\n{brackets}")) <= 2
    headings = (
        "_" * 500_000 + " .py:" * 100_000 + "\n" + " ... Testing against Django installed in \n" * 10_000
    )
    assert len(PARSERS[parser](headings)) <= 2


def test_many_tests_and_many_truncated_names_are_judged() -> None:
    statuses = {f"t[{number}]": Status.PASSED for number in range(200_000)}
    cut_off = [f"t[{number}" for number in range(100_000, 110_000)]
    assert judge([*cut_off, "t[none"], ["t[7]"], statuses).fixed == len(cut_off)


@pytest.mark.parametrize(
    ("to_fix", "to_keep", "resolved"),
    [
        (Status.PASSED, Status.PASSED, True),
        (Status.XFAIL, Status.XFAIL, True),
        (Status.PASSED, Status.SKIPPED, True),
        (Status.SKIPPED, Status.PASSED, False),
        (Status.FAILED, Status.PASSED, False),
        (Status.PASSED, Status.FAILED, False),
        (Status.PASSED, Status.ERROR, False),
        (None, Status.PASSED, False),
        (Status.PASSED, None, False),
    ],
)
def test_the_verdict(to_fix: Status | None, to_keep: Status | None, resolved: bool) -> None:
    statuses = {name: status for name, status in (("f", to_fix), ("p", to_keep)) if status is not None}
    assert judge(["f"], ["p"], statuses).resolved is resolved


def test_a_run_is_a_verdict_or_an_error_with_the_reason() -> None:
    passed, failed = {"t": Status.PASSED}, {"t": Status.FAILED}
    assert ScriptRun(passed, 0, "").problem == ""
    assert ScriptRun(failed, 1, "").problem == ""
    assert "did not finish" in ScriptRun(passed, None, "").problem
    assert "names no test" in ScriptRun({}, 0, "").problem
    assert "no test of the log failed" in ScriptRun(passed, 1, "").problem


P, Q = "tests/test_a.py::test_p", "tests/test_a.py::T::test_q[p - q]"


@pytest.mark.parametrize(
    ("parser", "log", "failed"),
    [
        ("parse_log_pytest", f"PASSED {P}\nSUBFAIL {P} - assert 0\n", {P}),
        ("parse_log_pytest", f"PASSED {P}\n[a :: b - c] (i='d e') SUBFAIL {P} - assert 0\n", {P}),
        ("parse_log_pytest", f"SUBFAILED[a - b] (i='x::y') {P} - E: a - b\nPASSED {P}\n", {P}),
        ("parse_log_pytest", f"PASSED {P}\nSUBFAILED(<subtest>) {P}\n", {P}),
        ("parse_log_pytest", f"PASSED {P}\n[a] SUBPASS {P}\nSUBPASSED[SUBFAIL] {P}\n", set()),
        ("parse_log_pytest", f"PASSED {P}\nSUBFAILED[a] {P}x - b\nSUBFAILED[a] {P}[1]\n", set()),
        ("parse_log_pytest", f"ERROR {P} - E\nPASSED {P}\n", {P}),
        ("parse_log_pytest", f"XFAIL {P} - no\nSUBFAILED[a] {P} - b\n", {P}),
        ("parse_log_pytest_v2", f"PASSED {P}\nERROR {P} - E: a - b\n", {P}),
        ("parse_log_pytest_v2", f"PASSED {Q}\nERROR {Q} - E: a - b\n", {Q}),
        ("parse_log_pytest_v2", f"PASSED {Q}\n\x1b[31mSUBFAILED(i=1)\x1b[0m {Q} - E\n", {Q}),
        ("parse_log_pytest_v2", f"{P} PASSED\n{P} ERROR\n{P} PASSED\n", {P}),
        ("parse_log_pytest_v2", f"PASSED {P}\nERROR {P}[1] - E\nERROR tests/test_a.py - E\n", set()),
        ("parse_log_requests", "PASSED a.py::t[/x/y]\nSUBFAILED[a] a.py::t[/x/y] - b\n", {"a.py::t[/y]"}),
        (
            "parse_log_matplotlib",
            "PASSED a::t[MouseButton.LEFT]\n(i=1) SUBFAIL a::t[MouseButton.LEFT] - b\n",
            {"a::t[1]"},
        ),
        ("parse_log_seaborn", f"PASSED {P}\nERROR {P} - E\n", {P}),
        ("parse_log_seaborn", f"{P} PASSED [ 50%]\n{P} ERROR [ 50%]\n", {P}),
        ("pytest_verbose", f"{P} [a b] (i=1) SUBFAIL [ 14%]\n{P} PASSED [ 14%]\n", {P}),
        ("pytest_verbose", f"{P} SUBFAILED[a] (i=1) [ 14%]\n{P} PASSED [ 14%]\n", {P}),
        ("r2e", "= short test summary info =\nPASSED a.py::T::t\nSUBFAIL a.py::T::t - b\n", {"T.t"}),
        ("parse_log_sympy", "test_a F\ntest_b ok\ntest_a ok\n", {"test_a"}),
        ("parse_log_django", "t (x.T) ... ok\nFAIL: t (x.T) [a] (i=1)\n", {"t (x.T)"}),
        ("parse_log_django", "t (x.T.t) ... ok\n  t (x.T.t) (i=1) ... ERROR\n", {"t (x.T.t)"}),
        ("parse_log_django", "Same words. ... FAIL\nSame words. ... ok\n", {"Same words."}),
    ],
)
def test_a_failure_that_the_official_parser_overlooks_counts(
    task: SwebenchTask, parser: str, log: str, failed: set[str]
) -> None:
    run = read_log(task.model_copy(update={"log_parser": parser}), log_of(log))
    assert run.failed == failed
    # The parser's result is the official result.
    passed = {test for test, status in run.statuses.items() if status in (Status.PASSED, Status.XFAIL)}
    assert failed <= passed
    for test in passed:
        assert judge([test], [], run.statuses).resolved
        assert judge([test], [], run.strict.statuses).resolved is (test not in failed)


def test_output_of_runners_in_tests_does_not_fail_the_tests(task: SwebenchTask) -> None:
    """If two summaries name a test, the later summary decides."""
    heading = "= short test summary info =\n"
    log = f"{heading}FAILED {P} - inner\nSUBFAIL {P} - inner\n{heading}PASSED {P}\n"
    assert not read_log(task, log_of(log)).failed
    assert read_log(task, log_of(f"{heading}PASSED {P}\n{heading}SUBFAIL {P} - outer\n")).failed == {P}
    assert read_log(task, log_of(f"{heading}PASSED {P}\nSUBFAIL {P}\n{heading}PASSED {Q}\n")).failed == {P}


def test_a_failed_subtest_that_the_summary_omits_counts(task: SwebenchTask) -> None:
    session, heading = "= test session starts =\n", "= short test summary info =\n"
    progress = f"{P} [a] SUBFAIL [ 14%]\n{P} PASSED [ 14%]\n"
    assert read_log(task, log_of(f"{session}{progress}{heading}PASSED {P}\n")).failed == {P}
    again = f"{session}{progress}{heading}PASSED {P}\n{session}{P} PASSED [ 14%]\n{heading}PASSED {P}\n"
    assert not read_log(task, log_of(again)).failed


def test_a_failed_subtest_alone_is_a_verdict(task: SwebenchTask) -> None:
    run = read_log(task, log_of(f"PASSED {P}\nSUBFAILED[a] {P} - b"))
    assert "no test of the log failed" in run.problem
    assert not run.strict.problem


def test_finding_failures_in_any_log_takes_linear_time() -> None:
    log = "\n".join(
        (
            *("SUBFAIL" + " a::b - c" * 100_000, "ERROR" + " - " * 300_000),
            "a::b" + " [(" * 20_000 + " SUBFAIL ",
            *(" PASSED" * 100_000 + " " * 100_000 + "x", " ... FAIL" * 100_000, "\x1b[" * 300_000),
        )
    )  # fmt: skip
    assert failed_tests(log * 3, {"x"}) == frozenset()


@pytest.mark.parametrize(
    ("line", "condition"),
    [
        ("FAIL Required test coverage of 90% not reached. Total coverage: 50.00%", True),
        ("\x1b[31mFAIL Required test coverage of 90.5% not reached. Total coverage: 1%\x1b[0m", True),
        ("ERROR: Coverage failure: total of 50 is less than fail-under=90", True),
        ("Coverage failure: total of 50 is less than fail-under=90", True),
        ("Required test coverage of 90% reached. Total coverage: 95.00%", False),
    ],
)
def test_the_line_of_a_coverage_threshold_is_found(task: SwebenchTask, line: str, condition: bool) -> None:
    run = read_log(task, log_of(f"{line}\nPASSED {P}"))
    assert run.condition == run.strict.condition == (re.sub(r"\x1b\[\d+m", "", line) if condition else "")
    assert run.problem.endswith(run.condition)
    assert not read_log(task, f"{line}\n" + log_of(f"PASSED {P}")).condition


def test_finding_a_condition_in_any_log_takes_linear_time() -> None:
    log = "Required test coverage of " * 100_000 + "\n" + "Coverage failure: total of " * 100_000
    assert len(failed_condition(log)) == 300


def test_a_condition_is_one_that_the_reference_fails_too() -> None:
    passed = {"t": Status.PASSED}
    unmet, other = ScriptRun(passed, 1, "", condition="too low"), ScriptRun(passed, 1, "")
    assert common_condition(unmet, replace(unmet, condition="still too low")) == "too low"
    assert common_condition(unmet, other) == "too low"
    assert "status 1" in common_condition(other, other)
    assert not common_condition(other, unmet)
    assert not common_condition(unmet, replace(unmet, exit_code=2))
    for exit_code, status in ((0, Status.PASSED), (None, Status.PASSED), (1, Status.FAILED)):
        run = replace(unmet, exit_code=exit_code, statuses={"t": status})
        assert not common_condition(unmet, run)
        assert not common_condition(run, unmet)
        assert not common_condition(run, run)


def test_only_text_between_the_markers_counts(task: SwebenchTask) -> None:
    run = read_log(task, "PASSED early\n" + log_of("PASSED a\nFAILED b") + "PASSED late\n")
    assert dict(run.statuses) == {"a": Status.PASSED, "b": Status.FAILED}
    assert run.exit_code == 1


def test_markers_in_the_shown_patch_do_not_count(task: SwebenchTask) -> None:
    forged = log_of("PASSED forged", ">>>>> Test Exit Code: 0")
    run = read_log(task, forged + log_of("FAILED real"))
    assert dict(run.statuses) == {"real": Status.FAILED}
    assert run.exit_code == 1


@pytest.mark.parametrize(
    "log", ["", "no marker\n", f"{START_MARKER}\nPASSED a\n", log_of("PASSED a", "gone")]
)
def test_an_incomplete_log_gives_no_verdict(task: SwebenchTask, log: str) -> None:
    assert read_log(task, log).problem


def test_a_stopped_run_gives_no_verdict(task: SwebenchTask) -> None:
    """The verdict is missing even if the log, which the tested code writes, looks like that of a full run."""
    complete = log_of("PASSED a", ">>>>> Test Exit Code: 0")
    assert not read_log(task, complete).problem
    assert "did not finish" in read_log(task, complete, timed_out=True).problem


def test_the_script_is_the_official_one_except_for_commit_and_status(task: SwebenchTask) -> None:
    script = script_for(task, "c" * 40)
    assert task.base_commit not in script
    added = set(script.splitlines()) - set(task.eval_script.replace(task.base_commit, "c" * 40).splitlines())
    assert added == {"PRORL_TEST_STATUS=$?", 'echo ">>>>> Test Exit Code: $PRORL_TEST_STATUS"'}
