"""Rows of every data set are recognised and read; errors name the column."""

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from prorl_envs.env.registry import example_path, load_tasks
from prorl_envs.env.rows import read_tasks
from prorl_envs.env.rows import rows as file_rows
from prorl_envs.envs.swebench.env import SwebenchEnvironment
from prorl_envs.envs.swebench.schemas import END_MARKER, normalised
from prorl_envs.envs.swebench.task import EnvironmentSpec, SwebenchTask, recipe
from prorl_envs.envs.swebench.verdict import Status
from prorl_envs.errors import InputError

FIX = "diff --git a/a/b.py b/a/b.py\n--- a/a/b.py\n+++ b/a/b.py\n@@ -1 +1 @@\n-x = 1\n+x = 2\n"
TESTS = FIX.replace("a/b.py", "tests/test_b.py") + FIX.replace("a/b.py", "tests/data.json")
COMMIT = "0123456789abcdef0123456789abcdef01234567"

COMMON: dict[str, Any] = {
    "instance_id": "Some__Thing-7",
    "problem_statement": "It is one.",
    "hints_text": "the-hint",
    "base_commit": COMMIT,
    "patch": FIX,
    "test_patch": TESTS,
    "FAIL_TO_PASS": ["tests/test_b.py::test_two"],
    "PASS_TO_PASS": ["tests/test_b.py::test_one"],
}
ROWS: Mapping[str, dict[str, Any]] = {
    "swe-gym": {**COMMON, "repo": "getmoto/moto", "version": "5.0", "created_at": "2024-02-19"},
    "swe-rebench": {
        **COMMON,
        "repo": "some/thing",
        "docker_image": "swerebench/sweb.eval.x86_64.some_1776_thing-7",
        "install_config": json.dumps({"test_cmd": "pytest -rA --color=no", "log_parser": "parse_log_pytest"}),
    },
    "swe-rebench second": {
        **COMMON,
        "repo": "some/thing",
        "language": "python",
        "image_name": "docker.io/swerebenchv2/some-thing:7",
        "install_config": {"test_cmd": ["make build", "pytest -rA"], "log_parser": "parse_log_pytest"},
    },
    "swe-smith": {
        key: value
        for key, value in {
            **COMMON,
            "repo": "swesmith/some__thing.01234567",
            "image_name": "swebench/swesmith.x86_64.some_1776_thing.01234567",
        }.items()
        if key not in ("base_commit", "test_patch")
    },
    "r2e-gym": {
        "repo_name": "tornado",
        "commit_hash": COMMIT,
        "docker_image": f"namanjain12/tornado_final:{COMMIT}",
        "problem_statement": "Write the issue. [ISSUE]\nIt is one.\n[/ISSUE]",
        "prompt": "the-solution",
        "expected_output_json": json.dumps({"\x1b[1mT.test_a\x1b[0m": "PASSED", "T.test_b - why": "FAILED"}),
        "parsed_commit_content": json.dumps(
            {
                "file_diffs": [
                    {
                        "header": {"file": {"path": "a/b.py"}},
                        "old_file_content": "x = 1\n",
                        "new_file_content": "x = 2\n",
                    },
                    {
                        "header": {"file": {"path": "tests/test_b.py"}},
                        "old_file_content": "",
                        "new_file_content": "y\n",
                    },
                ]
            }
        ),
    },
}

MULTI_SWE: dict[str, Any] = {
    "org": "Some",
    "repo": "thing",
    "number": 7,
    "title": "Fix it",
    "body": "the-solution",
    "base": {"label": "some:main", "ref": "main", "sha": COMMIT},
    "resolved_issues": [
        {"number": 5, "title": "Broken", "body": "It is one."},
        {"number": 6, "title": "Slow"},
    ],
    "hints": "the-hint",
    "fix_patch": FIX,
    "test_patch": TESTS,
    "p2p_tests": {"suite:kept": {"run": "PASS", "test": "PASS", "fix": "PASS"}},
    "f2p_tests": {"suite:two": {"run": "FAIL", "test": "FAIL", "fix": "PASS"}},
    "s2p_tests": {},
    "n2p_tests": {"suite:new": {"run": "NONE", "test": "FAIL", "fix": "PASS"}},
}


