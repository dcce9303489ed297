"""Tables of results keep every column at every width of a terminal from 80 columns up."""

import io

import pytest
from rich.console import Console
from rich.table import Table

from prorl_envs.cli.output import tables
from prorl_envs.cli.output.fitted_table import FittedTable
from prorl_envs.rollout.api.summary import Summary
from prorl_envs.runs.statistics import RunSummary, by_environment, statistics_of

LONG_NAME = "an-environment-with-a-long-name@and-an-agent"


def summaries() -> list[Summary]:
    found = []
    for environment in (LONG_NAME, "bash"):
        for sample in range(16):
            failure = {13: "environment", 14: "timeout", 15: "timeout"}.get(sample)
            found.append(
                Summary(
                    job_id=f"{environment}/some-task/{sample}",
                    group_id=f"{environment}/some-task",
                    sample=sample,
                    environment=environment,
                    task_id="a-task-with-a-long-name__whose-middle-is-of-no-interest-12345",
                    state="failed" if failure else "done",
                    reward=None if failure else -0.625,
                    failure=failure,
                    failed_in="run" if failure else None,
                    stop_reason="max_turns",
                    turns=128,
                    rows=1,
                    tokens=123_456_789,
                    sampled=12_345_678,
                    drift=12_345,
                    init_s=12.5,
                    run_s=1234.5,
                    eval_s=123.5,
                )
            )
    return found


def summary_table() -> FittedTable:
    found = summaries()
    summary = RunSummary(
        environment=LONG_NAME,
        model="m",
        started="",
        expected=32,
        wall_s=1.0,
        sampled_tokens_per_s=2.0,
        overall=statistics_of(found),
        environments=by_environment(found),
    )
    return tables.statistics_table(summary)


def printed(table: FittedTable, width: int) -> list[str]:
    file = io.StringIO()
    Console(file=file, width=width).print(table)
    return file.getvalue().splitlines()


PASSES = ["pass@1", "pass@2", "pass@4", "pass@8", "pass@13"]
FAILURES = ["1 environment", "2 timeout"]
SECONDS = ["128", "123456789", "12.5/1234.5/123.5", "12345"]


@pytest.mark.parametrize("width", [*range(80, 130, 7), 300])
@pytest.mark.parametrize(
    ("table", "expected"),
    [
        (
            summary_table(),
            [
                *(
                    "environment",
                    "tasks",
                    "results",
                    "reward",
                    *PASSES,
                    "turns",
                    "tokens",
                    "sampled",
                    "failures",
                ),
                *("-0.625", "128.0", "1975308624", "3950617248", "197530848", "395061696", *FAILURES),
            ],
        ),
        (
            tables.samples_table(summaries()),
            ["job", "reward", "ended", "turns", "tokens", "sampled", "init/run/eval s", "drift", *SECONDS],
        ),
        (
            tables.tasks_table(summaries(), 24),
            [*("task", "rewards", "turns", "tokens", "init/run/eval s", "drift", "failures"), *FAILURES],
        ),
    ],
    ids=["summary", "samples", "tasks"],
)
def test_every_column_is_readable(table: FittedTable, expected: list[str], width: int) -> None:
    lines = printed(table, width)
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert [one for one in expected if one not in text] == []


def test_columns_that_do_not_fit_continue_below() -> None:
    table = Table("name", title="t", caption="the end", box=None)
    for name in ("one", "two", "three"):
        table.add_column(name, no_wrap=True)
    table.add_row("a", "1" * 30, "2" * 30, "3" * 30)
    lines = [line.rstrip() for line in printed(FittedTable(table), 70)]
    heads = [line.split() for line in lines if "name" in line]
    assert heads == [["name", "one", "two"], ["name", "three"]]
    assert lines[0].strip() == "t" and lines[-1].strip() == "the end"
    assert [line.split()[0] for line in lines if "111" in line or "333" in line] == ["a", "a"]


def test_a_wide_terminal_gets_one_table() -> None:
    assert sum("environment  " in line and "failures" in line for line in printed(summary_table(), 200)) == 1
