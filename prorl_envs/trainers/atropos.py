"""Atropos (0.4): groups of the rollout service, pushed to its API server like those of an Atropos
environment.

    asyncio.run(feed(AtroposFeed("http://127.0.0.1:8000", "http://127.0.0.1:8600", "bash", task_rows)))

Works with any trainer that reads batches from Atropos's API. `atroposlib` is not imported: its API is HTTP.
"""

import asyncio
import itertools
import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from prorl_envs.errors import InputError, ProrlError
from prorl_envs.model.types import Sampling
from prorl_envs.rollout.api.types import AgentLimits, Result
from prorl_envs.trainers.advantages import spread
from prorl_envs.trainers.asking import GroupTemplate
from prorl_envs.trainers.rollouts import Rollouts
from prorl_envs.trainers.rows import one_row

logger = logging.getLogger(__name__)

#: Mask value of a token without loss; log-probability of a token that was not sampled.
MASKED, NOT_SAMPLED = -100, 1.0
#: Polling interval of the queue, and of the trainer, in seconds.
LOOK_S = 1.0


class AtroposRefused(ProrlError):
    """Error: Atropos's server refused a request, or is unreachable."""


@dataclass(frozen=True, slots=True)
class AtroposFeed:
    """Configuration of a feed.

    Args:
        api: base URL of Atropos's API server.
        url: base URL of the rollout service. Its token is read from `$PRORL_SERVER__TOKEN`.
        environment: the service's environment that the tasks are of.
        tasks: its task rows; repeated in a new random order each time.
        samples: episodes of a group.
        groups: maximum number of groups in flight.
        max_batches_behind: maximum number of batches in Atropos's queue. It bounds staleness, because Atropos
            does not learn which version sampled a group. Above it no group starts.
        max_token_length: longest sequence; as the trainer's.
        weight: this environment's share of a batch, relative to other environments.
        equal: also push groups whose rewards are all equal.
        sampling, limits: as the service takes them; None uses the service's.
        steps: number of groups to push; None runs without limit.
    """

    api: str
    url: str
    environment: str
    tasks: Sequence[Mapping[str, Any]]
    samples: int = 8
    groups: int = 16
    max_batches_behind: int = 2
    max_token_length: int = 32_768
    weight: float = 1.0
    equal: bool = False
    sampling: Sampling | None = None
    limits: AgentLimits | None = None
    steps: int | None = None


async def feed(asked: AtroposFeed) -> int:
    """Register with Atropos, keep groups in flight, and push the informative ones. Cancellation cancels the
    groups.

    Returns:
        number of pushed groups.

    Raises:
        AtroposRefused: the API server is unreachable, or refuses a request.
        InputError: there are no tasks, or the service refuses one.
        QueueFull, Unavailable: the service stays full or unreachable.
    """
    if not asked.tasks:
        raise InputError("there are no tasks", hint="give the environment's task rows")
    async with httpx.AsyncClient(base_url=asked.api, timeout=60, trust_env=False) as http:
        env_id = await _registered(http, asked)
        try:
            async with Rollouts(asked.url) as rollouts:
                return await _feed(http, rollouts, asked, env_id)
        finally:
            await _post(http, "/disconnect-env", {"env_id": env_id})


async def _feed(http: httpx.AsyncClient, rollouts: Rollouts, asked: AtroposFeed, env_id: int) -> int:
    asking = GroupTemplate(asked.url, asked.environment, asked.sampling, asked.limits)
    pushed = 0
    under_way: set[asyncio.Task[list[Result]]] = set()
    try:
        for number, task in enumerate(_stream(asked.tasks)):
            while len(under_way) >= asked.groups or await _behind(http, env_id, asked, len(under_way)):
                done, under_way = await _some(under_way)
                for group in done:
                    pushed += await _push(http, group.result(), asked, env_id)
            if asked.steps is not None and pushed >= asked.steps:
                break
            request = asking.group(f"{number}", task, asked.samples)
            under_way.add(asyncio.create_task(rollouts.group(request)))
    finally:
        for group in under_way:
            group.cancel()
        if under_way:
            await asyncio.wait(under_way)
    return pushed


