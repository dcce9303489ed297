"""Command `prorl-envs settings`."""

from typing import Annotated

import typer

from prorl_envs.cli.options import JsonOption


def list_settings(
    text: Annotated[str, typer.Option("--filter", help="Only settings with this text.")] = "",
    as_json: JsonOption = False,
) -> None:
    """List all settings with their defaults; --json prints the JSON schema of a settings file."""
    from prorl_envs.cli.output.console import out, print_json
    from prorl_envs.cli.output.settings_table import setting_rows, settings_schema, settings_table

    if as_json:
        print_json(settings_schema())
    else:
        out.print(settings_table(row for row in setting_rows() if text in row.name or text in row.meaning))
