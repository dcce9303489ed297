"""`prorl-envs export`: results as tables, datasets, chat messages and trajectories for other programs."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from prorl_envs.cli.output.console import err
from prorl_envs.cli.sources import SourceArgument, is_store, open_episodes

if TYPE_CHECKING:
    from prorl_envs.rollout.api.types import Result
    from prorl_envs.runs.folder import RunDescription

#: Values of `prorl_envs.exports.formats.ExportFormat`, which is imported only when needed.
FormatName = Literal["csv", "parquet", "hf", "sft", "atif"]


def export(
    source: SourceArgument,
    to: Annotated[
        FormatName,
        typer.Option(
            help="csv or parquet: a table, one row per rollout. hf: a folder for Hugging Face's "
            "load_dataset. sft: chat messages and tools, JSONL. atif: a folder of trajectories for Harbor."
        ),
    ],
    target: Annotated[Path, typer.Option("--out", help="The file or folder to write.")],
    min_reward: Annotated[
        float | None, typer.Option(help="Leave out rollouts with a lower reward or without a reward.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier export.")] = False,
) -> None:
    """Export results: tables (CSV, Parquet), Hugging Face datasets, SFT messages, ATIF trajectories."""
    from prorl_envs.exports.formats import ExportFormat
    from prorl_envs.exports.formats import export as write

    written = write(
        _results(source),
        ExportFormat(to),
        target,
        min_reward=min_reward,
        force=force,
        run=_description(source),
    )
    left_out = "".join(f", {count} {reason} left out" for reason, count in written.left_out.items())
    noun = "rollout" if written.rollouts == 1 else "rollouts"
    err.print(f"{target}: {written.rollouts} {noun}{left_out}", soft_wrap=True)


def _results(source: str) -> "Iterator[tuple[str, Result]]":
    """Yield the results of a source, each with its location. Results of a file are read one at a time."""
    from prorl_envs.rollout.api.types import Result
    from prorl_envs.rollout.client.result_files import located_results

    if not is_store(source):
        yield from located_results(source)
        return
    with closing(open_episodes(source)) as episodes:
        episodes.extend()
        for number, summary in enumerate(episodes.summaries):
            yield summary.job_id, Result.model_validate_json(episodes.line(number))


def _description(source: str) -> "RunDescription | None":
    """Return the description of the run in a folder; None for other sources."""
    from prorl_envs.runs.folder import RUN, read_description

    folder = Path(source)
    return read_description(folder) if (folder / RUN).is_file() else None