async def _some(
    under_way: set[asyncio.Task[list[Result]]],
) -> tuple[set[asyncio.Task[list[Result]]], set[asyncio.Task[list[Result]]]]:
    if not under_way:
        await asyncio.sleep(LOOK_S)
        return set(), under_way
    return await asyncio.wait(under_way, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)


def _stream(tasks: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    for epoch in itertools.count():
        yield from random.Random(epoch).sample(list(tasks), len(tasks))


async def _registered(http: httpx.AsyncClient, asked: AtroposFeed) -> int:
    """Return the environment's id, after a trainer has connected."""
    body = {
        "max_token_length": asked.max_token_length,
        "desired_name": asked.environment,
        "weight": asked.weight,
        "group_size": asked.samples,
    }
    while True:
        answer = await _post(http, "/register-env", body)
        if answer.get("status") == "success":
            return int(answer["env_id"])
        logger.info("Atropos waits for its trainer")
        await asyncio.sleep(LOOK_S)


async def _behind(http: httpx.AsyncClient, env_id: int, asked: AtroposFeed, under_way: int) -> bool:
    """Return true if enough groups wait for the trainer, or are in flight."""
    status = await _call(http, "GET", "/status-env", {"env_id": env_id})
    batch = (await _call(http, "GET", "/info"))["batch_size"]
    waiting = (int(status.get("queue_size", 0)) + under_way) * asked.samples
    return bool(batch > 0 and waiting >= asked.max_batches_behind * max(batch, asked.samples))


async def _push(http: httpx.AsyncClient, results: Sequence[Result], asked: AtroposFeed, env_id: int) -> int:
    scored = as_scored_data(results, equal=asked.equal)
    if scored is None:
        return 0
    await _post(http, "/scored_data", scored | {"env_id": env_id})
    return 1


def as_scored_data(results: Sequence[Result], *, equal: bool = False) -> dict[str, Any] | None:
    """Convert a group to Atropos's `ScoredData`, without the environment's id. Episodes without a reward are
    omitted; Atropos keeps a smaller group until others complete it.

    Args:
        results: of one group.
        equal: also convert groups whose rewards are all equal.

    Returns:
        None if there is nothing to learn from the group.

    Raises:
        SeveralRows, NotContiguous.
    """
    rows = [row for row in map(one_row, results) if row.reward is not None and row.trains]
    if not rows or (not equal and spread([row.reward for row in rows]) == 0):
        return None
    return {
        "tokens": [row.prompt_ids + row.response_ids for row in rows],
        "masks": [
            [MASKED] * len(row.prompt_ids)
            + [token if bit else MASKED for token, bit in zip(row.response_ids, row.mask, strict=True)]
            for row in rows
        ],
        "scores": [row.reward for row in rows],
        "inference_logprobs": [
            [NOT_SAMPLED] * len(row.prompt_ids)
            + [p if bit else NOT_SAMPLED for p, bit in zip(row.logprobs, row.mask, strict=True)]
            for row in rows
        ],
        "messages": [[_message(message) for message in row.messages] for row in rows],
        "overrides": [{"job_id": row.job_id, "stop_reason": str(row.stop_reason)} for row in rows],
    }


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the message with a content, which Atropos requires; an answer that only calls tools has none."""
    return {**message, "content": message.get("content") or ""}


async def _post(http: httpx.AsyncClient, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    return await _call(http, "POST", path, body)


async def _call(
    http: httpx.AsyncClient, method: str, path: str, body: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    try:
        response = await http.request(method, path, json=body)
        response.raise_for_status()
        answer = response.json()
    except (httpx.HTTPError, ValueError) as error:
        raise AtroposRefused(f"{method} {path}: {error}", hint="is Atropos's run-api there?") from error
    return answer if isinstance(answer, dict) else {}
