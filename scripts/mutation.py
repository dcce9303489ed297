"""Mutation testing of the modules without I/O with mutmut; fails if the tests kill too few mutants.

    .venv/bin/python scripts/mutation.py [--sample 400] [--seed COMMIT] [--only 'prorl_envs/rollout/*']

pyproject.toml lists the modules and their tests (`tool.mutmut`), and the required share of killed mutants
(`tool.mutation`). `tests/mutation/equivalent.toml` lists mutants that no test can kill, with reasons.
mutmut copies the sources with all mutants to `mutants/`. One pytest process collects the tests there. For
each mutant, a fork of this process runs the tests that reach the mutated function, so that the imports happen
only once. Properties and other decorated functions are not mutated.
"""

import argparse
import functools
import json
import math
import os
import random
import resource
import shutil
import sys
import tempfile
import threading
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import libcst as cst
import pytest
from _pytest.runner import runtestprotocol
from mutmut import __main__ as mutmut
from mutmut.configuration import config
from mutmut.mutation import mutators
from mutmut.mutation.data import SourceFileMutationData
from mutmut.mutation.diff_apply import get_diff_for_mutant
from mutmut.mutation.trampoline import set_mutant_under_test
from mutmut.state import state
from mutmut.utils.format_utils import mangled_name_from_mutant_name

#: Outcomes by the exit code of a mutant's tests. Any other exit code and any signal also count as killed.
SURVIVED, KILLED, TIMED_OUT, NO_TESTS = 0, 1, 24, 33
EQUIVALENT = Path("tests/mutation/equivalent.toml")
#: Largest number that is mutated. Larger numbers are tuning constants; a test for them would only repeat the
#: constant.
LARGEST_NUMBER = 2


#: Keyword arguments without an effect on decisions: the length check of `zip`, and texts.
UNDECIDED = ("strict", "hint")


def small_number(node: cst.Integer) -> Iterator[cst.BaseExpression]:
    if node.evaluated_value <= LARGEST_NUMBER:
        yield node.with_changes(value=str(node.evaluated_value + 1))


def forced_condition(node: cst.If) -> Iterator[cst.If]:
    """Make the condition always false, and always true."""
    for operator, literal in ((cst.And(), "False"), (cst.Or(), "True")):
        test = node.test.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
        yield node.with_changes(test=cst.BooleanOperation(test, operator, cst.Name(literal)))


def dropped_operand(node: cst.BooleanOperation) -> Iterator[cst.BaseExpression]:
    # The parentheses of the operation remain, because it may be the operand of a `not` or another operation.
    for operand in (node.left, node.right):
        yield operand if operand.lpar else operand.with_changes(lpar=node.lpar, rpar=node.rpar)


def dropped_filter(node: cst.CompFor) -> Iterator[cst.CompFor]:
    if node.ifs:
        yield node.with_changes(ifs=[])


def dropped_statement(node: cst.SimpleStatementLine) -> Iterator[cst.SimpleStatementLine]:
    """Delete a call whose result is not used, or an assignment to an attribute or an item."""
    statement = node.body[0]
    effect = isinstance(statement, cst.Expr) and isinstance(statement.value, cst.Call | cst.Await)
    target = statement.targets[0].target if isinstance(statement, cst.Assign) else None
    if effect or isinstance(target, cst.Attribute | cst.Subscript) or isinstance(statement, cst.AugAssign):
        yield node.with_changes(body=[cst.Pass()])


def dropped_keyword(node: cst.Call) -> Iterator[cst.Call]:
    """Remove a keyword argument, but not of a constructor, because most fields of a class are required."""
    called = node.func.attr if isinstance(node.func, cst.Attribute) else node.func
    if isinstance(called, cst.Name) and called.value[:1].isupper():
        return
    for index, argument in enumerate(node.args):
        if argument.keyword is not None and argument.keyword.value not in UNDECIDED:
            rest = [*node.args[:index], *node.args[index + 1 :]]
            yield node.with_changes(args=rest)


def flipped_flag(node: cst.Arg | cst.Assign | cst.Return) -> Iterator[cst.CSTNode]:
    decides = not isinstance(node, cst.Arg) or node.keyword is None or node.keyword.value not in UNDECIDED
    if decides and isinstance(node.value, cst.Name):
        yield from (node.with_changes(value=new) for new in mutators.operator_name(node.value))


#: Mutation operators that change a decision. Changes of strings are omitted, and values replaced by None,
#: because the type checker finds these.
OPERATORS: list[tuple[type[cst.CSTNode], Any]] = [
    (cst.Integer, small_number),
    (cst.If, forced_condition),
    (cst.IfExp, mutators.operator_if_exp),
    (cst.BooleanOperation, dropped_operand),
    (cst.CompFor, dropped_filter),
    (cst.SimpleStatementLine, dropped_statement),
    (cst.Call, dropped_keyword),
    (cst.Arg, flipped_flag),
    (cst.Assign, flipped_flag),
    (cst.Return, flipped_flag),
    (cst.AugAssign, mutators.operator_augmented_assignment),
    (cst.UnaryOperation, mutators.operator_remove_unary_ops),
    (cst.CSTNode, mutators.operator_keywords),
    (cst.CSTNode, mutators.operator_swap_op),
    (cst.Match, mutators.operator_match),
]


