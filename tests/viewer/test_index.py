"""The index of a file of results, as it is, as it grows, and as hostile as a file can be."""

import os
from pathlib import Path

import msgspec
import pytest

from prorl_envs.errors import InputError
from prorl_envs.rollout.types import Result, Trajectory
from prorl_envs.rollout.watch import summarise
from prorl_envs.viewer.index import MAX_NAMED, Index
from prorl_envs.viewer.summary import summary_of
from tests.viewer.conftest import result, written


def failed(job: str) -> Result:
    failure = {"kind": "model", "stage": "run", "message": "gone"}
    return result(
        job, state="failed", reward=None, mask_sample=True, stop_reason=None, failure=failure, trajectory=None
    )


def forked(job: str) -> Result:
    whole = result(job).trajectory
    assert whole is not None
    empty = Trajectory(ids=[], loss_mask=[], logprobs=[], turns=[])
    return result(job, forks=[whole, empty], attempts=2, batch_id="b")


@pytest.mark.parametrize("one", [result(), failed("g/1"), forked("a/b/2")], ids=["done", "failed", "forked"])
def test_a_line_is_told_as_its_result_is(one: Result) -> None:
    assert summary_of(one.model_dump_json().encode()) == summarise(one)


def test_a_summary_says_what_a_list_shows() -> None:
    told = summarise(forked("a/b/2"))
    assert (told.turns, told.tokens, told.sampled, told.rows, told.group_id) == (4, 24, 12, 3, "a/b")


def test_entries_and_their_lines(tmp_path: Path) -> None:
    results = [result("g/0"), failed("g/1"), result("h/0", reward=0.0)]
    index = Index(written(tmp_path / "r.jsonl", *results))
    assert not index.extend() and not index.bad
    assert [Result.model_validate_json(index.line(number)) for number in range(3)] == results
    with pytest.raises(InputError, match="no episode 3"):
        index.line(3)
    index.close()


def test_it_reads_in_steps_and_goes_on_where_a_run_writes(tmp_path: Path) -> None:
    path = written(tmp_path / "r.jsonl", *(result(f"g/{n}") for n in range(4)))
    index = Index(path)
    assert index.extend(1) and len(index.entries) == 1
    assert not index.extend() and len(index.entries) == 4
    line = result("g/4").model_dump_json()
    with path.open("a") as file:
        file.write(line[:100])
        file.flush()
        assert not index.extend() and len(index.entries) == 4, "a line that is being written is not taken"
        file.write(line[100:] + "\n")
    index.extend()
    assert [entry.summary.job_id for entry in index.entries] == [f"g/{n}" for n in range(5)]
    index.close()


def test_another_file_in_its_place_is_read_anew(tmp_path: Path) -> None:
    path = written(tmp_path / "r.jsonl", result("old/0"))
    index = Index(path)
    index.extend()
    os.replace(written(tmp_path / "new", result("new/0"), result("new/1")), path)  # noqa: PTH105
    index.extend()
    assert index.generation == 1 and [entry.summary.group_id for entry in index.entries] == ["new", "new"]
    path.unlink()
    index.extend()
    assert len(index.entries) == 2, "one that was removed is still read"
    index.close()


def test_lines_that_are_no_results_are_named_and_passed_over(tmp_path: Path) -> None:
    path = written(tmp_path / "r.jsonl", result("g/0"))
    with path.open("ab") as file:
        file.write(b"\n\xff\xfe\n{}\n[1]\n" + b"[" * 5000 + b"\n" + b'{"job_id": 3}\n' * 200)
        file.write(result("g/1").model_dump_json().encode())  # without an end
    index = Index(path)
    index.extend()
    assert [entry.summary.job_id for entry in index.entries] == ["g/0", "g/1"]
    assert index.bad_lines == 204 and len(index.bad) == MAX_NAMED and index.bad[0][0] == 3
    index.close()


def test_text_is_found_however_json_writes_it(tmp_path: Path) -> None:
    said = [{"role": "user", "content": 'say "häuser"\n<b>'}]
    path = written(tmp_path / "r.jsonl", result("g/0"), result("g/1", messages=said))
    with path.open("ab") as file:  # the same with everything escaped
        file.write(msgspec.json.encode(msgspec.json.decode(path.read_bytes().splitlines()[1])) + b"\n")
    index = Index(path)
    index.extend()
    assert index.search('"häuser"\n<b') == [1, 2] and index.search("Häuser") == []
    index.close()


def test_a_missing_file_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read"):
        Index(tmp_path / "none.jsonl")
