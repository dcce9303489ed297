"""`prorl-envs harness`: installation of harness packages in the cache, which sandboxes mount."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from prorl_envs.cli.options import ConfigOption, JsonOption, settings_of
from prorl_envs.cli.output.console import err, out, plain, print_json
from prorl_envs.errors import InputError

if TYPE_CHECKING:
    from prorl_envs.config import Settings
    from prorl_envs.env.harness.recipe import Recipe

harness = typer.Typer(help="Install external agent programs (harnesses).", no_args_is_help=True)


@harness.command("list")
def list_harnesses(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """List the built-in harnesses, and the harnesses of the settings."""
    from prorl_envs.env.harness.install import missing

    settings = settings_of(config)
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
    for item in found:
        packages = plain(", ".join(item["packages"]) or "none")
        table.add_row(plain(item["name"]), packages, "installed" if item["installed"] else "")
    out.print(table)


@harness.command("install")
def install_harnesses(
    names: Annotated[list[str], typer.Argument(help="Recipes, or agents of the settings.")],
    config: ConfigOption = None,
) -> None:
    """Install harnesses, once per machine. Scripts of npm packages are not run. Run it again to
    resume: downloads are kept until the installation is complete."""
    from prorl_envs.cli.run_loop import run
    from prorl_envs.env.harness.install import install

    settings = settings_of(config)
    recipes = _recipes(settings)
    if unknown := [name for name in names if name not in recipes]:
        raise InputError(f"no harness is called {unknown[0]!r}", hint=f"known: {', '.join(recipes)}")

    async def install_harness(name: str) -> Path:
        with err.status(f"installing {plain(name)}") as status:

            def show(line: str) -> None:
                status.update(plain(f"installing {name}: {line.strip()[: err.width // 2]}"))

            return await install(recipes[name], _cache(settings), lambda line: err.print(plain(line)), show)

    async def install_all() -> None:
        for name in names:
            err.print(f"{plain(name)}: {plain(str(await install_harness(name)))}", soft_wrap=True)

    run(install_all())


def _recipes(settings: "Settings") -> dict[str, "Recipe"]:
    from prorl_envs.catalog import recipe_of
    from prorl_envs.env.harness.recipes import RECIPES

    configured = {
        name: recipe_of(agent.harness, f"agents.{name}.harness")
        for name, agent in settings.agents.items()
        if agent.harness is not None
    }
    return {**RECIPES, **configured}


def _cache(settings: "Settings") -> Path:
    from prorl_envs.env.node import default_cache_dir

    return settings.cache_dir or default_cache_dir()
