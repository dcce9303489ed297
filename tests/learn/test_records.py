"""Records of a run, and its report."""

import csv
import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from learn.plan import load_plan
from learn.records import Records, curve, read_records
from learn.report import Runs, save_numbers, save_steps, table
from learn.system import summary
from prorl_envs.errors import InputError
from prorl_envs.rollout.api.types import JobState, Result, StopReason

ROOT = Path(__file__).parents[2]
GOOD = """\
service: s.yaml
steps: 1
prompts: 1
samples: 2
learning_rate: 1
evaluate_every: 1
held_out_tasks: 1
micro_batch: 1"""


def look(reward: float, **levels: float) -> dict[str, Any]:
    return {"reward": reward, "by_level": {level.removeprefix("l"): value for level, value in levels.items()}}


def test_records_end_at_line_feeds_only(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text('{"note": "a\u2028b\x85c"}\n{"note": "d"}\n{"no', encoding="utf-8")
    assert [line["note"] for line in read_records(path)] == ["a\u2028b\x85c", "d"]


def test_a_resumed_run_discards_records_after_its_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "a" / "records.jsonl"
    records = Records(path)
    for step in (0, 5):
        records.add("held_out", step, look(0.1 * step))
        for later in range(step + 1, step + 6):
            records.add("train", later, {"reward": 0.0})
    records.add("held_out", 10, look(0.9))
    with path.open("a") as file:
        file.write('{"kind": "train", "st')  # the run was killed here
    assert len(read_records(path)) == 13
    Records(path, since=5)
    kept = read_records(path)
    assert [line["step"] for line in kept if line["kind"] == "train"] == [1, 2, 3, 4, 5]
    assert curve(kept) == [(0, 0.0)], "the look at 5 comes after the checkpoint of 5"
    Records(path)
    assert read_records(path) == []


def result(state: JobState, reward: float | None, stop: StopReason | None = None) -> Result:
    fields = {"job_id": "g/0", "group_id": "g", "sample": 0, "environment": "bash", "task_id": "t"}
    rest = {"mask_sample": reward is None, "failure": None}
    return Result(state=state, reward=reward, stop_reason=stop, **fields, **rest)  # type: ignore[arg-type]


def test_a_failure_is_no_reward() -> None:
    done = [result(JobState.DONE, 1.0), result(JobState.DONE, 0.0, StopReason.MALFORMED)]
    seen = summary([*done, result(JobState.FAILED, None)], [1, 2, 2])
    assert (seen["reward"], seen["scored"], seen["failed"], seen["malformed"]) == (0.5, 2, 1, 0.5)
    assert seen["by_level"] == {"1": 1.0, "2": 0.0}
    assert summary([result(JobState.FAILED, None)], [1])["reward"] is None


def test_the_table_and_the_file_have_every_evaluation(tmp_path: Path) -> None:
    train = {"kind": "train", "step": 1, "reward": 0.2, "logprob_gap": 2e-6, "stale": 0}
    runs: Runs = {
        ("trained", 1): [
            {"kind": "held_out", "step": 0, "scored": 4, **look(0.25, l1=0.5, l2=0.0)},
            train,
            {"kind": "held_out", "step": 2, "scored": 4, **look(0.75, l1=1.0, l2=0.5)},
        ],
        ("frozen", 1): [{"kind": "held_out", "step": 0, "scored": 4, **look(0.25, l1=0.5, l2=0.0)}],
    }
    console = Console(width=120, file=io.StringIO(), record=True)
    console.print(table(runs))
    shown = console.export_text()
    trained = next(line for line in shown.splitlines() if "trained" in line)
    assert " ".join(trained.replace("│", " ").split()) == "trained 1 2 0.250 0.750 1.000 0.500 2e-06 0"
    assert " all " not in shown
    look_at = {"kind": "held_out", "step": 2, "scored": 4, "stderr": 0.03}
    seeds: Runs = {("trained", n): [look_at | look(0.25 * n, l1=0.5, l2=0.25 * n)] for n in (1, 2)}
    console.print(table(seeds))
    pooled = next(line for line in console.export_text().splitlines() if " all " in line)
    assert " ".join(pooled.replace("│", " ").split()).startswith(
        "trained all 2 0.375 ± 0.021 0.375 ± 0.021 0.500 0.375"
    )
    save_steps(runs, tmp_path / "steps.csv")
    assert (tmp_path / "steps.csv").read_text() == (
        "run,seed,step,reward,logprob_gap,staleness,frac_reward_zero_std,drift,drifted\n"
        "trained,1,1,0.2,2e-06,,,,\n"
    )
    save_numbers(runs, tmp_path / "held_out.csv")
    with (tmp_path / "held_out.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["run"], row["step"], row["reward"], row["level_2"]) for row in rows] == [
        ("trained", "0", "0.250", "0.000"),
        ("trained", "2", "0.750", "0.500"),
        ("frozen", "0", "0.250", "0.000"),
    ]


@pytest.mark.parametrize("path", sorted((ROOT / "learn").glob("*.yaml")), ids=lambda path: path.name)
def test_the_included_plans_are_valid(path: Path) -> None:
    if "service" in path.name:
        from prorl_envs.catalog import Catalog
        from prorl_envs.config import load_settings

        assert len(Catalog.of(load_settings(path, {}))) == 1
    else:
        assert load_plan(path).service.exists()


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("steps: [", "cannot be read"),
        ("[]", "no mapping"),
        ("service: s.yaml\nsteps: 0", "steps"),
        (f"{GOOD}\ncolour: red", "colour"),
        (f"{GOOD}\ntrain: rows.jsonl", "held_out are named together"),
        (GOOD.replace("micro_batch: 1", "micro_batch: 3"), "does not divide"),
    ],
)
def test_a_wrong_plan_is_refused_with_its_field(tmp_path: Path, text: str, what: str) -> None:
    (tmp_path / "plan.yaml").write_text(text)
    with pytest.raises(InputError, match=what):
        load_plan(tmp_path / "plan.yaml")
    with pytest.raises(InputError, match="cannot be read"):
        load_plan(tmp_path / "nowhere.yaml")
