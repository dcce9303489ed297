"""Options that several commands share."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from prorl_envs.catalog import Catalog
    from prorl_envs.config import Settings


def _complete_environment(context: typer.Context, incomplete: str) -> list[str]:
    """Return the names of environments in the configuration that complete a shell input."""
    from prorl_envs.catalog import Catalog
    from prorl_envs.errors import ProrlError

    config = context.params.get("config")
    try:
        offered = Catalog.of(settings_of(Path(config) if config else None))
        return [name for name in offered if name.startswith(incomplete)]
    except ProrlError:  # the command itself reports it
        return []


_ENVIRONMENT = typer.Argument(
    metavar="ENVIRONMENT",
    help="bash, code, ipython, math, stem, swebench, terminal, or another that `prorl-envs envs` lists; "
    "NAME@AGENT selects an agent.",
    autocompletion=_complete_environment,
)
EnvironmentArgument = Annotated[str, _ENVIRONMENT]
OptionalEnvironmentArgument = Annotated[str | None, _ENVIRONMENT]
DataOption = Annotated[
    Path | None, typer.Option(help="JSONL or Parquet of task rows; by default the environment's examples.")
]
RowsArgument = Annotated[
    Path | None, typer.Argument(help="JSONL or Parquet of task rows; by default the family's examples.")
]
EpisodesOption = Annotated[int, typer.Option("--jobs", min=1, help="Episodes at a time.")]
LlmOption = Annotated[
    list[str] | None,
    typer.Option(
        "--llm",
        help="Base URL of a model server (vLLM, SGLang, llama.cpp), such as http://host:8000/v1. Repeatable.",
    ),
]
TokenizerOption = Annotated[
    str | None,
    typer.Option(help="Folder or Hub name of the model's tokenizer; by default the served model's name."),
]
ModelOption = Annotated[str | None, typer.Option("--model", help="Model name, as the server knows it.")]
ConfigOption = Annotated[Path | None, typer.Option("--config", help="YAML file with settings.")]
#: Every command with this option has the same help; `tests/cli/test_json.py` checks that.
AllowMissingOption = Annotated[
    bool, typer.Option("--allow-missing", help="Succeed even if some tasks cannot run on this machine.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, to standard output.")]
OutOption = Annotated[
    Path | None,
    typer.Option(
        "--out", help="Folder for the results.  [default: runs/TIME-ENVIRONMENT, linked as runs/latest]"
    ),
]


def settings_of(config: Path | None) -> "Settings":
    """Load the settings of a file and of the environment variables."""
    from prorl_envs.config import load_settings

    return load_settings(config, os.environ)


def catalog_without_harness(settings: "Settings", environment: str) -> "Catalog":
    """Return a catalog with only one environment, without its harness; print a note if it has one."""
    from prorl_envs.catalog import Catalog
    from prorl_envs.cli.output.console import err
    from prorl_envs.env.harness.family import harness_of

    catalog = Catalog.of(settings)
    if (harness := harness_of(catalog.family(environment))) is not None:
        err.print(f"{environment}: runs without the harness {harness.name}, with the environment's own tools")
    return catalog.without_harness(environment)


def succeed(work: "Coroutine[Any, Any, bool]") -> None:
    """Run the work of a command; exit with status 1 if it returns False."""
    from prorl_envs.cli.run_loop import run

    if not run(work):
        raise typer.Exit(1)


def api_key() -> str | None:
    """Return the bearer token of model servers."""
    return os.environ.get("OPENAI_API_KEY") or None
