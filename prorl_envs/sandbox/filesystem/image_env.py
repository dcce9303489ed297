"""Environment variables that an image sets (`ENV` of a Dockerfile), read as data.

Apptainer and SingularityCE write them into a script of the image, one line each: `export NAME="VALUE"` or
`export NAME="${NAME:-"VALUE"}"`, where VALUE is escaped for the shell and then quoted as a Go string. Nothing
of the image is run: lines of any other form, and all other scripts, are skipped.
"""

import contextlib
import os
import re
import stat
from pathlib import Path

from prorl_envs.errors import SandboxError
from prorl_envs.sandbox.filesystem.layered import LayerTree

_FOLDER = "/.singularity.d/env"
_SCRIPT = re.compile(r"10-docker[\w-]*\.sh")
_SIZE_LIMIT = 256 * 1024
_LINE = re.compile(r'export ([A-Za-z_][A-Za-z0-9_]*)="(?:\$\{\1:-(?:"(.*)")?\}|(.*))"')
#: An escape in a Go string, or other characters in it.
_QUOTED = re.compile(
    r'\\(?:([abfnrtv\\"])|x([0-9a-f]{2})|u([0-9a-f]{4})|U(00[01][0-9a-f]{5}))|([^\\"]+)', re.DOTALL
)
_CONTROLS = dict(zip('abfnrtv\\"', '\a\b\f\n\r\t\v\\"', strict=True))
#: An escaped character that is special to the shell, or an ordinary character.
_ESCAPED = re.compile(r'\\([\\"`$])|([^\\"`$])', re.DOTALL)


def read_image_env(root: Path) -> dict[str, str]:
    """Return the variables of the image whose root file system is at `root`; empty if it sets none.

    Links are resolved inside `root`. Blocks.

    Raises:
        SandboxError: the variables cannot be read.
    """
    try:
        folder = root / LayerTree([root]).resolve(_FOLDER)[1:]
        found = folder.iterdir() if folder.is_dir() else ()
        scripts = sorted(path for path in found if _SCRIPT.fullmatch(path.name))
        return {name: value for path in scripts for name, value in parse_image_env(_text(path)).items()}
    except OSError as error:
        raise SandboxError(f"cannot read the image's environment: {error.strerror}") from error


def parse_image_env(text: str) -> dict[str, str]:
    """Return the variables that the lines of a script set to plain text. Pure."""
    found = {}
    for line in text.split("\n"):
        if match := _LINE.fullmatch(line):
            name, default, value = match.groups()
            with contextlib.suppress(ValueError):
                found[name] = _plain(value if value is not None else default or "")
    return found


def _text(path: Path) -> str:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return ""
        data = file.read(_SIZE_LIMIT + 1)
    if len(data) > _SIZE_LIMIT:
        raise SandboxError(f"the image's {path.name} has more than {_SIZE_LIMIT} bytes")
    return data.decode("utf-8", "surrogateescape")


def _plain(quoted: str) -> str:
    """Unquote a value. Raise ValueError if a shell would not take it literally."""
    parts = []
    for match in _all(_QUOTED, quoted):
        control, byte, short, long, other = match.groups()
        number = byte or short or long
        if byte and int(byte, 16) > 0x7F:
            raise ValueError("a byte that is no character")
        parts.append(_CONTROLS[control] if control else chr(int(number, 16)) if number else other)
    value = "".join(match[1] or match[2] for match in _all(_ESCAPED, "".join(parts)))
    if "\0" in value:
        raise ValueError("a zero byte")
    value.encode()  # raises a ValueError if it is not valid text
    return value


def _all(pattern: re.Pattern[str], text: str) -> list[re.Match[str]]:
    """Return matches that together cover all of `text`, or raise ValueError."""
    found = list(pattern.finditer(text))
    if sum(len(match[0]) for match in found) != len(text):
        raise ValueError("not all of the text is understood")
    return found
