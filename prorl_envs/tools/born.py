"""The shell that a sandbox's maker begins: the same that a tool server would (`terminal.py`)."""

import functools
import os
from collections.abc import Mapping
from pathlib import PurePosixPath

from prorl_envs.sandbox.base import TerminalPlan
from prorl_envs.tools.dialects import BASH
from prorl_envs.tools.foreground import settings
from prorl_envs.tools.terminal import COLUMNS, ROWS, set_up

#: The session whose first shell it is.
SESSION = "main"
#: Variables of every tool's processes, unless the sandbox's own say otherwise: nobody presses a pager's key,
#: and the model reads no colours.
ENVIRONMENT = {"PAGER": "cat", "GIT_PAGER": "cat", "MANPAGER": "cat", "TERM": "dumb"}
#: Bytes of the kernel's `struct termios`.
_SETTINGS_SIZE = 36


def plan(default: Mapping[str, str], own: Mapping[str, str]) -> TerminalPlan:
    """What is to be begun; named in `sandbox/namespaces.py`.

    Args:
        default, own: the sandbox's variables, and those that its spec puts on top of them.
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
    """Where it can lie, given the variable PATH."""
    folders = map(PurePosixPath, path.split(":"))
    return tuple(str(folder / BASH.name) for folder in folders if folder.is_absolute())


@functools.cache
def terminal_settings() -> bytes:
    """The settings of its terminal, as `foreground.settings` has them."""
    master, slave = os.openpty()
    try:
        set_up(slave)
        return settings(master)
    finally:
        os.close(master)
        os.close(slave)
