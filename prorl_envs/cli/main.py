"""`prorl-envs`: every command, and the one place where an error becomes an exit status.

Exit status: 0 done; 1 the command ran and its outcome is bad; 2 wrong input or a missing part;
130 interrupted.
"""

import sys
from pathlib import Path
from typing import Annotated

import typer

from prorl_envs import __version__
from prorl_envs.cli.console import out, report
from prorl_envs.errors import InputError, ProrlError

cli = typer.Typer(
    name="prorl-envs",
    help="Agentic RL environments on rootless sandboxes, served as rollouts.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        out.print(f"prorl-envs {__version__}")
        raise typer.Exit


@cli.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True)] = False,
) -> None:
    pass


@cli.command()
def show(
    results: Annotated[Path, typer.Argument(help="A results.jsonl.")],
    job: Annotated[str | None, typer.Argument(help="A job id, or the end of one.")] = None,
) -> None:
    """Show one trajectory as a conversation, or list what a file holds."""
    from prorl_envs.cli.results import read_results
    from prorl_envs.cli.show import render
    from prorl_envs.cli.tables import samples_table

    stored = list(read_results(results))
    if job is None and len(stored) > 1:
        out.print(samples_table(stored))
        return
    chosen = [r for r in stored if job is None or r.job_id == job] or [
        r for r in stored if job is not None and r.job_id.endswith(job)
    ]
    if len(chosen) != 1:
        what = "no result" if not chosen else f"{len(chosen)} results"
        raise InputError(f"{what} of {results} match {job!r}", hint=f"prorl-envs show {results} lists them")
    out.print(render(chosen[0]))


def app() -> None:
    """The console script."""
    try:
        cli()
    except ProrlError as error:
        report(error)
        sys.exit(2)
