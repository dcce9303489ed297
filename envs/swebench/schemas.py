"""Detection of a row's data set, and conversion of the row to the fields of `SwebenchTask`. Pure.

There is one reader for each schema; `normalised` selects it. A reader uses the columns that it knows and
ignores the rest, because data sets are republished with more columns. Columns with hints, discussions or
solutions (other than the reference patch) are never used.
"""

import difflib
import json
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from io import StringIO
from typing import Any

from prorl_envs.envs.swebench.diffs import unquoted
from prorl_envs.envs.swebench.foreign import MULTI_SWE
from prorl_envs.envs.swebench.specs import SWE_GYM_COMMANDS, classic_script

START_MARKER = ">>>>> Start Test Output"
END_MARKER = ">>>>> End Test Output"

type Row = Mapping[str, Any]

_CONDA = ("source /opt/miniconda3/bin/activate", "conda activate testbed")
_TEXTS = (
    *("instance_id", "repo", "base_commit", "patch", "test_patch", "problem_statement", "fix_patch", "org"),
    *(
        "eval_script",
        "log_parser",
        "image",
        "image_name",
        "docker_image",
        "repo_name",
        "commit_hash",
        "version",
    ),
)
#: Files of a test patch that are not passed to a test runner, as in the `swebench` package.
_NOT_TESTS = (".json", ".png", "csv", ".txt", ".md", ".jpg", ".jpeg", ".pkl", ".yml", ".yaml", ".toml")


class SchemaError(ValueError):
    """Row of no known data set, or without a required column. The message starts with the column's name."""


def normalised(row: Row) -> dict[str, Any]:
    """Convert `row` to the fields of `SwebenchTask`; return a row with these fields unchanged.

    Raises:
        SchemaError: the row is of no known data set, or a column is missing or wrong.
    """
    if "dataset" in row and "instruction" in row:
        return dict(row)
    row = {column: value for column, value in row.items() if value is not None}  # merged tables have nulls
    for column in _TEXTS:
        if not isinstance(row.get(column, ""), str):
            raise SchemaError(f"{column}: a text is expected, not {type(row[column]).__name__}")
    for name, fits, read in _SCHEMAS:
        if fits(row):
            try:
                return {"dataset": name, **read(row)}
            except KeyError as error:
                raise SchemaError(
                    f"{error.args[0]}: missing; the other columns are those of {name}"
                ) from error
            except (AttributeError, IndexError, RecursionError, TypeError) as error:
                raise SchemaError(f"row: cannot be read as one of {name}: {error}") from error
    names = ", ".join(name for name, _, _ in _SCHEMAS)
    raise SchemaError(f"instance_id: the columns are not those of a known data set; known: {names}")


def script(lines: Iterable[str], command: str, *, testbed: str = "/testbed") -> str:
    """Return a test script in the form of the official scripts, for rows without a script.

    Args:
        lines: commands before the tests.
        command: the test command, on one or more lines.
        testbed: path of the tree.
    """
    return "\n".join(
        (
            "#!/bin/bash",
            "set -uxo pipefail",
            *lines,
            f"cd {shlex.quote(testbed)}",
            f": '{START_MARKER}'",
            command,
            f": '{END_MARKER}'",
            "",
        )
    )


def _with_patch(lines: Iterable[str], test_patch: str, testbed: str = "/testbed") -> tuple[str, ...]:
    delimiter = "EOF_OF_TESTS"
    while delimiter in test_patch:
        delimiter += "_"
    apply = f"git apply -v --whitespace=nowarn - <<'{delimiter}'\n{test_patch.rstrip(chr(10))}\n{delimiter}"
    return (*lines, f"cd {shlex.quote(testbed)}", apply)


def _test_files(test_patch: str) -> list[str]:
    targets = re.findall(r'^diff --git "?a/.* (?:b/(.*)|("b/.*"))$', test_patch, re.MULTILINE)
    paths = [path or unquoted(quoted).removeprefix("b/") for path, quoted in targets]
    return [path for path in paths if not path.endswith(_NOT_TESTS)]


def _optional(row: Row, **columns: str) -> dict[str, Any]:
    """Return the fields whose columns the row has.

    Args:
        columns: name of the column by name of the field.
    """
    return {field: row[column] for field, column in columns.items() if row.get(column) is not None}


def _common(row: Row) -> dict[str, Any]:
    """Return the fields that most data sets share with SWE-bench."""
    return {
        "instance_id": row["instance_id"],
        "problem_statement": row["problem_statement"],
        "repo": row["repo"],
        "patch": row["patch"],
        "FAIL_TO_PASS": row["FAIL_TO_PASS"],
        "PASS_TO_PASS": row["PASS_TO_PASS"],
        **_optional(row, x_env="x_env"),
    }


