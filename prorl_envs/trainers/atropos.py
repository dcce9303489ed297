"""Atropos (0.4): sends groups of the rollout service to Atropos's API server, as an Atropos environment does.

    asyncio.run(feed(AtroposFeed("http://127.0.0.1:8000", "http://127.0.0.1:8600", "bash", task_rows)))

It works with any trainer that reads batches from this API. `atroposlib` is not needed, since the API is HTTP.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from prorl_envs.errors import InputError, ProrlError
from prorl_envs.model.types import Sampling
from prorl_envs.rollout.api.types import AgentLimits, Result
from prorl_envs.trainers.advantages import spread
from prorl_envs.trainers.asking import GroupTemplate, keep_in_flight, shuffled
from prorl_envs.trainers.rollouts import Rollouts
from prorl_envs.trainers.rows import one_row

logger = logging.getLogger(__name__)

#: Atropos's mask value for tokens without loss, and its log-probability for tokens that were not sampled.
MASKED, NOT_SAMPLED = -100, 1.0
#: Seconds between two requests for the state of Atropos's queue, or of its trainer.
POLL_S = 1.0


class AtroposRefused(ProrlError):
    """Error: Atropos's server refused a request, or is unreachable."""


@dataclass(frozen=True, slots=True)
class AtroposFeed:
    """Configuration of a feed.

    Args:
        api: base URL of Atropos's API server.
        url: base URL of the rollout service. Its token is read from `$PRORL_SERVER__TOKEN`.
        environment: name of the tasks' environment at the service.
        tasks: task rows of the environment; repeated without end, each time in a new random order.
        samples: number of episodes in a group.
        groups: maximum number of groups in flight.
        max_batches_behind: maximum number of batches in Atropos's queue; if there are more, no group starts.
            This limits staleness, because Atropos does not know which weight version sampled a group.
        max_token_length: maximum length of a sequence, as in the trainer.
        weight: this environment's share of a batch, relative to other environments.
        equal: also push groups with equal rewards.
        sampling, limits: settings of the groups; None uses the service's.
        steps: number of groups to push; None means no limit.
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


async def feed(config: AtroposFeed) -> int:
    """Register with Atropos, keep groups in flight, and push informative groups. If this call is cancelled,
    it cancels the groups in flight.

    Returns:
        The number of pushed groups.

    Raises:
        AtroposRefused: the API server is unreachable, or refuses a request.
        InputError: there are no tasks, or the service refuses a task.
        QueueFull, Unavailable: the service stays full or unreachable.
    """
    if not config.tasks:
        raise InputError("there are no tasks", hint="give the environment's task rows")
    async with httpx.AsyncClient(base_url=config.api, timeout=60, trust_env=False) as http:
        env_id = await _register(http, config)
        try:
            async with Rollouts(config.url) as rollouts:
                return await _feed(http, rollouts, config, env_id)
        finally:
            await _post(http, "/disconnect-env", {"env_id": env_id})


async def _feed(http: httpx.AsyncClient, rollouts: Rollouts, config: AtroposFeed, env_id: int) -> int:
    template = GroupTemplate(config.url, config.environment, config.sampling, config.limits)
    tasks = enumerate(shuffled(config.tasks))
    pushed = 0

    async def push(number: int, task: Mapping[str, Any]) -> None:
        nonlocal pushed
        results = await rollouts.group(template.group(f"{number}", task, config.samples))
        scored = as_scored_data(results, equal=config.equal)
        if scored is not None:
            await _post(http, "/scored_data", scored | {"env_id": env_id})
            pushed += 1

    def start() -> asyncio.Task[None] | None:
        if config.steps is not None and pushed >= config.steps:
            return None
        return asyncio.create_task(push(*next(tasks)))

    async def must_wait(in_flight: int) -> bool:
        return in_flight >= config.groups or await _is_behind(http, env_id, config, in_flight)

    await keep_in_flight(start, must_wait, POLL_S)
    return pushed


async def _register(http: httpx.AsyncClient, config: AtroposFeed) -> int:
    """Register the environment once Atropos has a trainer. Return the environment's id."""
    body = {
        "max_token_length": config.max_token_length,
        "desired_name": config.environment,
        "weight": config.weight,
        "group_size": config.samples,
    }
    while True:
        answer = await _post(http, "/register-env", body)
        if answer.get("status") == "success":
            return int(answer["env_id"])
        logger.info("Atropos is waiting for its trainer")
        await asyncio.sleep(POLL_S)


async def _is_behind(http: httpx.AsyncClient, env_id: int, config: AtroposFeed, in_flight: int) -> bool:
    """Return True if the groups in Atropos's queue and in flight fill `max_batches_behind` batches."""
    status = await _call(http, "GET", "/status-env", {"env_id": env_id})
    batch = (await _call(http, "GET", "/info"))["batch_size"]
    waiting = (int(status.get("queue_size", 0)) + in_flight) * config.samples
    return bool(batch > 0 and waiting >= config.max_batches_behind * max(batch, config.samples))


def as_scored_data(results: Sequence[Result], *, equal: bool = False) -> dict[str, Any] | None:
    """Convert a group to Atropos's `ScoredData`, without the environment's id. Episodes without a reward are
    omitted; Atropos combines smaller groups.

    Args:
        results: results of one group.
        equal: also convert groups with equal rewards.

    Returns:
        The data, or None if there is nothing to learn from the group.

    Raises:
        SeveralRows, NotContiguous: see `one_row`.
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
    """Return the message with a content. Atropos requires it, but answers with only tool calls have none."""
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
        raise AtroposRefused(f"{method} {path}: {error}", hint="is Atropos's run-api running?") from error
    return answer if isinstance(answer, dict) else {}
