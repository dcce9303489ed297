"""`prorl-envs nemo`: creation of the files that NeMo Gym needs before it starts."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from prorl_envs.cli.options import ConfigOption
from prorl_envs.cli.output.console import err, out
from prorl_envs.errors import InputError

nemo = typer.Typer(help="Create the files that NeMo Gym needs for the environments.", no_args_is_help=True)

Family = Annotated[
    str,
    typer.Argument(help="bash, code, ipython, math, stem, swebench, terminal, or another registered family."),
]


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}", hint="choose another path") from error


@nemo.command()
def rows(
    environment: Family,
    source: Annotated[Path, typer.Argument(help="Task rows, JSONL.")],
    target: Annotated[Path, typer.Argument(help="File for the NeMo Gym rows.")],
    config: ConfigOption = None,
) -> None:
    """Convert a family's data file to NeMo Gym's row format."""
    from prorl_envs.nemo.rows import write_rows

    with _writing(target):
        err.print(f"{write_rows(environment, source, target, config)} rows in {target}")


@nemo.command()
def examples(
    environment: Family,
    folder: Annotated[Path, typer.Argument(help="The resources server's folder, with app.py.")],
    rollouts: Annotated[
        Path | None, typer.Option(help="Output of gym eval run for the folder's data/example.jsonl.")
    ] = None,
) -> None:
    """Write the example files that NeMo Gym requires of a resources server."""
    from prorl_envs.nemo.examples import write_examples

    with _writing(folder):
        write_examples(environment, folder, rollouts)
    err.print(f"the examples of {environment} are in {folder}")


@nemo.command("gym-root")
def gym_root(
    path: Annotated[Path, typer.Argument(help="Folder to create; run gym in it.")],
    venv: Annotated[
        Path | None, typer.Option(help="Virtual environment with NeMo Gym; default: that of this program.")
    ] = None,
) -> None:
    """Create a folder in which gym runs the environments in one virtual environment; print gym's flags."""
    from prorl_envs.nemo.root import gym_root

    with _writing(path):
        root = gym_root(path, venv=venv)
    err.print(f"run gym in {root.path}, with:")
    out.print(*root.flags, soft_wrap=True)