def docker_name(prefix: str, instance: str, separator: str) -> str:
    """Return the name of an image, derived from the instance's name as in the data sets."""
    return f"{prefix}{instance.lower().replace('__', separator)}:latest"


def _swe_bench_5(row: Row) -> dict[str, Any]:
    image = row.get("image") or docker_name("swebench/sweb.eval.x86_64.", str(row["instance_id"]), "_1776_")
    return {
        **_common(row),
        **_optional(row, eval_type="eval_type"),
        "base_commit": row["base_commit"],
        "test_patch": row["test_patch"],
        "eval_script": row["eval_script"],
        "log_parser": row["log_parser"],
        "image": image,
    }


def _swe_bench_4(row: Row) -> dict[str, Any]:
    """Convert a row before version 5, with the script and the parser of the official package."""
    eval_script, parser = classic_script(row)
    added = {"eval_script": eval_script, "log_parser": parser, "image": None, "eval_type": None}
    return _swe_bench_5({**row, **added})


def _swe_gym(row: Row) -> dict[str, Any]:
    command = SWE_GYM_COMMANDS[str(row["repo"]).lower()]
    if command.endswith(" -k"):  # mypy's cases are selected by name; they are not Python files
        cases = [str(test).rpartition("::")[2] for test in _listed(row["FAIL_TO_PASS"])]
        command = f"{command} {shlex.quote(' or '.join(cases))}"
    else:
        command = shlex.join([*shlex.split(command), *_test_files(row["test_patch"])])
    return {
        **_common(row),
        "base_commit": row["base_commit"],
        "test_patch": row["test_patch"],
        "eval_script": script(_with_patch(_CONDA, row["test_patch"]), command),
        "log_parser": "parse_log_pytest_v2" if row["repo"] == "pydantic/pydantic" else "parse_log_pytest",
        "image": docker_name("xingyaoww/sweb.eval.x86_64.", str(row["instance_id"]), "_s_"),
    }


def _swe_smith(row: Row) -> dict[str, Any]:
    tests = [str(test) for name in ("FAIL_TO_PASS", "PASS_TO_PASS") for test in _listed(row[name])]
    files = sorted({test.partition("::")[0] for test in tests})
    if not files or not all(file.endswith(".py") for file in files):
        raise SchemaError("FAIL_TO_PASS: only the instances of Python are supported for SWE-smith")
    command = shlex.join(["pytest", "--disable-warnings", "--color=no", "--tb=no", "--verbose", *files])
    return {
        **_common(row),
        "base_commit": "",
        "test_patch": "",
        "bug": True,
        "test_paths": files,
        "eval_script": script(_CONDA, command),
        "log_parser": "pytest_verbose",
        "image": row["image_name"],
    }


def _r2e_gym(row: Row) -> dict[str, Any]:
    name, commit = str(row["repo_name"]), str(row["commit_hash"])
    statement = str(row["problem_statement"])
    issue = re.search(r"\[ISSUE\](.*)\[/ISSUE\]", statement, re.DOTALL)
    expected = json.loads(row["expected_output_json"])
    plain = {re.sub(r"\x1b\[\d+m", "", test).partition(" - ")[0]: status for test, status in expected.items()}
    return {
        "instance_id": f"{name}__{commit[:12]}",
        "problem_statement": issue[1].strip() if issue else statement,
        "repo": f"r2e-gym/{name}",
        "base_commit": "",
        "patch": _r2e_patch(row),
        "test_patch": "",
        "FAIL_TO_PASS": [],
        "PASS_TO_PASS": [],
        "expected": plain,
        "eval_script": script(
            ('export PATH="/testbed/.venv/bin:$PATH"', "ln -sfn /r2e_tests /testbed/r2e_tests"),
            "bash /opt/hidden/run_tests.sh",
        ),
        "log_parser": "r2e",
        "image": row["docker_image"],
        "test_paths": ["run_tests.sh", "r2e_tests"],
        "hidden_files": ["run_tests.sh", "r2e_tests", "expected_test_output.json"],
        "hidden_paths": ["/r2e_tests"],
    }


def _r2e_patch(row: Row) -> str:
    """Return the reference patch, from the old and the new content of files in the row; "" without them."""
    diffs = []
    for file in json.loads(row.get("parsed_commit_content") or "{}").get("file_diffs", ()):
        path = str(file.get("header", {}).get("file", {}).get("path", ""))
        old, new = file.get("old_file_content"), file.get("new_file_content")
        if not path or not isinstance(old, str) or not isinstance(new, str) or "test" in path.lower():
            continue
        lines = difflib.unified_diff(_lines(old), _lines(new), f"a/{path}", f"b/{path}")
        text = "".join(
            line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines
        )
        if text:
            diffs.append(f"diff --git a/{path} b/{path}\n{text}")
    return "".join(diffs)


