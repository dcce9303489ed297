"""Task rows as a trainer's data set: `make_data.py verl tasks.jsonl train.parquet --environment bash`.

slime and OpenRLHF read JSONL; verl and SkyRL read Parquet (the extra `parquet`).
"""

import argparse
import json
from pathlib import Path
from typing import Any

from prorl_envs.trainers import skyrl, slime, verl
from prorl_envs.trainers.tasks import to_text


def rows(trainer: str, tasks: list[dict[str, Any]], environment: str) -> list[dict[str, Any]]:
    match trainer:
        case "verl":
            return verl.rows(tasks, environment=environment)
        case "skyrl":
            return skyrl.rows(tasks, environment=environment)
        case "slime":
            return slime.rows(tasks)
        case _:  # OpenRLHF: --data.input_key task
            return [{"task": to_text(task), "label": ""} for task in tasks]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trainer", choices=["verl", "skyrl", "slime", "openrlhf"])
    parser.add_argument("tasks", type=Path, help="JSONL, a task row each")
    parser.add_argument("output", type=Path)
    parser.add_argument("--environment", default="bash")
    options = parser.parse_args()
    tasks = [json.loads(line) for line in options.tasks.read_bytes().split(b"\n") if line.strip()]
    made = rows(options.trainer, tasks, options.environment)
    if options.output.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(made), options.output)
    else:
        options.output.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in made))
    print(f"{len(made)} rows in {options.output}")


if __name__ == "__main__":
    main()
