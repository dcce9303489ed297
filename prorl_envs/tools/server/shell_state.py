"""State of a shell as a script: directory, variables, functions, aliases, options, traps, umask."""

import re
from collections.abc import Collection

#: Evaluated in a subshell, which has the state of its shell; the shell itself must not change. Zero bytes
#: separate options, which are restored last, what must be restored before functions are read, and the rest.
_BASH = r"""
\builtin set +o
\builtin printf "\0"
\builtin set +eu
\builtin shopt -p
\builtin umask -p
\builtin printf "\0"
\builtin printf "\\\\builtin cd -- %q\n" "$PWD"
\builtin declare -p
\builtin declare -f
\builtin declare -F
\builtin alias -p
\builtin trap -p
"""
#: Names of exported variables in the output of `declare -p`. A line of a value may look like one.
_EXPORTED = re.compile(rb"^declare -[A-Za-z]*x[A-Za-z]* (\w+)", re.MULTILINE)
#: Names that a shell takes for variables. Others of the environment mean nothing to it.
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_SH = r"""
printf "\0"
printf "umask %s\n\0" "$(umask)"
set
export -p
trap
"""


def save_command(path: str) -> str:
    """Return a command that writes its shell's state to `path` and ends with the shell's last status."""
    # `$?` is expanded before anything runs. No line has a single quote.
    script = f'exec >|{path} 2>/dev/null\nif [ -n "$BASH_VERSION" ]; then {_BASH} else {_SH} fi\nexit '
    return f"( \\eval '{script}'\"$?\" )"


def restore_script(saved: bytes, environment: Collection[str]) -> bytes:
    """Return the script that gives a new shell the saved state.

    Args:
        environment: names of the variables that the new shell has from its start.
    """
    options, before, rest = (*saved.split(b"\0", 2), b"", b"")[:3]
    names = {name for name in environment if _NAME.fullmatch(name)}
    missing = " ".join(sorted(names.difference(map(bytes.decode, _EXPORTED.findall(rest)))))
    start = f'if [ -n "$BASH_VERSION" ]; then unset -v {missing}; fi\n' if missing else ""
    return b"\n".join((start.encode(), before, rest, options))


def restore_command(path: str, status: int) -> str:
    """Return a command that runs the script at `path`, and ends with `status`."""
    return f". {path} >/dev/null 2>&1; " + (f"(exit {status})" if status else ":")
