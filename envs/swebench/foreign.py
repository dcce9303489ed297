"""Log parsers of other packages: `swebench`, `multi_swe_bench`, or packages that register one.

    [project.entry-points."prorl_envs.swebench_parsers"]
    parse_log_bazel = "my_package.logs:parse"      # takes the log, returns {test: "PASSED" or another status}

Such a parser runs in a separate process with limits, because a log is hostile and the parser's regular
expressions are unbounded. This module is also the program of that process:
`python -I -m prorl_envs.envs.swebench.foreign NAME` reads the log from stdin and prints the statuses as JSON.
"""

import importlib.util
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from types import SimpleNamespace
from typing import Any

from prorl_envs.envs.swebench.log_parsers import PARSERS
from prorl_envs.envs.swebench.verdict import Status, Statuses
from prorl_envs.errors import GraderError
from prorl_envs.extras import install_extras, install_packages

GROUP = "prorl_envs.swebench_parsers"
#: Prefix of the names of `multi_swe_bench`'s parsers, one for each repository: `multi-swe:ORG/REPO#NUMBER`.
MULTI_SWE = "multi-swe:"
TIMEOUT_S = 120
_MEMORY_BYTES = 4 << 30
_KEPT_OUTPUT = 1000


def missing(name: str) -> str:
    """Return a sentence about the package that must be installed for the parser called `name`, or ""."""
    if name in PARSERS or name in {point.name for point in entry_points(group=GROUP)}:
        return ""
    package = "multi_swe_bench" if name.startswith(MULTI_SWE) else "swebench"
    if importlib.util.find_spec(package) is not None:
        return ""
    command = (
        install_packages("multi-swe-bench") if name.startswith(MULTI_SWE) else install_extras("swebench")
    )
    return f"the log parser {name!r} needs the package {package}, which is not installed: {command}"


def parse(name: str, log: str) -> Statuses:
    """Parse a log with the parser called `name`. Blocks.

    Raises:
        GraderError: there is no such parser, or it failed.
    """
    if parser := PARSERS.get(name):
        return parser(log)
    command = [sys.executable, "-I", "-m", __spec__.name, name]
    try:
        done = subprocess.run(
            command, input=log.encode(), capture_output=True, timeout=TIMEOUT_S, env={"PATH": os.defpath}
        )
    except subprocess.TimeoutExpired as error:
        raise GraderError(f"the log parser {name!r} took more than {TIMEOUT_S} s") from error
    if done.returncode != 0:
        output = done.stderr.decode(errors="replace")[-_KEPT_OUTPUT:].strip()
        raise GraderError(f"the log parser {name!r} failed: {output}", hint=missing(name))
    answer = json.loads(done.stdout)
    return {test: Status(status) for test, status in answer.items() if status in set(Status)}


def _of_swebench(name: str) -> Callable[[str], Mapping[str, str]]:
    registry: Any = importlib.import_module("swebench.harness.log_parsers")
    parser = getattr(registry, "PARSER_REGISTRY", {}).get(name) or getattr(registry, name)
    # Its parsers take the row's specification as second argument; in version 5, they do not use it.
    return lambda log: parser(log, SimpleNamespace())


def _of_multi_swe(name: str) -> Callable[[str], Mapping[str, str]]:
    full, _, number = name.removeprefix(MULTI_SWE).partition("#")
    organisation, _, repository = full.partition("/")
    importlib.import_module("multi_swe_bench.harness.repos")
    package: Any = importlib.import_module("multi_swe_bench.harness.instance")
    request = SimpleNamespace(
        org=organisation, repo=repository, number=int(number or 0), number_interval="", tag=""
    )
    instance = package.Instance.create(request, SimpleNamespace())

    def read(log: str) -> Mapping[str, str]:
        result = instance.parse_log(log)
        return {
            test: status
            for status, tests in (
                (Status.SKIPPED, result.skipped_tests),
                (Status.PASSED, result.passed_tests),
                (Status.FAILED, result.failed_tests),
            )
            for test in tests
        }

    return read


def _main(name: str) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    registered = {point.name: point for point in entry_points(group=GROUP)}
    # Packages may print during import; only the statuses may go to stdout.
    answer, sys.stdout = sys.stdout, sys.stderr
    if name in registered:
        parser = registered[name].load()
    elif name.startswith(MULTI_SWE):
        parser = _of_multi_swe(name)
    else:
        parser = _of_swebench(name)
    statuses = parser(sys.stdin.buffer.read().decode(errors="replace"))
    json.dump({str(test): getattr(status, "value", status) for test, status in statuses.items()}, answer)


if __name__ == "__main__":
    _main(sys.argv[1])
