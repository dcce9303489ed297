"""State of a shell as a script: directory, variables, functions, aliases, options, traps, umask."""

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


def remove_command(path: str) -> str:
    """Return a command that removes a file, and ends with the shell's last status."""
    return f"( \\eval '/bin/rm -f {path}; exit '\"$?\" )"


def restore_script(saved: bytes) -> bytes:
    """Return the script that gives a new shell the saved state."""
    options, before, rest = (*saved.split(b"\0", 2), b"", b"")[:3]
    # What a new shell exports and this one does not would stay otherwise.
    start = b'if [ -n "$BASH_VERSION" ]; then unset $(compgen -e); fi\n'
    return b"\n".join((start, before, rest, options))


def restore_command(path: str, status: int) -> str:
    """Return a command that runs the script at `path`, removes it, and ends with `status`."""
    return f". {path} >/dev/null 2>&1; /bin/rm -f {path}; (exit {status})"


def lost(names: Collection[str]) -> tuple[str, ...]:
    """Describe the shells whose state could not be saved, because a program was in their foreground."""
    return tuple(
        f"the state of the shell {name!r}, in which a program waits for input" for name in sorted(names)
    )
