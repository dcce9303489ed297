"""Tables and datasets, read by the libraries of their users."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from prorl_envs.exports.columns import COLUMNS, row_of
from prorl_envs.exports.formats import ExportFormat, export
from prorl_envs.rollout.api.types import Result
from prorl_envs.rollout.client.result_files import located_results
from tests.exports.conftest import TOOLS

NAMES = [column.name for column in COLUMNS]


@pytest.fixture(scope="module", autouse=True)
def polars_threads() -> None:
    """Start the threads that polars keeps: their descriptors are not a leak of a test."""
    import polars

    polars.scan_csv(io.BytesIO(b"a\n1\n")).collect()


@pytest.fixture
def rows(results: list[Result]) -> list[dict[str, Any]]:
    return [dict(row_of(one)) for one in results]


def test_a_row_has_the_numbers_of_its_result(results: list[Result]) -> None:
    solved, partly, failed, math = map(row_of, results)
    assert [row["reward"] for row in (solved, partly, failed)] == [1.0, 0.25, None]
    assert [row["solved"] for row in (solved, partly, failed)] == [True, False, None]
    assert (solved["turns"], solved["tokens"], solved["sampled_tokens"], solved["token_exact"]) == (
        2,
        12,
        6,
        True,
    )
    assert (failed["failure"], failed["failure_stage"], failed["reward"]) == ("sandbox", "init", None)
    assert failed["token_exact"] is None and math["environment"] == "math@solver"
    assert json.loads(str(solved["metadata"])) == {"step": 7}
    assert json.loads(str(math["components"])) == {"a": 0.5}


def test_cached_tokens_are_known_only_if_every_call_has_them(results: list[Result]) -> None:
    one = results[0]
    assert one.trajectory is not None
    totals = []
    for pair in ((3, None), (3, 4)):
        turns = [
            turn.model_copy(update={"cached_tokens": count})
            for turn, count in zip(one.trajectory.turns, pair, strict=True)
        ]
        trajectory = one.trajectory.model_copy(update={"turns": turns})
        totals.append(row_of(one.model_copy(update={"trajectory": trajectory}))["cached_tokens"])
    assert totals == [None, 7]


def test_csv_is_read_by_pandas_and_polars(source: Path, tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    import pandas
    import polars

    target = tmp_path / "table.csv"
    assert export(located_results(source), ExportFormat.CSV, target).rollouts == 4
    with target.open(newline="") as file:
        assert next(csv.reader(file)) == NAMES
    frame = pandas.read_csv(target)
    assert frame["reward"].mean() == pytest.approx(2.25 / 3)
    assert frame["mask_sample"].dtype == bool and frame["mask_sample"].tolist() == [False, False, True, False]
    assert frame.loc[2, "failure_message"] == rows[2]["failure_message"]
    assert polars.read_csv(target).to_dicts() == rows


def test_parquet_is_read_by_pyarrow_pandas_and_polars(
    source: Path, tmp_path: Path, rows: list[dict[str, Any]]
) -> None:
    import pandas
    import polars
    from pyarrow import parquet

    target = tmp_path / "table.parquet"
    assert export(located_results(source), ExportFormat.PARQUET, target).rollouts == 4
    table = parquet.read_table(target)
    assert table.column_names == NAMES and table.to_pylist() == rows
    assert polars.read_parquet(target).to_dicts() == rows
    frame = pandas.read_parquet(target)
    assert frame.groupby("environment")["reward"].mean().to_dict() == {"bash": 0.625, "math@solver": 1.0}


def test_a_dataset_is_loaded_by_hugging_face(
    source: Path, tmp_path: Path, results: list[Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import datasets

    target = tmp_path / "dataset"
    assert export(located_results(source), ExportFormat.HF, target).rollouts == 4
    loaded = datasets.load_dataset(str(target), cache_dir=str(tmp_path / "cache"))
    assert list(loaded) == ["train"]
    rows = loaded["train"].to_list()
    assert [{name: row[name] for name in NAMES} for row in rows] == [row_of(one) for one in results]
    assert rows[0]["tools"] == TOOLS
    for row, one in zip(rows, results, strict=True):
        messages = [
            {name: value for name, value in message.items() if value is not None}
            for message in row["messages"]
        ]
        for call in (call for message in messages for call in message.get("tool_calls", ())):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
        assert messages == one.messages


def test_row_groups_are_bounded(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pyarrow.parquet import ParquetFile

    monkeypatch.setattr("prorl_envs.exports.parquet._GROUP_CHARACTERS", 100)
    target = tmp_path / "dataset"
    export(located_results(source), ExportFormat.HF, target)
    with ParquetFile(target / "data" / "train.parquet") as file:
        assert file.num_row_groups > 1 and file.metadata.num_rows == 4
