"""Paths that diffs touch."""

import re

from unidiff.errors import UnidiffParseError
from unidiff.patch import PatchSet

#: Escapes in the quoted names of git: the bytes of other characters than those of ASCII, and single letters.
_ESCAPE = re.compile(r"\\([0-7]{3}|.)")
_LETTERS = {"a": 7, "b": 8, "t": 9, "n": 10, "v": 11, "f": 12, "r": 13}


def unquoted(name: str) -> str:
    """Return a name of a diff without the quotes and escapes that git uses for characters beyond ASCII."""
    if len(name) < 2 or not name.startswith('"') or not name.endswith('"'):
        return name
    text = _ESCAPE.sub(_byte, name[1:-1]).encode("latin-1", "replace")
    return text.decode(errors="surrogateescape")


def _byte(escape: re.Match[str]) -> str:
    said = escape[1]
    return chr(int(said, 8) & 0xFF if len(said) == 3 else _LETTERS.get(said, ord(said) & 0xFF))


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
        unquoted(name).removeprefix(prefix)
        for file in files
        for name, prefix in ((file.source_file, "a/"), (file.target_file, "b/"))
        if name not in (None, "/dev/null")
    }
    if not paths:
        raise ValueError("not a diff: it touches no file")
    if outside := [path for path in paths if path.startswith("/") or ".." in path.split("/")]:
        raise ValueError(f"names a path outside the tree: {outside[0]!r}")
    return frozenset(paths)
