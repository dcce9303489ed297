"""Feeds Atropos from the rollout service. Start its API server (`run-api`) and any trainer of it, then:

python examples/trainers/atropos/feed.py tasks.jsonl
"""

import asyncio
import json
import sys
from pathlib import Path

from prorl_envs.trainers.atropos import AtroposFeed, feed

ATROPOS, SERVICE, ENVIRONMENT = "http://127.0.0.1:8000", "http://127.0.0.1:8600", "bash"


def main(tasks: Path) -> None:
    rows = [json.loads(line) for line in tasks.read_bytes().split(b"\n") if line.strip()]
    asked = AtroposFeed(ATROPOS, SERVICE, ENVIRONMENT, rows, samples=8, groups=16, max_batches_behind=2)
    pushed = asyncio.run(feed(asked))
    print(f"{pushed} groups pushed")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
