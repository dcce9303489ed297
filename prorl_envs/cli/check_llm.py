"""`prorl-envs check-llm`: what a model server can do for rollouts, each point tried on it."""

from pathlib import Path
from typing import Annotated

import typer


def check_llm(
    url: Annotated[str, typer.Argument(help="Base URL; it may name its protocol: sglang+http://host:30000.")],
    tokenizer: Annotated[
        str | None,
        typer.Option(help="Folder or Hub name of the model's tokenizer: prompts are then its own."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model name; by default the first it names.")] = None,
    pause: Annotated[
        bool, typer.Option(help="Pause and resume it, too: other users wait meanwhile.")
    ] = False,
    timeout: Annotated[float, typer.Option(help="Seconds one answer may take.")] = 120.0,
    report: Annotated[Path | None, typer.Option("--json", help="File for the findings as JSON.")] = None,
) -> None:
    """Try a model server: ids in and out, log-probabilities, stops, versions, pauses."""
    from prorl_envs.cli.checking import checked
    from prorl_envs.cli.running import run
    from prorl_envs.policy.loading import load_renderer

    renderer = load_renderer(tokenizer) if tokenizer else None
    if not run(checked(url, renderer, model, pause=pause, timeout_s=timeout, report=report)):
        raise typer.Exit(1)
