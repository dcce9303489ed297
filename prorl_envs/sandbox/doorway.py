"""The way through Apptainer: it makes a user namespace that shows the whole host, and runs bubblewrap there.

Some machines allow user namespaces to installed programs by name (AppArmor does, on Ubuntu), and Apptainer
is one of them. So Apptainer is used for what it is allowed, and for nothing else: neither its mounts nor its
environment reach a sandbox, which bubblewrap builds inside as it would outside.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from prorl_envs.errors import SandboxError
from prorl_envs.sandbox.probe import NAMESPACES_REMEDY, blocking_settings, explain

#: Where the host's root appears below Apptainer's.
_HOST = ".host"
#: Nothing of what Apptainer mounts by itself is wanted: the host has it all, whatever a site has configured.
_NO_MOUNTS = "proc,sys,dev,devpts,tmp,home,cwd,bind-paths"

_CONFIGURATION = "the administrator must set `{}` in Apptainer's configuration"
#: What Apptainer says, and what to do about it. The first that is found counts.
_REMEDIES = {
    "unknown flag": "Apptainer 1.2 or later, or SingularityCE 3.11 or later",
    "disallows users from running sandbox": _CONFIGURATION.format("allow container dir = yes"),
    "not allowed by configuration": _CONFIGURATION.format("allow user ns = yes"),
    "no such file or directory": _CONFIGURATION.format("user bind control = yes"),
}
_SAID_LIMIT = 500
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def write_doorway(path: Path, host: Path = Path("/")) -> None:
    """Make the directory that Apptainer takes for its container: every path of the host leads to the host's.

    Args:
        path: a new directory.
        host: whose top-level entries are linked.
    """
    path.mkdir(mode=0o700)
    (path / _HOST).mkdir()
    for entry in host.iterdir():
        if entry.name != _HOST:
            (path / entry.name).symlink_to(f"{_HOST}/{entry.name}")


def doorway_command(program: Path, doorway: Path) -> list[str]:
    """What to write before a command to have it run by Apptainer, with the host as it is."""
    return [
        *(str(program), "--silent", "--nocolor", "exec", "--userns", "--cleanenv", "--no-eval"),
        *("--no-home", "--no-mount", _NO_MOUNTS, "--bind", f"/:/{_HOST}", "--pwd", "/", str(doorway)),
    ]


def doorway_environment(doorway: Path, inside: Mapping[str, str]) -> Mapping[str, str]:
    """The environment of that command.

    Args:
        doorway: where Apptainer keeps its notes, instead of the user's home.
        inside: what the command that it runs shall have in its environment.
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
    """What Apptainer said, without colours: its starter uses them whatever it is told."""
    return " ".join(_COLOUR.sub("", output).split())


def explain_doorway(output: str) -> SandboxError:
    """The error for a start that failed, from what Apptainer or bubblewrap said."""
    if any(line.startswith("bwrap: ") for line in output.splitlines()):
        return explain(output)
    said = on_one_line(output)[:_SAID_LIMIT] or "Apptainer ended without a word"
    lower = said.lower()
    hint = next((remedy for words, remedy in _REMEDIES.items() if words in lower), "")
    if "user namespace" in lower:
        blocking = blocking_settings()
        hint = NAMESPACES_REMEDY + (f" (found: {', '.join(blocking)})" if blocking else "")
    return SandboxError(
        f"Apptainer did not start the sandbox: {said}", hint=hint or "`prorl-envs doctor` checks this machine"
    )
