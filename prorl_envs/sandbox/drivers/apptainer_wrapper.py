"""Wrapper command for Apptainer: makes a user namespace that shows the whole host, and runs bubblewrap there.

Some machines allow user namespaces only to programs known by name (AppArmor on Ubuntu does), and Apptainer
is one of them. Apptainer is used for the user namespace alone: neither its mounts nor its environment reach
a sandbox, which bubblewrap builds as it would outside.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from prorl_envs.errors import SandboxError
from prorl_envs.sandbox.drivers.probe import explain
from prorl_envs.sandbox.linux.user_namespaces import refusal_of

#: Name of the directory, below Apptainer's root, at which the host's root is mounted.
_HOST = ".host"
#: Apptainer's default mounts, all disabled: the host's root has the same, independent of the site's settings.
_NO_MOUNTS = "proc,sys,dev,devpts,tmp,home,cwd,bind-paths"

_CONFIGURATION = "the administrator must set `{}` in Apptainer's configuration"
#: Remedies by parts of Apptainer's messages. The first match counts.
_REMEDIES = {
    "unknown flag": "Apptainer 1.2 or later, or SingularityCE 3.11 or later",
    "disallows users from running sandbox": _CONFIGURATION.format("allow container dir = yes"),
    "not allowed by configuration": _CONFIGURATION.format("allow user ns = yes"),
    "no such file or directory": _CONFIGURATION.format("user bind control = yes"),
}
_SAID_LIMIT = 500
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def write_doorway(path: Path, host: Path = Path("/")) -> None:
    """Make the container directory for Apptainer: each top-level entry links to that of the host.

    Args:
        path: a new directory.
        host: the root directory whose top-level entries are linked.
    """
    path.mkdir(mode=0o700)
    (path / _HOST).mkdir()
    for entry in host.iterdir():
        if entry.name != _HOST:
            (path / entry.name).symlink_to(f"{_HOST}/{entry.name}")


def doorway_command(program: Path, doorway: Path) -> list[str]:
    """Return the command prefix that has Apptainer run a command with the whole host visible."""
    return [
        *(str(program), "--silent", "--nocolor", "exec", "--userns", "--cleanenv", "--no-eval"),
        *("--no-home", "--no-mount", _NO_MOUNTS, "--bind", f"/:/{_HOST}", "--pwd", "/", str(doorway)),
    ]


def doorway_environment(doorway: Path, inside: Mapping[str, str]) -> Mapping[str, str]:
    """Return the environment of that command.

    Args:
        doorway: directory for Apptainer's own files, in place of the user's home.
        inside: the environment of the command that Apptainer runs.
    """
    prefixes = ("APPTAINERENV_", "SINGULARITYENV_")
    return {
        **{prefix + name: value for name, value in inside.items() for prefix in prefixes},
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": str(doorway),
        "APPTAINER_CONFIGDIR": str(doorway),
        "SINGULARITY_CONFIGDIR": str(doorway),
    }


def on_one_line(output: str) -> str:
    """Return Apptainer's output on one line, without colours: its starter ignores `--nocolor`."""
    return " ".join(_COLOUR.sub("", output).split())


def explain_doorway(output: str) -> SandboxError:
    """Return the error for a failed start, from the output of Apptainer or bubblewrap."""
    if any(line.startswith("bwrap: ") for line in output.splitlines()):
        return explain(output)
    said = on_one_line(output)[:_SAID_LIMIT] or "Apptainer ended without a word"
    lower = said.lower()
    hint = next((remedy for words, remedy in _REMEDIES.items() if words in lower), "")
    if "user namespace" in lower:
        hint = refusal_of(said).remedy
    return SandboxError(
        f"Apptainer did not start the sandbox: {said}", hint=hint or "`prorl-envs doctor` checks this machine"
    )
