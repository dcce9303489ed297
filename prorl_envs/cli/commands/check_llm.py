"""`prorl-envs check-llm`: tests of a model server's compatibility."""

from typing import Annotated

import typer

from prorl_envs.cli.options import ConfigOption, JsonOption, settings_of, succeed


def check_llm(
    url: Annotated[str, typer.Argument(help="Base URL; it may name its protocol: sglang+http://host:30000.")],
    tokenizer: Annotated[
        str | None,
        typer.Option(help="Folder or Hub name of the model's tokenizer, to use the model's own prompts."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model name; by default the first listed model.")] = None,
    pause: Annotated[
        bool, typer.Option(help="Also test pause and resume; other users of the server wait meanwhile.")
    ] = False,
    timeout: Annotated[float, typer.Option(help="Timeout of an answer, in seconds.")] = 120.0,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Test a model server: ids in and out, log-probabilities, stops, versions, pauses."""
    from prorl_envs.cli.commands.check_llm_report import checked
    from prorl_envs.model.tokens.loading import load_renderer

    ca_file = settings_of(config).model.ca_file
    renderer = load_renderer(tokenizer) if tokenizer else None
    succeed(checked(url, renderer, model, ca_file=ca_file, pause=pause, timeout_s=timeout, as_json=as_json))
