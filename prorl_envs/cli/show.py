"""`prorl-envs show`: one trajectory, readable in a terminal."""

import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from prorl_envs.cli.console import out, plain
from prorl_envs.cli.sources import open_episodes
from prorl_envs.cli.tables import reward_cell, samples_table, tokens_of
from prorl_envs.errors import InputError
from prorl_envs.rollout.types import Result
from prorl_envs.viewer.summary import Summary

_WRITERS = "this command reads the results.jsonl that `run` and `demo` write, or the store of a service"

STYLES = {"system": "dim", "user": "cyan", "assistant": "green", "tool": "magenta"}


def _arguments(arguments: object) -> str:
    """Arguments of a tool call as one would type them: text stays text, the rest is JSON."""
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
    """One message of the conversation."""
    role = str(message.get("role", "?"))
    return Panel(
        Group(*_body(message)),
        title=plain(role),
        title_align="left",
        border_style=STYLES.get(role, "white"),
    )


def summary(result: Result) -> Table:
    """What the episode came to, above its conversation."""
    tokens, sampled = tokens_of(result)
    times = result.timings
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column()
    grid.add_row("job", plain(result.job_id))
    grid.add_row("task", plain(f"{result.environment}: {result.task_id}"))
    grid.add_row("reward", reward_cell(result))
    if result.stop_reason:
        grid.add_row("stopped", result.stop_reason)
    if result.failure:
        failure = result.failure
        grid.add_row("failure", plain(f"{failure.kind} in {failure.stage}: {failure.message}"))
        if result.failure.hint:
            grid.add_row("hint", plain(result.failure.hint))
    if result.trajectory:
        spans, drift = sum(len(row.turns) for row in result.rows), sum(row.drift for row in result.rows)
        rows = f" and {len(result.rows)} rows" if result.forks else ""
        grid.add_row("tokens", f"{tokens}, {sampled} sampled in {spans} turns{rows}, drift {drift}")
    grid.add_row(
        "seconds",
        f"init {times.init_s:.2f}, run {times.run_s:.2f} "
        f"(model {times.model_s:.2f}, tools {times.tools_s:.2f}), "
        f"eval {times.eval_s:.2f}, waited {times.queued_s:.2f}",
    )
    return grid


def render(result: Result) -> Group:
    """The whole episode: summary, conversation, evidence of the grade."""
    parts: list[RenderableType] = [summary(result), Rule(style="dim")]
    parts.extend(message_panel(message) for message in result.messages)
    if result.evidence:
        evidence = json.dumps(result.evidence, indent=2, ensure_ascii=False)
        parts.append(
            Panel(plain(evidence), title="evidence of the grade", title_align="left", border_style="blue")
        )
    return Group(*parts)


def show(source: str, job: str | None, *, as_json: bool = False) -> None:
    """Print one result, or where there are several and none is named, a list.

    Args:
        source: a file of results, or a store.
        job: a job id, or the end of one.
        as_json: for machines.

    Raises:
        InputError: it cannot be read, or not one result fits.
    """
    with closing(open_episodes(source)) as episodes:
        episodes.extend()
        if episodes.bad:
            line, problem = episodes.bad[0]
            raise InputError(f"{episodes.name}:{line}: {problem}", hint=_WRITERS)
        if job is None and len(episodes.summaries) > 1:
            _list(episodes.summaries, as_json)
            return
        named = list(enumerate(episodes.summaries))
        chosen = [number for number, one in named if job is None or one.job_id == job] or [
            number for number, one in named if job is not None and one.job_id.endswith(job)
        ]
        if len(chosen) != 1:
            what = "no result" if not chosen else f"{len(chosen)} results"
            of = "" if job is None else f" match {job!r}"
            raise InputError(f"{what} of {source}{of}", hint=f"prorl-envs show {source} lists them")
        result = Result.model_validate_json(episodes.line(chosen[0]))
    if as_json:
        out.print(result.model_dump_json(), soft_wrap=True, markup=False, highlight=False)
    else:
        out.print(render(result))


def _list(summaries: Sequence[Summary], as_json: bool) -> None:
    if as_json:
        lines = (msgspec.json.encode(one).decode() for one in summaries)
        out.print("\n".join(lines), soft_wrap=True, markup=False, highlight=False)
    else:
        out.print(samples_table(summaries))
