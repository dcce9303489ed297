"""Task that only a Jupyter kernel solves, and settings that offer it under the name `kernel`."""

import json
from pathlib import Path
from typing import Any

ROW: dict[str, Any] = {
    "id": "engine",
    "instruction": "Leave the name of the package of IPython's shell in a variable called engine.",
    "checks": [{"type": "text", "value": "ipykernel", "source": "variable:engine"}],
    "reference": [
        {"tool": "ipython", "arguments": {"code": "engine = type(get_ipython()).__module__.split('.')[0]"}},
        {"tool": "finish", "arguments": {"answer": ""}},
    ],
}


def write_kernel_files(folder: Path) -> tuple[Path, Path]:
    """Write a settings file and a data file with the task; return their paths."""
    settings, data = folder / "kernel.yaml", folder / "kernel.jsonl"
    settings.write_text("environments: {kernel: {family: ipython, python: kernel}}\n")
    data.write_text(json.dumps(ROW) + "\n")
    return settings, data
