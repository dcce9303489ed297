"""Execution of groups for `run` and `demo`: submits them, stores results as they arrive, prints reports."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Sequence
from shlex import quote

from prorl_envs.cli.output.console import err, out, plain, program
from prorl_envs.cli.output.progress import Progress
from prorl_envs.cli.output.tables import samples_table, statistics_table, tasks_table, tokens_of
from prorl_envs.loggers.base import LoggedRun, RunLogger
from prorl_envs.loggers.reporting import RunReport
from prorl_envs.rollout.api.types import Failure
from prorl_envs.rollout.client.client import RolloutClient
from prorl_envs.runs.folder import RunFolder, Submission
from prorl_envs.runs.statistics import RunSummary, by_environment, statistics_of

#: Maximum printed rows of a table.
MAX_ROWS = 24


async def run_groups(
    client: RolloutClient,
    folder: RunFolder,
    submitted: Sequence[Submission],
    *,
    tables: bool,
    loggers: Sequence[tuple[str, RunLogger]] = (),
) -> None:
    """Run groups to completion. Write each result to the folder when it arrives; then print and save the
    statistics of the run.

    Args:
        client: client of the rollout service.
        folder: folder of the run.
        submitted: groups to submit; empty if the run is complete.
        tables: print the tables of samples and tasks, not only the summary.
        loggers: loggers with their names; the run continues if one fails.

    Raises:
        InputError: a result cannot be written.
    """
    expected = sum(group.samples for group in folder.groups)
    progress = Progress(expected, done=len(folder.summaries))
    by_id = {submission.request.id: submission for submission in submitted}
    failures: defaultdict[tuple[str, str], list[Failure]] = defaultdict(list)
    started, sampled = time.monotonic(), 0
    report = RunReport(loggers, lambda text: err.print(plain(f"warning: {text}")))
    try:
        if loggers:
            report.start(_logged_run(folder, expected))
        if submitted:
            await client.submit([submission.request for submission in submitted])
            async with progress.following(client):
                async for arrived in client.follow(by_id):
                    result = by_id[arrived.group_id].relabelled(arrived)
                    if not folder.append(result):
                        continue
                    progress.add(result)
                    report.add(folder.summaries[result.group_id, result.sample], folder.summaries.values())
                    sampled += tokens_of(result)[1]
                    if (failure := result.failure) is not None:
                        failures[failure.kind.value, failure.stage.value].append(failure)
    except BaseException:
        _report_interruption(folder, expected)
        await asyncio.to_thread(report.finish, None, folder.summaries.values())
        raise
    wall_s = time.monotonic() - started
    summary = RunSummary(
        environment=folder.description.environment,
        model=folder.description.model,
        started=folder.description.started,
        expected=expected,
        wall_s=wall_s,
        sampled_tokens_per_s=sampled / wall_s if submitted else 0.0,
        overall=statistics_of(folder.summaries.values()),
        environments=by_environment(folder.summaries.values()),
    )
    folder.save_summary(summary)
    await asyncio.to_thread(report.finish, summary, folder.summaries.values())
    _print(folder, summary, tables=tables)
    for (kind, stage), found in failures.items():
        hint = f" (hint: {found[0].hint})" if found[0].hint else ""
        err.print(plain(f"{kind} in {stage} x{len(found)}: {found[0].message}{hint}"))
    _print_next_steps(folder)


def _logged_run(folder: RunFolder, expected: int) -> LoggedRun:
    first = folder.groups[0]
    return LoggedRun(
        name=folder.description.name,
        environment=folder.description.environment,
        model=folder.description.model,
        started=folder.description.started,
        version=folder.description.version,
        folder=folder.path,
        samples=expected,
        sampling=first.sampling.model_dump(),
        limits=first.limits.model_dump(),
    )


def _report_interruption(folder: RunFolder, expected: int) -> None:
    stored = len(folder.summaries)
    err.print(f"\n{stored} of {expected} results are in {folder.path}", soft_wrap=True)
    if stored < expected:
        path = quote(str(folder.path))
        err.print(f"continue with the same command and: --resume --out {path}", soft_wrap=True)


def _print(folder: RunFolder, summary: RunSummary, *, tables: bool) -> None:
    ordered = sorted(folder.summaries.values(), key=lambda s: (s.environment, s.group_id, s.sample))
    if tables:
        out.print(samples_table(ordered[:MAX_ROWS]))
        if len(ordered) > MAX_ROWS:
            out.print(
                f"and {len(ordered) - MAX_ROWS} more samples: {program()} show {quote(str(folder.path))}\n"
            )
        out.print(tasks_table(ordered, MAX_ROWS))
    out.print(statistics_table(summary))


def _print_next_steps(folder: RunFolder) -> None:
    out.print(f"\nresults:      {folder.results_path}", soft_wrap=True)
    if folder.summaries:
        first, path = next(iter(folder.summaries.values())), quote(str(folder.path))
        out.print(f"show one:     {program()} show {path} {quote(first.job_id)}", soft_wrap=True)
        out.print(f"browse:       {program()} view {path}", soft_wrap=True)
