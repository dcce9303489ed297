"""This package's service behind `examples/paper/start_server.py`, with a scripted model."""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.cli.test_scripted import scripted
from tests.rollout.paper.requests import Body

START_SERVER = Path(__file__).parents[3] / "examples" / "paper" / "start_server.py"


@contextmanager
def model_of(folder: Path, environment: str, rows: Sequence[Body]) -> Iterator[tuple[str, dict[str, str]]]:
    """Run a scripted model that knows the rows' solutions.

    Yields:
        its address, and the environment variables with which a service uses its tokenizer.
    """
    data = folder / f"{environment}.jsonl"
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    with scripted(folder, environment, "--data", str(data)) as (_, options):
        variables = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PRORL_MODEL__TOKENIZER": options[3],
            "PRORL_SERVICE__STORE": "memory",
        }
        yield options[1], variables
