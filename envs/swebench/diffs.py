"""Paths that diffs touch."""

from unidiff.errors import UnidiffParseError
from unidiff.patch import PatchSet


def changed_paths(patch: str) -> frozenset[str]:
    """Return every path, old or new, that a diff touches.

    Raises:
        ValueError: `patch` is not a diff, or it names a path outside the tree.
    """
    try:
        files = PatchSet(patch)
    except UnidiffParseError as error:
        raise ValueError(f"not a diff: {error}") from error
    paths = {
        name.removeprefix(prefix)
        for file in files
        for name, prefix in ((file.source_file, "a/"), (file.target_file, "b/"))
        if name not in (None, "/dev/null")
    }
    if not paths:
        raise ValueError("not a diff: it touches no file")
    if outside := [path for path in paths if path.startswith("/") or ".." in path.split("/")]:
        raise ValueError(f"names a path outside the tree: {outside[0]!r}")
    return frozenset(paths)
