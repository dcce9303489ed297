"""`prorl-envs audit` and its quick part, `validate`: do a data file's rewards tell right from wrong?"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from prorl_envs.app.compose import node
from prorl_envs.catalog import Catalog
from prorl_envs.cli.commands.replay import Tasks, stored
from prorl_envs.cli.options import catalog_without_harness
from prorl_envs.cli.output.console import err, out, plain, print_by_reason, print_json
from prorl_envs.config import Settings
from prorl_envs.env.audit.audit import PROBES, TaskAudit, audit
from prorl_envs.env.audit.contents import hidden_texts
from prorl_envs.env.audit.findings import MEANING, FindingKind, Severity
from prorl_envs.env.audit.record import AUDIT, AuditRecord
from prorl_envs.env.audit.transcripts import suspicions
from prorl_envs.errors import InputError

#: Above this number of tasks, the table lists only those with findings.
_LISTED = 50
_STYLES = {Severity.ERROR: "red", Severity.WARNING: "yellow", Severity.NOTE: "dim"}


async def audit_file(
    settings: Settings,
    environment: str,
    data: Path | None,
    jobs: int,
    *,
    quick: bool = False,
    task_ids: Sequence[str] = (),
    probes: Sequence[str] = (),
    against: Path | None = None,
    record: Path | None = None,
    allow_missing: bool = False,
    as_json: bool = False,
) -> bool:
    """Audit the tasks of a data file that this machine can run; print why it cannot run others.

    Args:
        settings: all settings.
        environment: name of the environment.
        data: the data file; None means the environment's examples.
        jobs: maximum episodes at a time.
        quick: play only the untouched workspaces and the references.
        task_ids: ids of the only tasks to audit; all by default.
        probes: names of the only probes; all by default.
        against: data file of a second set that the first must not repeat.
        record: file of results, to which each is added; tasks that it has are not played again.
        allow_missing: whether to succeed even if some tasks cannot run on this machine.
        as_json: print JSON instead of tables.

    Returns:
        True if every task can run here and no finding is an error.

    Raises:
        InputError: no such environment, task or probe, a row is wrong, or no task can run here.
    """
    if unknown := set(probes) - set(PROBES):
        raise InputError(f"there is no probe {min(unknown)!r}", hint=f"the probes are: {', '.join(PROBES)}")
    if probes and record is not None:
        raise InputError("a record holds whole audits", hint="leave out --record or --probe")
    catalog = catalog_without_harness(settings, environment)
    family = catalog.family(environment)
    tasks, left_out = [], list[tuple[str, str]]()
    for task in catalog.tasks(environment, data):
        if task_ids and task.id not in task_ids:
            continue
        if reason := family.obstacle(task, settings.driver):
            left_out.append((task.id, reason))
        else:
            tasks.append(task)
    if unknown := set(task_ids) - {task.id for task in tasks} - {task_id for task_id, _ in left_out}:
        raise InputError(f"the data file has no task {min(unknown)!r}")
    print_by_reason("left out", left_out, style="yellow")
    if not tasks:
        raise InputError(f"there is no {environment} task that this machine can run")
    recorded = None if record is None else AuditRecord(record, settings.images.bases, is_new=True)
    done = {} if recorded is None else recorded.results(family, tasks)
    by_id = {task.id: task for task in tasks}
    others = [] if against is None else catalog.tasks(environment, against)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    async with node(settings) as opened:
        with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
            row = bar.add_task(f"auditing {environment}", total=len(tasks), completed=len(done))

            def on_result(result: TaskAudit) -> None:
                bar.advance(row)
                if recorded is not None:
                    recorded.add(family, by_id[result.task_id], result)

            results = await audit(
                family,
                opened,
                tasks,
                quick=quick,
                only=probes,
                against=others,
                concurrency=jobs,
                done=done,
                progress=on_result,
            )
    if recorded is not None:  # the findings that depend on other tasks
        for task, result in zip(tasks, results, strict=True):
            recorded.add(family, task, result)
    if as_json:
        print_json([_as_json(result) for result in results])
    else:
        _print(results)
        print_by_reason("left out", [(r.task_id, r.skipped) for r in results if r.skipped], style="yellow")
    return all(result.ok for result in results) and (allow_missing or not left_out)


def _as_json(result: TaskAudit) -> dict[str, object]:
    findings = [{**asdict(found), "severity": found.severity} for found in result.findings]
    return {**asdict(result), "findings": findings, "ok": result.ok}


def _print(results: Sequence[TaskAudit]) -> None:
    listed = [result for result in results if result.findings] if len(results) > _LISTED else results
    if listed:
        out.print(_table(listed))
    kinds = Counter(kind for result in results for kind in {found.kind for found in result.findings})
    if len(results) > 1 and kinds:
        out.print(_kinds_table(kinds))
    for severity, style in _STYLES.items():
        texts = [(r.task_id, f.text) for r in results for f in r.findings if f.severity is severity]
        print_by_reason(severity, texts, style=style, console=out)
    ok = sum(result.ok for result in results)
    out.print(f"{ok} of {len(results)} tasks pass ({AUDIT})", style="green" if ok else "red")


def _table(results: Sequence[TaskAudit]) -> Table:
    """Return a table with one row per task."""
    table = Table(title="tasks", title_justify="left")
    table.add_column("task", overflow="fold")
    for name in ("reference", "untouched", "seconds"):
        table.add_column(name, justify="right")
    table.add_column("verdict", overflow="fold")
    for result in results:
        worst = next((s for s in Severity if any(f.severity is s for f in result.findings)), None)
        kinds = " ".join(dict.fromkeys(found.kind for found in result.findings))
        verdict = "left out" if result.skipped else kinds or "ok"
        style = "yellow" if result.skipped else "green" if worst is None else _STYLES[worst]
        table.add_row(
            result.task_id,
            " ".join(f"{reward:g}" for reward in result.reference) or "-",
            "-" if result.untouched is None else f"{result.untouched:g}",
            f"{result.seconds:.2f}",
            Text(verdict, style=style),
        )
    return table


def _kinds_table(kinds: Counter[FindingKind]) -> Table:
    table = Table(title="findings", title_justify="left")
    for name in ("kind", "severity"):
        table.add_column(name)
    table.add_column("tasks", justify="right")
    table.add_column("meaning", overflow="fold")
    for kind, (severity, meaning) in MEANING.items():
        if kinds[kind]:
            table.add_row(kind, Text(severity, style=_STYLES[severity]), f"{kinds[kind]:,}", meaning)
    return table


async def audit_run(settings: Settings, source: str, data: Path | None, *, as_json: bool = False) -> bool:
    """Look for suspicious steps of the rewarded episodes of a run, and print them.

    Args:
        settings: all settings.
        source: folder of a run, file of results, or store of a service.
        data: task rows; None means those of the stored requests, or else the examples.
        as_json: print JSON instead of a table.

    Returns:
        True if nothing is suspicious.

    Raises:
        InputError: the source cannot be read.
    """
    catalog = Catalog.of(settings)
    found = await stored(source)
    tasks = Tasks(catalog, found.rows, data)
    rewarded = [result for result in found.results if result.reward]
    lines, unknown = list[dict[str, Any]](), dict[str, str]()
    for result in rewarded:
        hidden, calls = list[str](), 0
        try:
            task = tasks.of(result)
            hidden, calls = hidden_texts(catalog.family(result.environment), task), len(task.reference)
        except InputError as error:
            unknown[result.task_id] = f"its solution is not searched for: {error.message} ({error.hint})"
        steps = suspicions(result.messages, hidden, calls)
        lines += ({"job_id": result.job_id, "reward": result.reward, **asdict(step)} for step in steps)
    print_by_reason("unknown task", unknown.items(), style="yellow")
    if as_json:
        print_json(lines)
        return not lines
    table = Table(title="suspicious steps of rewarded episodes", title_justify="left")
    for name in ("job", "kind", "message", "step"):
        table.add_column(name, overflow="fold", justify="right" if name == "message" else "left")
    for line in lines:
        table.add_row(line["job_id"], line["kind"], str(line["message"]), plain(line["text"][:200]))
    if lines:
        out.print(table)
    jobs = len({line["job_id"] for line in lines})
    out.print(f"{jobs} of {len(rewarded)} rewarded episodes have suspicious steps")
    return not lines