@dataclass
class Mutant:
    """One mutant, and the outcome of its tests."""

    path: Path
    name: str
    exit_code: int = NO_TESTS

    @property
    def module(self) -> str:
        return str(self.path)

    @property
    def function(self) -> str:
        """Mutmut's name of the mutated function."""
        return mangled_name_from_mutant_name(self.name)

    @property
    def killed(self) -> bool:
        return self.exit_code not in (SURVIVED, NO_TESTS)

    def diff(self) -> str:
        """Return the function's diff without its header."""
        return "\n".join(get_diff_for_mutant(self.name, path=self.path).splitlines()[3:])

    def change(self) -> tuple[str, str, str]:
        """Return the module, the removed text and the added text, which identify an equivalent mutant."""
        lines = self.diff().splitlines()
        removed, added = (
            " ".join(line[1:].strip() for line in lines if line.startswith(sign)) for sign in "-+"
        )
        return self.module, removed, added


def generate(only: str) -> list[Mutant]:
    """Write all mutants; return the mutants of modules that match the pattern `only`."""
    mutators.mutation_operators[:] = OPERATORS  # type: ignore[index]
    shutil.rmtree("mutants", ignore_errors=True)
    Path("mutants").mkdir()
    with mutmut.CatchOutput():
        mutmut.copy_src_dir()
        mutmut.copy_also_copy_files()
        mutmut.create_mutants(os.cpu_count() or 1)
    mutants = []
    for path in sorted(mutmut.walk_mutatable_files()):
        data = SourceFileMutationData(path=path)
        data.load()
        mutants += [Mutant(path, name) for name in data.exit_code_by_key]
    return [mutant for mutant in mutants if mutant.path.match(only)]


class Runs:
    """Pytest plugin that runs, for each mutant, the tests that reach the mutated function.

    Args:
        mutants: mutants to test; the plugin sets their exit codes.
        processes: number of mutants to run concurrently.
    """

    def __init__(self, mutants: Sequence[Mutant], processes: int) -> None:
        self._mutants = mutants
        self._processes = processes

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed:
            raise session.Failed("the tests cannot be collected")
        found = without_mutant(session)
        seconds, tests = found["seconds"], {item.nodeid: item for item in session.items}
        waiting, running = list(reversed(self._mutants)), dict[int, Mutant]()
        while waiting or running:
            while waiting and len(running) < self._processes:
                mutant = waiting.pop()
                names = sorted(found["tests"].get(mutant.function, ()), key=seconds.__getitem__)
                if names:
                    usual_s = sum(seconds[name] for name in names)
                    work = functools.partial(
                        run_mutant, mutant.name, [tests[name] for name in names], usual_s
                    )
                    running[fork(work)] = mutant
            if running:
                pid, status = os.wait()
                running.pop(pid).exit_code = os.waitstatus_to_exitcode(status)
        # If this run fails, failures of the environment may have been counted as killed mutants.
        without_mutant(session)
        return True


def without_mutant(session: pytest.Session) -> dict[str, Any]:
    """Run all tests without a mutant in a fork, so that this process does not set up fixtures of the session.

    Returns:
        `tests`: ids of the tests that reach a function, by function. `seconds`: duration of each test by id.

    Raises:
        Failed: a test fails.
    """
    path = Path("reached.json")
    path.unlink(missing_ok=True)
    os.waitpid(fork(lambda: record_reached(session.items, path)), 0)
    found: dict[str, Any] = json.loads(path.read_text())
    if found["problem"]:
        raise session.Failed(f"a test fails without a mutant: {found['problem']}")
    return found


def fork(work: Callable[[], int]) -> int:
    """Run `work` in a fork, which exits with the result. Return the pid of the fork."""
    if pid := os.fork():
        return pid
    code = KILLED
    try:
        code = work()
    finally:
        os._exit(code)


def record_reached(items: Sequence[pytest.Item], path: Path) -> int:
    """Run all tests without a mutant; record the functions that each test reaches, and its duration."""
    set_mutant_under_test("stats")
    tests: dict[str, list[str]] = {}
    seconds: dict[str, float] = {}
    problem = ""
    for item, following in zip(items, [*items[1:], None], strict=True):
        clear_caches()  # otherwise only the first test would reach a cached function
        state()._stats.clear()
        start = time.perf_counter()
        if problem := run_test(item, following):
            problem = f"{item.nodeid}\n{problem}"
            break
        seconds[item.nodeid] = time.perf_counter() - start
        for function in state()._stats:
            tests.setdefault(function, []).append(item.nodeid)
    path.write_text(json.dumps({"tests": tests, "seconds": seconds, "problem": problem}))
    return SURVIVED


