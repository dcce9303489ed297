"""What commands read results from: a JSONL file, or the store of a service."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prorl_envs.errors import InputError

if TYPE_CHECKING:
    from prorl_envs.viewer.episodes import Episodes

SourceArgument = Annotated[
    str,
    typer.Argument(
        metavar="FILE|STORE",
        help="A results.jsonl; or the store of a service, which may be running: its file, or "
        "postgresql://HOST/DATABASE.",
    ),
]
_SQLITE = b"SQLite format 3\0"
_POSTGRES = ("postgresql://", "postgres://")


def is_store(source: str) -> bool:
    """Whether it is the store of a service.

    Args:
        source: a path, or the URL of a database.

    Raises:
        InputError: there is no such file.
    """
    if source.startswith(_POSTGRES):
        return True
    try:
        with Path(source).open("rb") as file:
            return file.read(len(_SQLITE)) == _SQLITE
    except OSError as error:
        raise InputError(
            f"cannot read {source}: {error.strerror}", hint="a results.jsonl, or a store"
        ) from error


def open_episodes(source: str) -> "Episodes":
    """The results for those who look. The caller closes them.

    Args:
        source: a path, or the URL of a database.

    Raises:
        InputError: they cannot be read.
    """
    if not is_store(source):
        from prorl_envs.viewer.index import Index

        return Index(Path(source))
    from prorl_envs.rollout.stored_episodes import StoredEpisodes

    if source.startswith(_POSTGRES):
        return StoredEpisodes.of_postgres(source)
    return StoredEpisodes.of_file(Path(source))
