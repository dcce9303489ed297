"""Reader of rows with task directories of Harbor or Terminal-Bench."""

from collections.abc import Mapping
from typing import Any

from pydantic import Field, ValidationError

from prorl_envs.env import task_files
from prorl_envs.env.columns import RowModel
from prorl_envs.envs.terminal import harbor, terminal_bench
from prorl_envs.envs.terminal.files import Files, first_problem
from prorl_envs.envs.terminal.task import TerminalTask
from prorl_envs.errors import InputError

_HINT = 'a row is {"id": ..., "directory": {PATH: TEXT}}; give a folder of tasks to read them from files'


class _Row(RowModel):
    id: str = Field(min_length=1, max_length=200)
    directory: task_files.Files = Field(max_length=1000)


def task_of(row: Mapping[str, Any], variables: Mapping[str, str] | None = None) -> TerminalTask:
    """Read a row.

    Args:
        row: the row.
        variables: values of variables that the task expects from the user.

    Raises:
        InputError: the row is invalid; the message names the file and the field.
    """
    try:
        parsed = _Row.model_validate(dict(row))
    except ValidationError as error:
        raise InputError(first_problem(error), hint=_HINT) from None
    files: Files = parsed.directory
    if harbor.CONFIG in files:
        return harbor.harbor_task(parsed.id, files, variables or {})
    if terminal_bench.CONFIG in files:
        return terminal_bench.terminal_bench_task(parsed.id, files, variables or {})
    raise InputError(f"directory: neither {harbor.CONFIG} nor {terminal_bench.CONFIG}", hint=_HINT)
