"""Plan of the shell opened with a sandbox, identical to a tool server's shell (`terminal.py`)."""

import functools
import os
from collections.abc import Mapping
from pathlib import PurePosixPath

from prorl_envs.sandbox.base import TerminalPlan
from prorl_envs.tools.server.input_detection import settings
from prorl_envs.tools.server.shell_syntax import BASH
from prorl_envs.tools.server.terminal import COLUMNS, ROWS, set_up

#: The session whose first shell this is.
SESSION = "main"
#: Variables of every tool's processes, unless the sandbox's own override them: no user can operate a pager,
#: and the model reads no colours.
ENVIRONMENT = {"PAGER": "cat", "GIT_PAGER": "cat", "MANPAGER": "cat", "TERM": "dumb"}
#: Bytes of the kernel's `struct termios`.
_SETTINGS_SIZE = 36


def plan(default: Mapping[str, str], own: Mapping[str, str]) -> TerminalPlan:
    """Return the plan of the shell's start; named in `sandbox/drivers/namespaces.py`.

    Args:
        default, own: the sandbox's variables, and those of its spec, which override them.
    """
    env = {**default, **ENVIRONMENT, **own, "PS1": "", "PS2": ""}
    return TerminalPlan(
        programs=_places(env.get("PATH", "")),
        arguments=BASH.options,
        env=env,
        settings=terminal_settings()[:_SETTINGS_SIZE],
        size=(ROWS, COLUMNS),
        text_fd=BASH.text_fd,
        report_fd=BASH.report_fd,
    )


@functools.lru_cache
def _places(path: str) -> tuple[str, ...]:
    """Return the possible paths of the shell, given the variable PATH."""
    folders = map(PurePosixPath, path.split(":"))
    return tuple(str(folder / BASH.name) for folder in folders if folder.is_absolute())


@functools.cache
def terminal_settings() -> bytes:
    """Return the settings of the shell's terminal, as returned by `input_detection.settings`."""
    master, slave = os.openpty()
    try:
        set_up(slave)
        return settings(master)
    finally:
        os.close(master)
        os.close(slave)
