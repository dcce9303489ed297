"""Targets of exports. A target is written under a temporary name beside it, and renamed once complete."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prorl_envs.errors import InputError

#: Name of an empty file in every exported folder. `--force` replaces only folders that contain it.
MARKER = ".prorl-export"
_OTHER_PATH = "choose another path with --out"


@contextmanager
def new_file(path: Path, *, force: bool) -> Iterator[Path]:
    """Yield the path of a temporary file, which replaces `path` after the block unless the block raises.

    Args:
        path: path of the file. Missing parent folders are created.
        force: replace an existing file.

    Raises:
        InputError: the target exists, or cannot be written.
    """
    if path.is_dir():
        raise InputError(f"cannot write {path}: it is a folder", hint=_OTHER_PATH)
    _refuse_existing(path, force)
    with _errors(path):
        partial = _partial(path)
        try:
            yield partial
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)


@contextmanager
def new_folder(path: Path, *, force: bool) -> Iterator[Path]:
    """Yield the path of a temporary folder, which replaces `path` after the block unless the block raises.

    Args:
        path: path of the folder. Missing parent folders are created.
        force: replace an existing folder if it is an export.

    Raises:
        InputError: the target exists, is not an export, or cannot be written.
    """
    _refuse_existing(path, force)
    if path.exists() and not (path / MARKER).exists():
        raise InputError(
            f"{path} was not written by an export, so --force does not replace it", hint=_OTHER_PATH
        )
    with _errors(path):
        partial, replaced = _partial(path), _partial(path, "replaced")
        try:
            partial.mkdir()
            (partial / MARKER).touch()
            yield partial
            if path.exists():
                path.rename(replaced)
            try:
                partial.rename(path)
            except OSError:
                if replaced.exists():
                    replaced.rename(path)
                raise
            shutil.rmtree(replaced, ignore_errors=True)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def _refuse_existing(path: Path, force: bool) -> None:
    if not force and (path.exists() or path.is_symlink()):
        raise InputError(f"{path} exists", hint="--force replaces it; --out names another path")


def _partial(path: Path, suffix: str = "partial") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.with_name(f".{path.name}.{os.getpid()}.{suffix}")


@contextmanager
def _errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}", hint=_OTHER_PATH) from error
