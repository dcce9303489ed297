"""`prorl-envs show`: shows one trajectory in a terminal."""

import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from prorl_envs.cli.output.console import out, plain, print_json, print_json_lines
from prorl_envs.cli.output.tables import outcome_cell, samples_table, tokens_of
from prorl_envs.cli.sources import check_lines, open_episodes
from prorl_envs.errors import InputError
from prorl_envs.rollout.api.summary import Summary, summarise
from prorl_envs.rollout.api.types import Result

STYLES = {"system": "dim", "user": "cyan", "assistant": "green", "tool": "magenta"}


def _arguments(arguments: object) -> str:
    """Format the arguments of a tool call: texts without quotes, other values as JSON."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return str(arguments)
    if not isinstance(arguments, dict):
        return json.dumps(arguments, ensure_ascii=False)
    lines = []
    for name, value in arguments.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        lines.append(f"{name}:\n{text}" if "\n" in text else f"{name}: {text}")
    return "\n".join(lines)


def _body(message: dict[str, Any]) -> Iterator[RenderableType]:
    if content := message.get("content"):
        text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
        yield plain(text)
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        name = plain(str(function.get("name")))
        yield Text.assemble(("call ", "dim"), (name.plain, "bold"))
        yield plain(_arguments(function.get("arguments")))


def message_panel(message: dict[str, Any]) -> Panel:
    """Return a panel with one message of the conversation."""
    role = str(message.get("role", "?"))
    return Panel(
        Group(*_body(message)),
        title=plain(role),
        title_align="left",
        border_style=STYLES.get(role, "white"),
    )


def summary(result: Result) -> Table:
    """Return a table with the outcome of the episode."""
    tokens, sampled = tokens_of(result)
    times = result.timings
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column()
    grid.add_row("job", plain(result.job_id))
    grid.add_row("task", plain(f"{result.environment}: {result.task_id}"))
    grid.add_row("reward", outcome_cell(summarise(result)))
    if result.stop_reason:
        grid.add_row("stopped", result.stop_reason)
    if result.failure:
        failure = result.failure
        grid.add_row("failure", plain(f"{failure.kind} in {failure.stage}: {failure.message}"))
        if result.failure.hint:
            grid.add_row("hint", plain(result.failure.hint))
    if result.trajectory:
        turns = [turn for row in result.rows for turn in row.turns]
        drift = sum(row.drift for row in result.rows)
        rows = f" and {len(result.rows)} rows" if result.forks else ""
        grid.add_row("tokens", f"{tokens}, {sampled} sampled in {len(turns)} turns{rows}, drift {drift}")
        known = [v for turn in turns for v in (turn.weight_version, *(s.version for s in turn.version_spans))]
        if versions := list(dict.fromkeys(version for version in known if version)):
            grid.add_row("weights", plain(", ".join(versions)))
    grid.add_row(
        "seconds",
        f"init {times.init_s:.2f}, run {times.run_s:.2f} "
        f"(model {times.model_s:.2f}, tools {times.tools_s:.2f}), "
        f"eval {times.eval_s:.2f}, waited {times.queued_s:.2f}",
    )
    return grid


def render(result: Result) -> Group:
    """Render an episode: summary, conversation, and evidence of the grade."""
    parts: list[RenderableType] = [summary(result), Rule(style="dim")]
    parts.extend(message_panel(message) for message in result.messages)
    if result.evidence:
        evidence = json.dumps(result.evidence, indent=2, ensure_ascii=False)
        parts.append(
            Panel(plain(evidence), title="evidence of the grade", title_align="left", border_style="blue")
        )
    return Group(*parts)


def show(source: str, job: str | None, *, as_json: bool = False) -> None:
    """Print one result; or a list, if there are several results and `job` is None.

    Args:
        source: a file of results, or a store.
        job: a job id or its end, or None.
        as_json: print JSON: the result, or one line per result.

    Raises:
        InputError: the source cannot be read, or no result or several results match.
    """
    with closing(open_episodes(source)) as episodes:
        episodes.extend()
        check_lines(episodes, source)
        if job is None and len(episodes.summaries) > 1:
            _list(episodes.summaries, as_json)
            return
        ids = list(enumerate(summary.job_id for summary in episodes.summaries))
        chosen = [number for number, job_id in ids if job is None or job_id == job] or [
            number for number, job_id in ids if job is not None and job_id.endswith(job)
        ]
        if len(chosen) != 1:
            count = f"{len(chosen)} results" if chosen else "no result"
            condition = "" if job is None else f" match {job!r}"
            raise InputError(f"{count} of {source}{condition}", hint=f"prorl-envs show {source} lists all")
        result = Result.model_validate_json(episodes.line(chosen[0]))
    if as_json:
        print_json(result, indent=None)
    else:
        out.print(render(result))


def _list(summaries: Sequence[Summary], as_json: bool) -> None:
    if as_json:
        print_json_lines(summaries)
    else:
        out.print(samples_table(summaries))
