"""Records of a run: a line of numbers for each step and each evaluation on the held-out tasks."""

import json
from pathlib import Path
from typing import Any, Literal

Kind = Literal["train", "held_out"]


class Records:
    """Records of one run.

    Args:
        path: a JSONL file, created if it is missing.
        since: the run resumes after this step, so lines about later steps do not count, nor the next
            evaluation on the held-out tasks; None starts a new run.
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
        """Write a line, and return it."""
        record = {"kind": kind, "step": step, **numbers}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(_line(record))
        return record


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a run, without an incomplete last line."""
    if not path.exists():
        return []
    *lines, _ = path.read_bytes().split(b"\n")
    return [json.loads(line) for line in lines]


def curve(records: list[dict[str, Any]], key: str = "reward") -> list[tuple[int, float]]:
    """Return the steps with an evaluation on the held-out tasks, and one of its numbers for each."""
    return [(line["step"], line[key]) for line in records if line["kind"] == "held_out"]


def _line(record: dict[str, Any]) -> str:
    return json.dumps(record, sort_keys=True) + "\n"