def in_columns(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of Multi-SWE in the form of its Parquet files: maps and lists of objects as columns."""
    found = dict(row)
    for group in ("p2p_tests", "f2p_tests", "s2p_tests", "n2p_tests"):
        found[group] = {"name": list(row[group])} | {
            when: [test[when] for test in row[group].values()] for when in ("run", "test", "fix")
        }
    found["resolved_issues"] = {
        key: [issue.get(key) for issue in row["resolved_issues"]] for key in ("number", "title", "body")
    }
    return found


@pytest.mark.parametrize("form", [dict, in_columns])
def test_a_row_of_multi_swe_is_read_in_either_format(form: Any) -> None:
    found = normalised(form(MULTI_SWE))
    assert (found["dataset"], found["instance_id"]) == ("multi-swe", "Some__thing-7")
    assert (found["image"], found["testbed"]) == ("mswebench/some_m_thing:pr-7", "/home/thing")
    assert found["problem_statement"] == "Broken\nIt is one.\n\nSlow"
    assert (found["FAIL_TO_PASS"], found["PASS_TO_PASS"]) == (["suite:two", "suite:new"], ["suite:kept"])
    assert "cd /home/thing" in found["eval_script"] and "/home/fix.patch" in found["hidden_paths"]
    assert found["log_parser"] == "multi-swe:Some/thing#7" and "the-" not in json.dumps(found)


def test_a_row_of_multi_swe_names_its_parser() -> None:
    if importlib.util.find_spec("multi_swe_bench") is not None:
        pytest.skip("its parsers are installed")
    with pytest.raises(InputError, match="pip install multi-swe-bench"):
        SwebenchEnvironment.load(MULTI_SWE)


@pytest.mark.parametrize(
    ("name", "image", "testbed"),
    [
        ("swe-gym", "xingyaoww/sweb.eval.x86_64.some_s_thing-7:latest", "/testbed"),
        ("swe-rebench", "swerebench/sweb.eval.x86_64.some_1776_thing-7", "/testbed"),
        ("swe-rebench second", "docker.io/swerebenchv2/some-thing:7", "/thing"),
        ("swe-smith", "swebench/swesmith.x86_64.some_1776_thing.01234567", "/testbed"),
        ("r2e-gym", f"namanjain12/tornado_final:{COMMIT}", "/testbed"),
    ],
)
def test_a_row_is_recognised_by_its_columns(name: str, image: str, testbed: str) -> None:
    task = SwebenchEnvironment.load(ROWS[name])
    assert (task.dataset, task.image, task.testbed) == (name.partition(" ")[0], image, testbed)
    assert task.instruction == "It is one."
    assert f"cd {testbed}\n: '" in task.eval_script and END_MARKER in task.eval_script
    assert "the-" not in task.model_dump_json()  # neither hint nor solution
    assert SwebenchEnvironment.load(task.model_dump(mode="json")) == task


def test_the_tests_are_the_files_of_the_test_patch() -> None:
    for name, command in (
        ("swe-gym", "pytest -n0 -rA tests/test_b.py"),
        ("swe-rebench", "pytest -rA --color=no tests/test_b.py"),
        ("swe-rebench second", "make build\npytest -rA"),
    ):
        assert f"\n{command}\n: '{END_MARKER}'" in SwebenchEnvironment.load(ROWS[name]).eval_script


def test_a_test_file_with_a_quoted_name_is_run_and_protected() -> None:
    quoted = (
        FIX.replace("a/b.py", "X")
        .replace("a/X", r'"a/tests/caf\303\251.py"')
        .replace("b/X", r'"b/tests/caf\303\251.py"')
    )
    task = SwebenchEnvironment.load({**ROWS["swe-gym"], "test_patch": TESTS + quoted})
    assert "\npytest -n0 -rA tests/test_b.py 'tests/café.py'\n" in task.eval_script
    assert "tests/café.py" in task.own_files


def test_mypys_cases_are_selected_by_name() -> None:
    cases = ["mypy/test/testcheck.py::Suite::testA", "mypy/test/testcheck.py::Suite::testB"]
    row = {**ROWS["swe-gym"], "repo": "python/mypy", "FAIL_TO_PASS": cases}
    assert "pytest -n0 -rA -k 'testA or testB'\n" in SwebenchEnvironment.load(row).eval_script


def test_a_bug_of_swe_smith_is_reverted() -> None:
    task = SwebenchEnvironment.load(ROWS["swe-smith"])
    assert task.bug and "git apply --reverse" in task.reference[0].arguments["command"]
    assert task.own_files == {"tests/test_b.py"}
    assert task.log_parser == "pytest_verbose"


def test_r2e_gym_expects_a_map_and_hides_its_tests() -> None:
    task = SwebenchEnvironment.load(ROWS["r2e-gym"])
    assert task.id == f"tornado__{COMMIT[:12]}"
    assert task.expected == {"T.test_a": Status.PASSED, "T.test_b": Status.FAILED}
    assert "/r2e_tests" in task.hidden_paths and "run_tests.sh" in task.own_files
    assert "+x = 2" in task.patch and "test_b" not in task.patch


def test_lines_of_an_r2e_reference_end_at_line_feeds_only() -> None:
    old, new = "x = 1\n\x0c\ny = '\x1e\u2028'\r\nz = 3", "x = 2\n\x0c\ny = '\x1e\u2028'\r\nz = 3\n"
    file = {"header": {"file": {"path": "a.py"}}, "old_file_content": old, "new_file_content": new}
    row = {**ROWS["r2e-gym"], "parsed_commit_content": json.dumps({"file_diffs": [file]})}
    assert SwebenchEnvironment.load(row).patch == (
        "diff --git a/a.py b/a.py\n--- a/a.py\n+++ b/a.py\n@@ -1,4 +1,4 @@\n-x = 1\n+x = 2\n \x0c\n"
        " y = '\x1e\u2028'\r\n-z = 3\n\\ No newline at end of file\n+z = 3\n"
    )


def test_a_row_without_script_or_recipe_names_the_remedy() -> None:
    row = {**COMMON, "repo": "psf/requests", "version": "2.27"}
    with pytest.raises(InputError, match=r"eval_script: .*swebench<5"):
        SwebenchEnvironment.load(row)


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("swe-gym", {"test_patch": None}, "test_patch"),
        ("swe-gym", {"FAIL_TO_PASS": 7}, "FAIL_TO_PASS"),
        ("swe-rebench", {"install_config": {}}, "test_cmd"),
        ("swe-rebench", {"install_config": {"test_cmd": "pytest", "log_parser": "parse_log_cobol"}}, "cobol"),
        ("swe-rebench", {"docker_image": "a b"}, "image"),
        ("swe-smith", {"FAIL_TO_PASS": ["TestA/b"]}, "only the instances of Python"),
        ("swe-smith", {"FAIL_TO_PASS": ["../x.py::t"]}, "test_paths"),
        ("r2e-gym", {"expected_output_json": "{"}, "row"),
        ("r2e-gym", {"expected_output_json": '{"t": "MAYBE"}'}, "expected"),
        ("r2e-gym", {"parsed_commit_content": "[]"}, "r2e-gym"),
    ],
)
def test_errors_are_named(name: str, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError, match=named):
        SwebenchEnvironment.load({**ROWS[name], **changes})


def test_a_missing_column_is_named_with_its_data_set() -> None:
    row = {key: value for key, value in ROWS["swe-gym"].items() if key != "patch"}
    with pytest.raises(InputError, match=r"patch: missing; the other columns are those of swe-gym"):
        SwebenchEnvironment.load(row)
    with pytest.raises(InputError, match="not those of a known data set; known: r2e-gym"):
        SwebenchEnvironment.load({"question": "?"})


def as_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def as_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("name", ["swe-bench", *ROWS])
@pytest.mark.parametrize(("write", "ending"), [(as_lines, "jsonl"), (as_parquet, "parquet")])
def test_files_of_each_data_set_are_read_and_a_wrong_row_has_its_number(
    tmp_path: Path, name: str, write: Any, ending: str
) -> None:
    row = ROWS.get(name) or json.loads(example_path("swebench").read_text().splitlines()[0])
    key, text = ("commit_hash", "docker_image") if name == "r2e-gym" else ("instance_id", "patch")
    rows = [dict(row), {**row, key: "another"}]
    path = tmp_path / f"train-00000-of-00001.{ending}"
    write(path, rows)
    assert load_tasks("swebench", path) == [SwebenchEnvironment.load(row) for row in rows]
    write(path, [rows[0], {**rows[1], text: "no diff"}])
    with pytest.raises(InputError, match=rf"\.{ending}:2: {text.removeprefix('docker_')}: "):
        read_tasks(SwebenchEnvironment.load, path)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    as_parquet(path, [dict(ROWS["swe-gym"])])
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(InputError, match="not parquet"):
        read_tasks(SwebenchEnvironment.load, path)


def test_multi_swe_is_read_from_parquet(tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    as_parquet(path, [in_columns(MULTI_SWE)])
    ((number, row),) = file_rows(path)
    assert (number, normalised(row)) == (1, normalised(MULTI_SWE))


def test_a_known_instance_gets_its_recipe() -> None:
    row = json.loads(example_path("swebench").read_text().splitlines()[0])
    assert recipe(row["instance_id"]) is None and recipe(None) is None
    loaded = SwebenchEnvironment.load({**row, "x_env": None, "instance_id": "pallets__flask-4992"})
    assert loaded.environment is not None and loaded.environment.sdist == "Flask==2.2.3"


def test_every_recipe_is_valid() -> None:
    path = Path(example_path("swebench")).with_name("recipes.json")
    recipes = json.loads(path.read_text())
    assert list(recipes) == sorted(recipes)
    for known in recipes.values():
        EnvironmentSpec.model_validate(known)


def test_all_examples_are_of_swe_bench() -> None:
    tasks = load_tasks("swebench", example_path("swebench"))
    assert {task.dataset for task in tasks if isinstance(task, SwebenchTask)} == {"swe-bench"}
