"""`prorl-envs check-llm`: compatibility check of a model server, with each point tried on it."""

from typing import Annotated

import typer

from prorl_envs.cli.options import ConfigOption, JsonOption, settings_of


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
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Test a model server: ids in and out, log-probabilities, stops, versions, pauses."""
    from prorl_envs.app.run_loop import run
    from prorl_envs.cli.commands.check_llm_report import checked
    from prorl_envs.model.tokens.loading import load_renderer

    ca_file = settings_of(config).model.ca_file
    renderer = load_renderer(tokenizer) if tokenizer else None
    checking = checked(url, renderer, model, ca_file=ca_file, pause=pause, timeout_s=timeout, as_json=as_json)
    if not run(checking):
        raise typer.Exit(1)
