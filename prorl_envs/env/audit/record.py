"""Record of an audit: one JSON line per task. Audits continue from it; runs and services can demand it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from prorl_envs import __version__
from prorl_envs.env.audit.audit import TaskAudit
from prorl_envs.env.audit.contents import digest
from prorl_envs.env.base import Environment, Task
from prorl_envs.errors import InputError

#: Version of the audit, in each line.
AUDIT = f"prorl-envs {__version__}"


@dataclass(frozen=True, slots=True)
class _Line:
    """Result, the version of the audit, and the digest and the image of the task at that time."""

    audit: str
    digest: str
    result: TaskAudit
    image: str = ""


_LINE = TypeAdapter(_Line)


class AuditRecord:
    """Results of an audit in a file.

    Args:
        path: the file.
        bases: local images by reference, from which the images of tasks are made; None compares no images.
        is_new: whether the file need not exist.

    Raises:
        InputError: the file cannot be read, or is no record of an audit.
    """

    def __init__(self, path: Path, bases: Mapping[str, Path] | None = None, *, is_new: bool = False) -> None:
        self._path, self._bases = path, bases
        self._lines: dict[tuple[str, str], _Line] = {}
        try:
            lines = () if is_new and not path.exists() else path.read_bytes().splitlines()
        except OSError as error:
            raise InputError(f"{path}: {error.strerror}", hint="prorl-envs audit --record FILE") from error
        for number, line in enumerate(lines, start=1):
            try:
                read = _LINE.validate_json(line)
            except ValidationError as error:
                if not line.endswith(b"}"):  # the audit was killed while it wrote
                    continue
                raise InputError(
                    f"{path}:{number}: not a line of an audit's record", hint="prorl-envs audit --record FILE"
                ) from error
            if read.audit == AUDIT and not read.result.skipped:
                self._lines[read.result.task_id, read.digest] = read

    def results(self, family: type[Environment[Any]], tasks: Sequence[Task]) -> dict[str, TaskAudit]:
        """Return the results, by task id, of the tasks that have not changed since and whose episodes did not
        fail: a machine may have failed, too."""
        found = {task.id: line.result for task in tasks if (line := self._line(family, task))}
        return {name: result for name, result in found.items() if not result.failed}

    def add(self, family: type[Environment[Any]], task: Task, result: TaskAudit) -> None:
        """Append a result, which replaces an earlier one of the task. Do nothing if they are equal."""
        line = _Line(AUDIT, digest(family, task), result, family.image_name(task, self._bases or {}))
        if self._lines.get((task.id, line.digest)) == line:
            return
        with self._path.open("ab") as file:
            file.write(_LINE.dump_json(line) + b"\n")
        self._lines[task.id, line.digest] = line

    def refusal(self, family: type[Environment[Any]], task: Task) -> str:
        """Return why a task did not pass the audit, or "" if it did."""
        line = self._line(family, task)
        if line is None:
            return f"{self._path.name} has no audit of this task as it is now"
        found = ", ".join(dict.fromkeys(found.kind for found in line.result.findings))
        return "" if line.result.ok else f"its audit found: {found}"

    def _line(self, family: type[Environment[Any]], task: Task) -> _Line | None:
        line = self._lines.get((task.id, digest(family, task)))
        same = line and (self._bases is None or line.image == family.image_name(task, self._bases))
        return line if same else None
