"""Submit groups, follow them, show and keep what came: shared by `run` and `demo`."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from prorl_envs.cli.console import err, out, plain, program
from prorl_envs.cli.progress import follow
from prorl_envs.cli.tables import groups_table, samples_table, tasks_table
from prorl_envs.rollout.client import RolloutClient
from prorl_envs.rollout.looking import summarise
from prorl_envs.rollout.result_files import GROUPS, ready, write_results
from prorl_envs.rollout.types import GroupRequest, GroupStatistics, Result


async def carry_out(
    client: RolloutClient, requests: Sequence[GroupRequest], folder: Path, *, every_sample: bool
) -> tuple[list[Result], list[GroupStatistics]]:
    """Run groups to their end, show the tables, keep the trajectories.

    Args:
        client: of the rollout service.
        requests: the groups.
        folder: where `results.jsonl` goes, and `groups.jsonl` with what was asked for.
        every_sample: show a row per sample too.

    Returns:
        the results by group and sample, and the statistics of each group.

    Raises:
        InputError: nothing can be written to the folder; found out before anything is submitted.
    """
    path = ready(folder / "results.jsonl")
    await client.submit(requests)
    names = [request.id for request in requests]
    came, overlap = await follow(client, names, sum(request.samples for request in requests))
    results = sorted(came, key=lambda r: (names.index(r.group_id), r.sample))
    views = [await client.group(name) for name in names]
    statistics = [view.statistics for view in views if view.statistics is not None]
    write_results(path, results)
    write_results(path.with_name(GROUPS), requests)
    if every_sample:
        out.print(samples_table(map(summarise, results)))
    out.print(tasks_table(results))
    out.print(groups_table(statistics))
    err.print(f"stages: {overlap}")
    for reason in reasons(results):
        err.print(plain(reason))
    out.print(f"\ntrajectories: {path}")
    out.print(f"show one:     {program()} show {path} {results[0].job_id}", soft_wrap=True)
    return results, statistics


def reasons(results: Sequence[Result]) -> list[str]:
    """Why samples have no reward: by kind and stage, how many, and what the first of them says."""
    failures = [result.failure for result in results if result.failure]
    counts = Counter((failure.kind, failure.stage) for failure in failures)
    said = {(failure.kind, failure.stage): failure.message for failure in reversed(failures)}
    return [f"{kind} in {stage} x{counts[kind, stage]}: {said[kind, stage]}" for kind, stage in counts]
