"""`prorl-envs harness`: put the packages of harnesses into the cache, where sandboxes mount them from."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from prorl_envs.cli.console import err, out, plain
from prorl_envs.errors import InputError

if TYPE_CHECKING:
    from prorl_envs.config import Settings
    from prorl_envs.env.harness.recipe import Recipe

harness = typer.Typer(help="Install agents that others wrote.", no_args_is_help=True)

ConfigOption = Annotated[Path | None, typer.Option("--config", help="YAML file with settings.")]


@harness.command("list")
def list_harnesses(config: ConfigOption = None) -> None:
    """The harnesses that are known by name, and those of the settings."""
    from prorl_envs.config import load_settings
    from prorl_envs.env.harness.install import missing

    settings = load_settings(config, os.environ)
    table = Table("harness", "packages", "", box=None)
    for name, recipe in _recipes(settings).items():
        packages = ", ".join(recipe.install.packages) if recipe.install else "none"
        table.add_row(name, plain(packages), "" if missing(recipe, _cache(settings)) else "installed")
    out.print(table)


@harness.command("install")
def install_harnesses(
    names: Annotated[list[str], typer.Argument(help="Recipes, or agents of the settings.")],
    config: ConfigOption = None,
) -> None:
    """Install harnesses, once per machine. Their registries' own clients (pip, npm) fetch them; npm packages'
    scripts are not run."""
    from prorl_envs.cli.running import run
    from prorl_envs.config import load_settings
    from prorl_envs.env.harness.install import install

    settings = load_settings(config, os.environ)
    known = _recipes(settings)
    if unknown := [name for name in names if name not in known]:
        raise InputError(f"no harness is called {unknown[0]!r}", hint=f"known: {', '.join(known)}")

    async def all_of_them() -> None:
        for name in names:
            with err.status(f"installing {plain(name)}"):
                place = await install(known[name], _cache(settings), lambda line: err.print(plain(line)))
            err.print(f"{plain(name)}: {plain(str(place))}", soft_wrap=True)

    run(all_of_them())


def _recipes(settings: "Settings") -> dict[str, "Recipe"]:
    from prorl_envs.catalog import recipe_of
    from prorl_envs.env.harness.recipes import RECIPES

    own = {
        name: recipe_of(agent.harness, f"agents.{name}.harness")
        for name, agent in settings.agents.items()
        if agent.harness is not None
    }
    return {**RECIPES, **own}


def _cache(settings: "Settings") -> Path:
    from prorl_envs.env.node import default_cache_dir

    return settings.cache_dir or default_cache_dir()
