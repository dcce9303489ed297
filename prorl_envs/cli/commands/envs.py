"""Commands `prorl-envs envs` and `prorl-envs tasks`."""

from pathlib import Path
from typing import Annotated

import typer

from prorl_envs.cli.options import ConfigOption, DataOption, EnvironmentArgument, JsonOption, settings_of


def envs(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """List the environments of the configuration, and whether their tasks can run on this machine."""
    from prorl_envs.cli.commands.envs_report import list_environments

    list_environments(settings_of(config), as_json=as_json)


def tasks(
    environment: EnvironmentArgument,
    text: Annotated[
        str, typer.Option("--filter", help="Only tasks with this text in their id or instruction.")
    ] = "",
    runnable: Annotated[
        bool, typer.Option("--runnable", help="Only tasks that this machine can run.")
    ] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="Maximum number of tasks.")] = None,
    data: DataOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the tasks of an environment, or of a folder of task directories, and why some cannot run here.

    --json prints the rows of the tasks as JSON Lines, a data file for `--data`.
    """
    from prorl_envs.cli.commands.envs_report import list_tasks

    if data is None and "/" in environment and (folder := Path(environment)).is_dir():
        environment, data = "terminal", folder
    settings = settings_of(config)
    list_tasks(settings, environment, data, text=text, runnable=runnable, limit=limit, as_json=as_json)
