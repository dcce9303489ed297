"""Sources of results for commands: a JSONL file, or the store of a service."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prorl_envs.errors import InputError, WrongFileType

if TYPE_CHECKING:
    from prorl_envs.viewer.episodes import EpisodeSource

SourceArgument = Annotated[
    str,
    typer.Argument(
        metavar="RUN|FILE|STORE",
        help="The folder of a run; a results.jsonl; or the store of a service, which may be running.",
    ),
]
_KINDS = "name the folder of a run, a results.jsonl, or the store of a service"


def is_store(source: str) -> bool:
    """Return whether the source is the store of a service.

    Args:
        source: a path.

    Raises:
        WrongFileType: the source is neither a store nor results.
        InputError: the source cannot be read.
    """
    from prorl_envs.env.file_kinds import FileKind, kind_of, wrong_file
    from prorl_envs.rollout.client.result_files import results_file
    from prorl_envs.runs.folder import RUN

    try:
        kind = kind_of(Path(source))
        if kind is FileKind.RUN:
            source = str(results_file(source))
            kind = kind_of(Path(source))
    except OSError as error:
        raise InputError(f"cannot read {source}: {error.strerror}", hint=_KINDS) from error
    if kind is FileKind.EMPTY and Path(source).with_name(RUN).exists():
        return False  # a run without results so far
    # For JSON and text, a later error names the first line.
    if kind not in (FileKind.STORE, FileKind.RESULTS, FileKind.JSON, FileKind.TEXT):
        raise wrong_file(source, kind, "results", hint=_KINDS)
    return kind is FileKind.STORE


def open_episodes(source: str) -> "EpisodeSource":
    """Open results for reading. The caller closes them.

    Args:
        source: a path.

    Raises:
        WrongFileType: the source is neither a store nor results.
        InputError: the source cannot be read.
    """
    if not is_store(source):
        from prorl_envs.rollout.client.result_files import results_file
        from prorl_envs.viewer.index import Index

        return Index(results_file(source))
    from prorl_envs.rollout.store.read_only import StoredEpisodes

    return StoredEpisodes(Path(source))


def check_lines(episodes: "EpisodeSource", source: str) -> None:
    """Refuse results with an invalid line, after they have been read.

    Raises:
        WrongFileType: no line is a result.
        InputError: a line is not a result; the message names the first such line.
    """
    if not episodes.bad:
        return
    line, problem = episodes.bad[0]
    message = f"{episodes.name}:{line}: {problem}"
    if not episodes.summaries:
        raise WrongFileType(message, hint=_KINDS)
    raise InputError(message, hint=f"correct or remove the line of {source}")
