"""`prorl-envs harness`: installation of harness packages in the cache, from which sandboxes mount them."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from prorl_envs.cli.options import ConfigOption, JsonOption
from prorl_envs.cli.output.console import err, out, plain, print_json
from prorl_envs.errors import InputError

if TYPE_CHECKING:
    from prorl_envs.config import Settings
    from prorl_envs.env.harness.recipe import Recipe

harness = typer.Typer(help="Install agents that others wrote.", no_args_is_help=True)


@harness.command("list")
def list_harnesses(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """List the built-in harnesses, and those of the settings."""
    from prorl_envs.config import load_settings
    from prorl_envs.env.harness.install import missing

    settings = load_settings(config, os.environ)
    found: list[dict[str, Any]] = [
        {
            "name": name,
            "packages": list(recipe.install.packages) if recipe.install else [],
            "installed": not missing(recipe, _cache(settings)),
        }
        for name, recipe in _recipes(settings).items()
    ]
    if as_json:
        print_json(found)
        return
    table = Table("harness", "packages", "", box=None)
    for one in found:
        packages = plain(", ".join(one["packages"]) or "none")
        table.add_row(plain(one["name"]), packages, "installed" if one["installed"] else "")
    out.print(table)


@harness.command("install")
def install_harnesses(
    names: Annotated[list[str], typer.Argument(help="Recipes, or agents of the settings.")],
    config: ConfigOption = None,
) -> None:
    """Install harnesses, once per machine. Their registries' own clients (pip, npm) fetch them; npm packages'
    scripts are not run. Run it again to resume: downloads are kept until the installation is complete."""
    from prorl_envs.app.run_loop import run
    from prorl_envs.config import load_settings
    from prorl_envs.env.harness.install import install

    settings = load_settings(config, os.environ)
    known = _recipes(settings)
    if unknown := [name for name in names if name not in known]:
        raise InputError(f"no harness is called {unknown[0]!r}", hint=f"known: {', '.join(known)}")

    async def one(name: str) -> Path:
        with err.status(f"installing {plain(name)}") as status:

            def show(line: str) -> None:
                status.update(plain(f"installing {name}: {line.strip()[: err.width // 2]}"))

            return await install(known[name], _cache(settings), lambda line: err.print(plain(line)), show)

    async def all_of_them() -> None:
        for name in names:
            err.print(f"{plain(name)}: {plain(str(await one(name)))}", soft_wrap=True)

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
