"""Rollouts of NeMo Gym rows by a rollout service, for our agent server and our environment server.

NeMo Gym repeats a request whose connection broke, and a resumed run repeats its unfinished rows. With the
setting `run_id`, a rollout's id in the service consists of the run, NeMo Gym's id of the attempt and a digest
of the request, so a repeated request gets the result of the first one, whatever failed in between. NeMo Gym's
ids alone do not suffice: each run numbers its rows from 0-0.
"""

# mypy: allow-subclassing-any, no-warn-return-any, disable-error-code="import-not-found,import-untyped"
# NeMo Gym is an optional extra and ships no types.

import asyncio
import contextlib
import hashlib
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

from nemo_gym.openai_utils import NeMoGymResponse
from pydantic import BaseModel, Field, ValidationError

from prorl_envs.errors import InputError
from prorl_envs.nemo.responses import output_items, usage
from prorl_envs.nemo.rows import task_row
from prorl_envs.rollout.api.errors import NotFound, Unavailable
from prorl_envs.rollout.api.types import AgentLimits, GroupRequest, JobState, Result
from prorl_envs.tools.types import JsonObject
from prorl_envs.trainers.rollouts import Rollouts

#: Seconds within which a running service answers.
AWAY_S = 30.0


class RolloutSettings(BaseModel):
    """Settings of a server that has its rollouts run by a rollout service.

    Args:
        service: base URL of the rollout service. Its bearer token is read from `$PRORL_SERVER__TOKEN`.
        environment: the service's environment to which the tasks of the rows belong.
        limits: limits of the agent loop, as in the service's API.
        run_id: name of the evaluation or training run, different for each run. Then a repeated request gets
            the result of the first one. "": each request is a rollout of its own.
    """

    service: str
    environment: str
    limits: AgentLimits = AgentLimits()
    run_id: str = Field(default="", max_length=80, pattern=r"^[A-Za-z0-9._:\-]*$", coerce_numbers_to_str=True)


class RowRollouts:
    """Rollouts of rows. Use it within `serving`; `connection` is the connection to the service."""

    def __init__(self, settings: RolloutSettings) -> None:
        self._settings = settings
        self._running: dict[str, asyncio.Task[Result]] = {}

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Connect to the service while the context is open."""
        async with Rollouts(self._settings.service) as self.connection:
            yield
            for running in self._running.values():
                running.cancel()

    async def result(
        self, row: Mapping[str, Any], attempt_id: str | None, *, timeout_s: float | None
    ) -> Result:
        """Run a rollout of a row, or return the result of an earlier request for it. If this call is
        cancelled, the rollout continues if it can be requested again, and otherwise is cancelled.

        Args:
            row: its task and its `responses_create_params` are read; `attempt_id`: see there.
            timeout_s: seconds after which the rollout is cancelled, including its time in the queue.

        Raises:
            InputError: the row is invalid, or the service refuses it.
            QueueFull, Unavailable: the service stays full or unreachable.
        """
        group, repeatable = self._group(row, attempt_id)
        try:
            await self.connection.ready(AWAY_S)
        except (InputError, TimeoutError) as error:
            where = self._settings.service
            raise Unavailable(f"the rollout service at {where} does not answer: {error}") from error
        if not repeatable:
            [result] = await self.connection.group(group, timeout_s=timeout_s)
            return result
        if (running := self._running.get(group.id)) is None:
            running = self._running[group.id] = asyncio.create_task(self._repeatable(group, timeout_s))
            running.add_done_callback(lambda _: self._running.pop(group.id))
        return await asyncio.shield(running)

    async def _repeatable(self, group: GroupRequest, timeout_s: float | None) -> Result:
        with contextlib.suppress(NotFound):  # a cancelled rollout has no result to return: run another one
            while (await self.connection.client.group(group.id)).jobs[0].state is JobState.CANCELLED:
                group = group.model_copy(update={"id": f"{group.id}:again"})
        [result] = await self.connection.group(group, timeout_s=timeout_s, keep=True)
        return result

    def _group(self, row: Mapping[str, Any], attempt_id: str | None) -> tuple[GroupRequest, bool]:
        """Return the request to the service, and whether it has the same id if it is made again."""
        settings, params = self._settings, row["responses_create_params"]
        names = {"temperature": "temperature", "top_p": "top_p", "max_output_tokens": "max_tokens"}
        fields = {
            "environment": settings.environment,
            "task": dict(task_row(row)),
            "sampling": {name: params[key] for key, name in names.items() if params.get(key) is not None},
            "limits": settings.limits.model_dump(exclude_unset=True),
        }
        name = uuid4().hex
        if repeatable := bool(settings.run_id and attempt_id):
            content = json.dumps([settings.run_id, attempt_id, fields], sort_keys=True)
            name = f"{settings.run_id}-{attempt_id}-{hashlib.sha256(content.encode()).hexdigest()[:16]}"
        try:
            return GroupRequest.model_validate({"id": f"nemo-{name}", **fields}), repeatable
        except ValidationError as error:
            first = error.errors()[0]
            raise InputError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error


def attempt_id(row: Mapping[str, Any]) -> str | None:
    """Return NeMo Gym's id of an attempt of a row, such as `0-3` or `0-3-a1`; None if the row has no id."""
    rollout_id, attempt = row.get("_ng_rollout_id"), row.get("_ng_attempt_index")
    if rollout_id is None and {"_ng_task_index", "_ng_rollout_index"} <= row.keys():
        rollout_id = f"{row['_ng_task_index']}-{row['_ng_rollout_index']}"
    return f"{rollout_id}-a{attempt}" if rollout_id and attempt else rollout_id


def response(result: Result, model: str | None) -> NeMoGymResponse:
    """Return the model's answers and their observations, with the tokens of each model call.

    Raises:
        NotContiguous: the episode has more than one row of tokens.
    """
    body = {
        "id": f"resp-{result.job_id}",
        "created_at": int(time.time()),
        "model": model or "policy",
        "object": "response",
        "output": output_items(result),
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [{"type": "function", "strict": False, **tool["function"]} for tool in result.tools],
        "usage": usage(result.trajectory),
    }
    return NeMoGymResponse.model_validate(body)


def verdict(result: Result) -> JsonObject:
    """Return our fields of a verify response. `reward` is None if there is none."""
    return {
        "environment": result.environment,
        "task_id": result.task_id,
        "reward": result.reward,
        "mask_sample": result.mask_sample,
        "reward_components": result.components,
        "evidence": result.evidence,
    }
