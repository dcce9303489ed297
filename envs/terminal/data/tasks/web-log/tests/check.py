"""Writes the share of correct entries of the report as the reward."""

import json
from pathlib import Path

EXPECTED = {
    "/start": {"requests": 2, "errors": 0, "slowest_ms": 40},
    "/search": {"requests": 4, "errors": 0.5, "slowest_ms": 5000},
}


def reward() -> float:
    try:
        found = json.loads(Path("/app/report.json").read_text())
    except (OSError, ValueError):
        return 0.0
    if not isinstance(found, dict) or set(found) != set(EXPECTED):
        return 0.0
    correct = [path for path, entry in EXPECTED.items() if found[path] == entry]
    return len(correct) / len(EXPECTED)


Path("/logs/verifier/reward.json").write_text(json.dumps({"reward": reward()}))
