"""A trainer's loop with nothing but the client: batches of informative groups, a bound of staleness, and the
handshake of a weight update. Put your optimiser in `train`, and your way of moving weights in `upload`.

    python examples/trainers/client/loop.py --environment bash --tasks tasks.jsonl --steps 10
"""

import argparse
import asyncio
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from prorl_envs import BatchRequest, BatchTask, Result, RolloutClient
from prorl_envs.trainers.advantages import group_advantages
from prorl_envs.trainers.asking import GroupTemplate, connect
from prorl_envs.trainers.rows import Row, rows_of, training_reward
from prorl_envs.trainers.weights import weights_change


def train(rows: Sequence[tuple[Row, float]], version: int) -> None:
    """One step of the optimiser over rows with their advantages: a stand-in that counts tokens.

    `row.weight` normalises rows of one episode; `row.logprobs` are of the policy that sampled, for a ratio.
    """
    tokens = sum(sum(row.mask) for row, _ in rows)
    behind = max((row.staleness(version) or 0 for row, _ in rows), default=0)
    print(f"  {len(rows)} rows, {tokens} sampled tokens, at most {behind} versions old")


async def upload(version: int) -> None:
    """Put the new weights into the model servers; no turn is sampled meanwhile."""


def advantages(results: Sequence[Result]) -> Iterator[tuple[Row, float]]:
    """The rows of informative groups, each with its episode's advantage."""
    for _, group in itertools.groupby(results, key=lambda result: result.group_id):
        members = list(group)
        for result, advantage in zip(
            members, group_advantages([training_reward(result) for result in members]), strict=True
        ):
            if advantage is not None:
                yield from ((row, advantage) for row in rows_of(result) if row.trains)


async def loop(asking: GroupTemplate, tasks: Sequence[dict[str, Any]], options: argparse.Namespace) -> None:
    stream = itertools.cycle(tasks)
    before: str | None = None
    async with connect(asking.url) as client:
        for step in range(options.steps):
            batch = request(asking, step, before, [next(stream) for _ in range(4 * options.groups)], options)
            await client.submit_batch(batch)
            results = await informative(client, batch.id)
            print(f"step {step}: {len(results)} episodes of informative groups")
            train(list(advantages(results)), step)
            async with weights_change(client, step + 1, mode=options.mode):
                await upload(step + 1)
            before = batch.id
        if before is not None:
            await client.cancel_batch(before)  # what it left over for a step that does not come


async def informative(client: RolloutClient, batch_id: str) -> list[Result]:
    """A step's results, group by group. Where the trainer is interrupted, its batch is cancelled."""
    try:
        return [result async for result in client.batch_results(batch_id)]
    except BaseException:
        await client.cancel_batch(batch_id)
        raise


def request(
    asking: GroupTemplate,
    step: int,
    before: str | None,
    tasks: Sequence[dict[str, Any]],
    options: argparse.Namespace,
) -> BatchRequest:
    return BatchRequest(
        id=f"{asking.run}/step{step}",  # the same id again is the same batch
        environment=asking.environment,
        tasks=[BatchTask(task=task) for task in tasks],
        groups=options.groups,
        samples=options.samples,
        in_flight=2 * options.groups,
        on_complete="carry",  # what is under way when there are enough goes on, and counts for the next step,
        carry_from=before,
        weight_version=step,
        max_staleness=options.max_staleness,  # unless it began too many versions ago
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--service", default="http://127.0.0.1:8600")
    parser.add_argument("--environment", default="bash")
    parser.add_argument("--tasks", type=Path, required=True, help="JSONL, a task row each")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--groups", type=int, default=8, help="informative groups of a step")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--max-staleness", type=int, default=1)
    parser.add_argument("--mode", choices=["finish", "abort", "keep"], default="finish")
    options = parser.parse_args(arguments)
    tasks = [json.loads(line) for line in options.tasks.read_bytes().split(b"\n") if line.strip()]
    asyncio.run(loop(GroupTemplate(options.service, options.environment), tasks, options))


if __name__ == "__main__":
    main()
