"""Measure the coverage of the tests including subprocesses, as a table per package.

    .venv/bin/python scripts/measure_coverage.py [--functions] [PYTEST ARGUMENTS]

`--functions` also lists the functions that were never executed. Every Python process of the tests measures
itself if it uses the virtual environment of this run. Processes in sandboxes cannot write the data file, and
killed processes do not write it, so they are not counted. A listed function of a tool server may therefore
have run.
"""

import ast
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from coverage import Coverage

SETTINGS = Path("build/coverage/coveragerc")
DATA = Path("build/coverage/data").resolve()
CONFIG = f"""[run]
source = {Path("prorl_envs").resolve()}, {Path("envs").resolve()}
omit = */tests/*, */conftest.py, */app.py
patch = subprocess, fork, _exit
parallel = true
data_file = {DATA}
disable_warnings = no-data-collected, module-not-measured, already-imported, module-not-imported
"""


def functions(path: Path) -> Iterator[tuple[str, int, int]]:
    """Yield the name of each function, and the first and last line of its body."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.body[0].lineno, node.body[-1].end_lineno or node.body[-1].lineno


def never_executed(path: Path, lines: set[int]) -> list[str]:
    """Return the functions without an executed line.

    Args:
        lines: numbers of the file's executed lines.
    """
    return [
        f"{path}:{first} {name}"
        for name, first, last in functions(path)
        if not any(first <= line <= last for line in lines)
    ]


def run(arguments: list[str]) -> int:
    """Run the tests, and return the exit status."""
    for old in DATA.parent.glob("data*"):
        old.unlink()
    DATA.parent.mkdir(parents=True, exist_ok=True)
    SETTINGS.write_text(CONFIG)
    command = ["coverage", "run", f"--rcfile={SETTINGS}", "-m", "pytest", "-p", "no:cacheprovider"]
    return subprocess.run([sys.executable, "-m", *command, *arguments], check=False).returncode


def report(*, with_functions: bool) -> None:
    """Combine the processes' data, and print the executed and all statements and functions per package."""
    coverage = Coverage(config_file=str(SETTINGS))
    coverage.combine(keep=True)
    table: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    unused: list[str] = []
    files = [*Path("prorl_envs").rglob("*.py"), *Path("envs").rglob("*.py")]
    for path in sorted(path for path in files if "tests" not in path.parts):
        _, statements, _, missing, _ = coverage.analysis2(str(path.resolve()))
        lines = set(statements) - set(missing)
        found, all_functions = never_executed(path, lines), list(functions(path))
        package = "/".join(path.parts[:2]) if len(path.parts) > 2 else path.parts[0]
        counts = (len(lines), len(statements), len(all_functions) - len(found), len(all_functions))
        table[package] = [old + new for old, new in zip(table[package], counts, strict=True)]
        unused += found
    say = sys.stdout.write
    say("\nstatements          functions       package\n")
    for package, (ran, total, called, defined) in sorted(table.items()):
        say(f"{ran:5}/{total:5} {ran / max(total, 1):4.0%}   {called:4}/{defined:4}       {package}\n")
    if with_functions:
        say("\nnever executed:\n" + "".join(f"  {name}\n" for name in unused))


def main() -> int:
    arguments = sys.argv[1:]
    with_functions = "--functions" in arguments
    status = run([argument for argument in arguments if argument != "--functions"])
    report(with_functions=with_functions)
    return status


if __name__ == "__main__":
    sys.exit(main())