def run_mutant(name: str, items: Sequence[pytest.Item], usual_s: float) -> int:
    """Run the tests of a mutant until a test fails.

    Args:
        usual_s: seconds of the tests without the mutant.
    """
    limit_s = math.ceil(5 + 10 * usual_s)
    resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s))
    timer = threading.Timer(6 * limit_s, os._exit, [TIMED_OUT])  # for a mutant that blocks
    timer.daemon = True
    timer.start()
    set_mutant_under_test(name)
    clear_caches()
    for item, following in zip(items, [*items[1:], None], strict=True):
        if run_test(item, following):
            return KILLED
    return SURVIVED


def run_test(item: pytest.Item, following: pytest.Item | None) -> str:
    """Run a test; return the text of its failure, or an empty text."""
    reports = runtestprotocol(item, log=False, nextitem=following)
    return "".join(report.longreprtext for report in reports if report.failed)


def clear_caches() -> None:
    """Empty the caches of functions in package and tests, because they were filled without the mutant."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("prorl_envs", "tests"):
            for value in list(vars(module).values()):
                if isinstance(value, functools._lru_cache_wrapper):
                    value.cache_clear()


def run(mutants: Sequence[Mutant], processes: int) -> None:
    """Run the tests of each mutant.

    Raises:
        SystemExit: the tests cannot be collected, or fail without a mutant.
    """
    mutmut.setup_source_paths()
    here = Path.cwd()
    os.chdir("mutants")
    settings = config()
    arguments = ["--rootdir=.", "-q", *settings.pytest_add_cli_args_test_selection]
    try:
        # A fork exits at the first failing test without removing its temporary directories.
        with tempfile.TemporaryDirectory(prefix="prm-") as tempfile.tempdir:
            code = pytest.main([*arguments, *settings.pytest_add_cli_args], [Runs(mutants, processes)])
    finally:
        os.chdir(here)
    if code:
        raise SystemExit(f"error: pytest ended with status {int(code)}")


def known_equivalents() -> set[tuple[str, str, str]]:
    entries = tomllib.loads(EQUIVALENT.read_text()).get("mutant", [])
    return {(entry["module"], entry["removed"], entry["added"]) for entry in entries}


def report(mutants: list[Mutant], floor: float, *, sampled: bool) -> int:
    """Print the surviving mutants and a table; return the exit status.

    Args:
        floor: required share of killed mutants. A sample may be two standard errors below it, because of
            chance.
    """
    say = sys.stdout.write
    total, killed = Counter[str](), Counter[str]()
    late = sum(mutant.exit_code in (TIMED_OUT, -TIMED_OUT) for mutant in mutants)
    for mutant in mutants:
        total[mutant.module] += 1
        killed[mutant.module] += mutant.killed
        if not mutant.killed:
            reason = "survived" if mutant.exit_code == SURVIVED else "no test reaches it"
            say(f"\n{reason}: {mutant.name}\n{mutant.diff()}\n")
    say("\nkilled  of   module\n")
    for module in sorted(total):
        say(f"{killed[module]:6} {total[module]:4} {killed[module] / total[module]:5.0%}  {module}\n")
    say(f"{late:6} of the killed mutants exceeded the time limit\n")
    rate = killed.total() / total.total()
    if sampled:
        floor -= 2 * math.sqrt(floor * (1 - floor) / total.total())
    say(f"{killed.total():6} {total.total():4} {rate:5.1%}  all (at least {floor:.1%})\n")
    return 0 if rate >= floor else 1


def main() -> int:
    settings = tomllib.loads(Path("pyproject.toml").read_text())["tool"]["mutation"]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sample", type=int, help="run this many mutants, chosen at random (default: all)")
    parser.add_argument("--seed", default="", help="seed of the sample, such as the commit")
    parser.add_argument("--only", default="*", help="pattern of module paths")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="mutants to run at once")
    parser.add_argument("--json", type=Path, help="also write the names and exit codes to this file")
    options = parser.parse_args()
    os.environ.pop("PYTEST_ADDOPTS", None)  # CI repeats failed tests; here a failed test must not be repeated
    sys.setrecursionlimit(10_000)  # mutmut calls a mutated function through its own functions
    mutants = generate(options.only)
    sampled = bool(options.sample) and options.sample < len(mutants)
    if sampled:
        mutants = random.Random(options.seed).sample(mutants, options.sample)
    run(mutants, options.processes)
    equivalent = known_equivalents()
    mutants = [mutant for mutant in mutants if mutant.killed or mutant.change() not in equivalent]
    if options.json:
        options.json.write_text(json.dumps({mutant.name: mutant.exit_code for mutant in mutants}, indent=1))
    return report(mutants, settings["floor"], sampled=sampled)


if __name__ == "__main__":
    config()
    sys.exit(main())
