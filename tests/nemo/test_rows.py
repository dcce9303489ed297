"""Task rows as NeMo Gym rows, and the example files made from them."""

import json
from pathlib import Path

import pytest

from prorl_envs.env.registry import example_path
from prorl_envs.errors import InputError
from prorl_envs.nemo.rows import blank, nemo_row, task_row, write_rows

FAMILIES = ("bash", "code", "ipython", "math", "stem", "swebench")


def example(name: str) -> dict[str, object]:
    row = json.loads(example_path(name).read_text().splitlines()[0])
    assert isinstance(row, dict)
    return row


@pytest.mark.parametrize("name", FAMILIES)
def test_a_row_has_the_agents_input_and_no_reference(name: str) -> None:
    row = example(name)
    rendered = nemo_row(blank(name), row)
    params = rendered["responses_create_params"]
    task = blank(name).load(row)
    assert task.instruction in "".join(message["content"] for message in params["input"])
    assert {tool["name"] for tool in params["tools"]} == {spec.name for spec in blank(name).tools}
    assert task_row(rendered) == {key: value for key, value in row.items() if key != "reference"}
    assert blank(name).load(task_row(rendered)).id == task.id


@pytest.mark.parametrize("body", [{}, {"verifier_metadata": None}, {"verifier_metadata": {"task": "t1"}}])
def test_a_row_without_a_task_is_refused(body: dict[str, object]) -> None:
    with pytest.raises(InputError, match=r"verifier_metadata\.task"):
        task_row(body)


def test_writing_makes_the_folder_and_counts_the_rows(tmp_path: Path) -> None:
    target = tmp_path / "new" / "rows.jsonl"
    count = write_rows("bash", example_path("bash"), target)
    assert count == len(target.read_text().splitlines()) > 0


def test_a_bad_row_is_named_by_file_and_line(tmp_path: Path) -> None:
    source = tmp_path / "tasks.jsonl"
    source.write_text(json.dumps(example("bash")) + "\n{}\n")
    with pytest.raises(InputError, match=r"tasks\.jsonl:2"):
        write_rows("bash", source, tmp_path / "rows.jsonl")
