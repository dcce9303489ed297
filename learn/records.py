"""What is kept of a run: a line of numbers for each step and each look at the held-out tasks."""

import json
from pathlib import Path
from typing import Any, Literal

Kind = Literal["train", "held_out"]


class Records:
    """The lines of one run.

    Args:
        path: a JSONL file, made where there is none.
        since: a run goes on after this step, so what was written of later ones does not count, nor of the
            look at the held-out tasks that comes next; None begins anew.
    """

    def __init__(self, path: Path, *, since: int | None = None) -> None:
        self._path = path
        kept = [
            line
            for line in read_records(path)
            if since is not None and line["step"] <= since - (line["kind"] == "held_out")
        ]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(map(_line, kept)), encoding="utf-8")

    def add(self, kind: Kind, step: int, numbers: dict[str, Any]) -> dict[str, Any]:
        """Write a line; it is given back."""
        record = {"kind": kind, "step": step, **numbers}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(_line(record))
        return record


def read_records(path: Path) -> list[dict[str, Any]]:
    """The lines of a run, without one that was not written to its end."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def curve(records: list[dict[str, Any]], key: str = "reward") -> list[tuple[int, float]]:
    """The steps at which the held-out tasks were looked at, and a number of each."""
    return [(line["step"], line[key]) for line in records if line["kind"] == "held_out"]


def _line(record: dict[str, Any]) -> str:
    return json.dumps(record, sort_keys=True) + "\n"
