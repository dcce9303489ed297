"""Lines of files in /proc that hold paths, such as mountinfo."""

from pathlib import Path


def proc_lines(path: Path) -> list[str]:
    r"""Return the lines of a file, cut at line feeds only.

    The kernel escapes line feeds in paths, but no other line ends. `str.splitlines`, and reading as text,
    also cut at `\r`, `\x0b` or U+2028. Bytes that are no UTF-8 become surrogates, as in `os.fsdecode`.

    Raises:
        OSError: the file cannot be read.
    """
    return path.read_bytes().decode(errors="surrogateescape").removesuffix("\n").split("\n")