def _lines(text: str) -> list[str]:
    """Return the lines with their line ends; `splitlines` would also split at form feeds and others."""
    return list(StringIO(text, newline="\n"))


def _swe_rebench(row: Row) -> dict[str, Any]:
    """Convert Nebius' SWE-rebench.

    Version 1 has its tree at /testbed and uses conda. Version 2 has many languages, and its tree at /NAME.
    """
    config = row["install_config"]
    if isinstance(config, str):
        config = json.loads(config)
    version_2 = "language" in row or "image_name" in row
    test_patch = row["test_patch"]
    commands = [config["test_cmd"]] if isinstance(config["test_cmd"], str) else list(config["test_cmd"])
    if version_2:
        testbed = f"/{str(row['repo']).partition('/')[2]}"
        before, command = _with_patch((), test_patch, testbed), "\n".join(commands)
        image = row["image_name"]
    else:
        testbed = "/testbed"
        before = _with_patch(_CONDA, test_patch)
        command = shlex.join([*shlex.split(commands[-1]), *_test_files(test_patch)])
        named = row.get("docker_image")
        image = named or docker_name("swerebench/sweb.eval.x86_64.", str(row["instance_id"]), "_1776_")
    return {
        **_common(row),
        "base_commit": row["base_commit"],
        "test_patch": test_patch,
        "eval_script": script(before, command, testbed=testbed),
        "log_parser": config["log_parser"],
        "image": image,
        "testbed": testbed,
    }


def _multi_swe(row: Row) -> dict[str, Any]:
    """Convert Multi-SWE-bench, whose images contain the tests and the script that runs them."""
    name, number = f"{row['org']}/{row['repo']}", int(row["number"])
    text = "\n\n".join(
        f"{issue.get('title') or ''}\n{issue.get('body') or ''}".strip()
        for issue in _listed_issues(row["resolved_issues"])
    )
    columns = ("f2p_tests", "s2p_tests", "n2p_tests")
    testbed = f"/home/{row['repo']}"
    return {
        "instance_id": row.get("instance_id") or f"{row['org']}__{row['repo']}-{number}",
        "problem_statement": text or row["title"],
        "repo": name,
        "base_commit": row["base"]["sha"],
        "patch": row["fix_patch"],
        "test_patch": row["test_patch"],
        "FAIL_TO_PASS": [test for column in columns for test in _names(row.get(column))],
        "PASS_TO_PASS": _names(row["p2p_tests"]),
        "eval_script": script((), "bash /home/test-run.sh", testbed=testbed),
        "log_parser": f"{MULTI_SWE}{name}#{number}",
        "image": f"mswebench/{row['org']}_m_{row['repo']}:pr-{number}".lower(),
        "testbed": testbed,
        "hidden_paths": [
            f"/home/{file}" for file in ("fix.patch", "test.patch", "run.sh", "test-run.sh", "fix-run.sh")
        ],
    }


def _names(tests: Any) -> list[Any]:
    """Return the names of tests from a map by name, or from its form in Multi-SWE's Parquet files: a map of
    the columns name, run, test and fix."""
    if isinstance(tests, Mapping) and isinstance(names := tests.get("name"), list):
        return names
    return list(tests or {})


def _listed_issues(issues: Any) -> Sequence[Mapping[str, Any]]:
    """Return a list of issues, also if it is given as a list of titles and a list of bodies (Parquet)."""
    if isinstance(issues, Mapping):
        pairs = zip(issues["title"], issues["body"], strict=True)
        return [{"title": title, "body": body} for title, body in pairs]
    return list(issues)


def _listed(value: Any) -> Sequence[Any]:
    """Return a list of tests, which may be given as JSON text."""
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise SchemaError(f"FAIL_TO_PASS: not a list: {error}") from error
    if isinstance(found, (str, bytes)) or not isinstance(found, Iterable):
        raise SchemaError("FAIL_TO_PASS: not a list of tests")
    return list(found)


def _has(*columns: str) -> Callable[[Row], bool]:
    return lambda row: all(column in row for column in columns)


#: Name of each schema, condition that distinguishes it from the later schemas, and reader.
_SCHEMAS: Sequence[tuple[str, Callable[[Row], bool], Callable[[Row], dict[str, Any]]]] = (
    ("r2e-gym", _has("expected_output_json"), _r2e_gym),
    ("multi-swe", _has("fix_patch"), _multi_swe),
    ("swe-rebench", _has("install_config"), _swe_rebench),
    ("swe-smith", lambda row: "image_name" in row and "test_patch" not in row, _swe_smith),
    ("swe-bench", lambda row: "eval_script" in row or "log_parser" in row, _swe_bench_5),
    ("swe-gym", lambda row: str(row.get("repo", "")).lower() in SWE_GYM_COMMANDS, _swe_gym),
    ("swe-bench-classic", _has("instance_id", "repo"), _swe_bench_4),
)
