"""Comparison of a run with its targets, and the report."""

from bench import catalogue, report
from bench.results import Row, bash_claims, cell_claims, memory_claims, ready_claims


def rows(*found: Row) -> dict[str, Row]:
    return {row.entry.key: row for row in found}


def test_ratios_compare_medians_in_the_requested_direction() -> None:
    found = rows(
        Row(catalogue.PTY, seconds=[0.05e-3] * 3),
        Row(catalogue.OURS, seconds=[0.1e-3, 0.2e-3, 9.0], rates=[7000.0, 9000.0, 8500.0]),
        Row(catalogue.SWE_REX, seconds=[0.1]),
        Row(catalogue.SWE_REX_HTTP, seconds=[0.01]),
    )
    floor, local, http, instance, tmux, rate = bash_claims(found, 32)
    assert (floor.measured, floor.met) == (4.0, True)
    assert (local.measured, local.met) == (500.0, True)
    assert (http.measured, http.met) == (50.0, False)
    assert (rate.measured, rate.met) == (8500.0, True)
    for claim in (instance, tmux):
        assert claim.met is None
        assert claim.reason.endswith("not run")


def test_failures_are_reported_and_count_as_not_measured() -> None:
    found = rows(
        Row(catalogue.BWRAP, ready=[0.005]),
        Row(catalogue.OURS, ready=[0.02]),
        Row(catalogue.POOL, failed="not built"),
    )
    bare, pool, sif = ready_claims(found)
    assert (bare.measured, bare.met) == (4.0, False)
    assert (pool.met, pool.reason) == (None, f"{catalogue.POOL.label}: not built")
    assert sif.met is None
    text = report.figure_2(found, [bare, pool, sif])
    assert "| sandbox ready, times bare bubblewrap | at most 3 | 4 | **no** |" in text
    assert f"| {catalogue.POOL.label} | - | - | - | all namespaces | failed: not built |" in text


def test_wrong_answers_and_leaked_processes_are_reported() -> None:
    found = rows(Row(catalogue.OH_PTY, seconds=[0.02] * 4, answers=9, wrong=3, left=["tmux", "tmux"]))
    text = report.figure_1(found, bash_claims(found, 32), 32)
    assert "n=4; **3 of 9 answers wrong**; left behind: tmux" in text


def test_memory_and_cells_are_reported() -> None:
    memory = rows(
        Row(catalogue.OURS, memory={"pss": 2.5e6, "live": 999}),
        Row(catalogue.IPYTHON, memory={"pss": 11e6}),
    )
    assert [claim.met for claim in memory_claims(memory, 1000)] == [True, False, False]
    cells = rows(
        Row(catalogue.IPYTHON, seconds=[0.001], ready=[0.07]),
        Row(catalogue.KERNEL, seconds=[0.02]),
        Row(catalogue.KERNEL_IPC, seconds=[0.009]),
    )
    faster, ready = cell_claims(cells)
    assert faster.measured is not None and round(faster.measured, 6) == 9
    assert (faster.met, ready.met) == (False, True)
