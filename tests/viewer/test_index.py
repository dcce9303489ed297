"""The index of a results file: complete, growing, and hostile."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from prorl_envs.errors import InputError
from prorl_envs.rollout.api.summary import body_of, summarise, summary_of, summary_of_body
from prorl_envs.rollout.api.types import Result, Trajectory
from prorl_envs.viewer.index import MAX_NAMED, Index
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


#: Text that misleads a parser which looks for parts of a result without regard to quotes.
BAIT = ',"components":{},"trajectory":{"ids":[1],"loss_mask":[1],"logprobs":[0.0],"state":"failed"}]}'


def baited(job: str) -> Result:
    """Return a result whose texts, keys and content contain the bait and the keys of a result."""
    inner = json.loads('{"x":1' + BAIT[:-2] + "}")
    said = [{"role": "user", "content": BAIT, BAIT: [BAIT]}]
    nested = {"a": inner, "trajectory": None, "state": "failed", "timings": {"run_s": 9}, "attempts": 9}
    return result(job, task_id=BAIT, messages=said, evidence=nested, metadata={"b": inner, BAIT: 1, **nested})


WRITTEN: dict[str, Callable[[bytes], bytes]] = {
    "as it is": lambda line: line,
    "spaced": lambda line: json.dumps(json.loads(line)).encode(),
    "sorted": lambda line: json.dumps(json.loads(line), sort_keys=True, separators=(",", ":")).encode(),
    "reversed": lambda line: json.dumps(
        dict(reversed(json.loads(line).items())), separators=(",", ":")
    ).encode(),
}


@pytest.mark.parametrize("way", WRITTEN)
@pytest.mark.parametrize(
    "one",
    [result(), failed("g/1"), forked("a/b/2"), baited("g/3")],
    ids=["done", "failed", "forked", "baited"],
)
def test_a_line_has_the_summary_of_its_result(one: Result, way: str) -> None:
    summary, told = summary_of(WRITTEN[way](one.model_dump_json().encode())), summarise(one)
    assert summary == told
    for name in ("state", "stop_reason"):  # no enumeration
        assert type(getattr(summary, name)) is type(getattr(told, name))
    assert summary_of_body(WRITTEN[way](body_of(one)), told.cursor, told.tokens) == told


def test_parts_that_a_list_omits_are_not_parsed() -> None:
    line = result(messages=[{"role": "user", "content": "x" * 10_000}]).model_dump_json().encode()
    broken = line.replace(b"xxx", b"x\xffx", 1)  # invalid UTF-8 is reported when the episode is opened
    assert summary_of(broken) == summary_of(line)


def test_a_summary_has_the_fields_of_a_list() -> None:
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


def test_the_index_reads_in_steps_and_continues_while_a_run_writes(tmp_path: Path) -> None:
    path = written(tmp_path / "r.jsonl", *(result(f"g/{n}") for n in range(4)))
    index = Index(path)
    assert index.extend(1) and len(index.summaries) == 1
    assert not index.extend() and len(index.summaries) == 4
    line = result("g/4").model_dump_json()
    with path.open("a") as file:
        file.write(line[:100])
        file.flush()
        assert not index.extend() and len(index.summaries) == 4, "a line that is being written is not taken"
        file.write(line[100:] + "\n")
    index.extend()
    assert [one.job_id for one in index.summaries] == [f"g/{n}" for n in range(5)]
    index.close()


def test_a_replaced_file_is_read_again(tmp_path: Path) -> None:
    path = written(tmp_path / "r.jsonl", result("old/0"))
    index = Index(path)
    index.extend()
    os.replace(written(tmp_path / "new", result("new/0"), result("new/1")), path)  # noqa: PTH105
    index.extend()
    assert index.generation == 1 and [one.group_id for one in index.summaries] == ["new", "new"]
    path.unlink()
    index.extend()
    assert len(index.summaries) == 2, "one that was removed is still read"
    index.close()


def test_lines_that_are_not_results_are_named_and_skipped(tmp_path: Path) -> None:
    path = written(tmp_path / "r.jsonl", result("g/0"))
    with path.open("ab") as file:
        file.write(b"\n\xff\xfe\n{}\n[1]\n" + b"[" * 5000 + b"\n" + b'{"job_id": 3}\n' * 200)
        file.write(result("g/1").model_dump_json().encode())  # without a line end
    index = Index(path)
    index.extend()
    assert [one.job_id for one in index.summaries] == ["g/0", "g/1"]
    assert index.bad_lines == 204 and len(index.bad) == MAX_NAMED and index.bad[0][0] == 3
    index.close()


def test_text_is_found_in_any_json_encoding(tmp_path: Path) -> None:
    said = [{"role": "user", "content": 'say "häuser"\n<b>'}]
    path = written(tmp_path / "r.jsonl", result("g/0"), result("g/1", messages=said))
    with path.open("ab") as file:  # the same with everything escaped
        file.write(msgspec.json.encode(msgspec.json.decode(path.read_bytes().splitlines()[1])) + b"\n")
    index = Index(path)
    index.extend()
    assert index.search('"häuser"\n<b') == ([1, 2], 3) and index.search("Häuser") == ([], 3)
    assert index.search("häuser", 0, 1) == ([], 1) and index.search("häuser", 1, 1) == ([1], 2), "in steps"
    assert index.search("häuser", 3) == ([], 3)
    index.close()


def test_a_missing_file_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read"):
        Index(tmp_path / "none.jsonl")
