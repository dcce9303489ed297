"""Wrapper command that runs bubblewrap in a user namespace of Apptainer's that shows the whole host.

Some machines allow user namespaces only to programs known by name (AppArmor on Ubuntu does), and Apptainer
is one of them. Apptainer only provides the user namespace: neither its mounts nor its environment reach a
sandbox, which bubblewrap creates as it would outside.
"""

import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from prorl_envs.errors import SandboxError
from prorl_envs.sandbox.drivers.probe import explain
from prorl_envs.sandbox.linux.user_namespaces import refusal_of

#: Name of the directory, below Apptainer's root, at which the host's root is mounted.
_HOST = ".host"
#: Apptainer's default mounts, all disabled: the host's root has the same ones, whatever the site's settings.
_NO_MOUNTS = "proc,sys,dev,devpts,tmp,home,cwd,bind-paths"

CONFIGURATION = "the administrator must set `{}` in Apptainer's configuration"
#: Remedies by parts of Apptainer's messages. The first match counts.
_REMEDIES = {
    "unknown flag": "Apptainer 1.2 or later, or SingularityCE 3.11 or later",
    "disallows users from running sandbox": CONFIGURATION.format("allow container dir = yes"),
    "not allowed by configuration": CONFIGURATION.format("allow user ns = yes"),
    "no such file or directory": CONFIGURATION.format("user bind control = yes"),
}
_MESSAGE_LIMIT = 500
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def write_container(path: Path, host: Path = Path("/")) -> None:
    """Create the container directory for Apptainer: each top-level entry is a link to that of the host.

    Args:
        path: path of the new directory.
        host: the root directory whose top-level entries are linked.
    """
    path.mkdir(mode=0o700)
    (path / _HOST).mkdir()
    for entry in host.iterdir():
        if entry.name != _HOST:
            (path / entry.name).symlink_to(f"{_HOST}/{entry.name}")


def wrapper_command(program: Path, container: Path) -> list[str]:
    """Return the command prefix with which Apptainer runs a command and shows it the whole host."""
    return [
        *(str(program), "--silent", "--nocolor", "exec", "--userns", "--cleanenv", "--no-eval"),
        *("--no-home", "--no-mount", _NO_MOUNTS, "--bind", f"/:/{_HOST}", "--pwd", "/", str(container)),
    ]


def wrapper_environment(container: Path, inside: Mapping[str, str]) -> Mapping[str, str]:
    """Return the environment for `wrapper_command`.

    Args:
        container: directory for Apptainer's own files, in place of the user's home.
        inside: the environment of the command that Apptainer runs.
    """
    prefixes = ("APPTAINERENV_", "SINGULARITYENV_")
    return {
        **{prefix + name: value for name, value in inside.items() for prefix in prefixes},
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": str(container),
        "APPTAINER_CONFIGDIR": str(container),
        "SINGULARITY_CONFIGDIR": str(container),
    }


def on_one_line(output: str) -> str:
    """Return Apptainer's output on one line, without colours: its starter ignores `--nocolor`."""
    return " ".join(_COLOUR.sub("", output).split())


def explain_wrapper(output: str) -> SandboxError:
    """Return the error for a failed start, from the output of Apptainer or bubblewrap."""
    if any(line.startswith("bwrap: ") for line in output.splitlines()):
        return explain(output)
    message = on_one_line(output)[:_MESSAGE_LIMIT]
    error = explain_apptainer(message, _REMEDIES)
    if "user namespace" in message.lower():
        error.hint = refusal_of(message).remedy
    return error


def explain_apptainer(message: str, remedies: Mapping[str, str]) -> SandboxError:
    """Return the error for a message of Apptainer's. The first remedy whose key occurs in it is the hint."""
    lower = message.lower()
    return SandboxError(
        f"Apptainer did not start the sandbox: {message or 'Apptainer ended without a message'}",
        hint=next(
            (remedy for words, remedy in remedies.items() if words in lower),
            "`prorl-envs doctor` checks this machine",
        ),
    )


def run_apptainer(
    command: Sequence[str | Path], home: Path, *, timeout_s: float = 30.0
) -> "subprocess.CompletedProcess[str]":
    """Run a command of Apptainer's. `home` is for its files, which otherwise are in the user's home."""
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        env=wrapper_environment(home, {}),
        cwd="/",
        timeout=timeout_s,
        check=False,
    )
