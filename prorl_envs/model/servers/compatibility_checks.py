"""Checks, on a live server, of the features that rollouts need of a model server.

Each check is one sentence and one function. Some features are required for any rollout, others improve
rollouts; for a missing optional feature, the check names the consequence. No check changes a server, except
the pause checks, which run on request.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from prorl_envs.errors import ModelError
from prorl_envs.model.servers.detect import Servers
from prorl_envs.model.types import ControllableServer, ModelClient, Sampled, Sampling

_GREEDY = Sampling(temperature=0.0, max_tokens=8)
_AT_ONCE = 8
_TRIES = 12
#: Settings of a turn that is aborted (as long as a small context allows), and seconds before the abort.
_LONG = Sampling(max_tokens=1024)
_BEGUN_S = 0.3


class CheckState(StrEnum):
    KEPT = "kept"
    BROKEN = "broken"
    ABSENT = "absent"


class CheckFailed(Exception):
    """Failed check: rollouts with this server would be wrong; the message describes the observation."""


class Absent(Exception):
    """Missing optional feature; the message names the consequence."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Outcome of a check.

    Args:
        id, text: id and description of the check.
        state: outcome of the check.
        reason: observation, unless the state is KEPT.
        seconds: duration in seconds.
    """

    id: str
    text: str
    state: CheckState
    reason: str
    seconds: float


@dataclass(frozen=True, slots=True)
class CheckSubject:
    """A server under check.

    Args:
        client: client of the server.
        servers: makes clients with other stop ids.
        url: base URL of the server, with its protocol.
        prompt_ids: a prompt for the model, at least 2 ids.
    """

    client: ModelClient
    servers: Servers
    url: str
    prompt_ids: Sequence[int]

    def with_stops(self, *stop_ids: int) -> ModelClient:
        """Return another client of the same server, with these stop ids."""
        return replace(self.servers, stop_ids=stop_ids).connect(self.url)

    async def sample(self, sampling: Sampling, prompt_ids: Sequence[int] | None = None) -> Sampled:
        """Return one answer."""
        prompt = self.prompt_ids if prompt_ids is None else prompt_ids
        return await self.client.generate(prompt, sampling, session="check")


type Try = Callable[[CheckSubject], Awaitable[None]]

CHECKS: list[tuple[str, str, Try]] = []
PAUSE_CHECKS: list[tuple[str, str, Try]] = []


def _check(id_: str, text: str, into: list[tuple[str, str, Try]] = CHECKS) -> Callable[[Try], Try]:
    def add(run_check: Try) -> Try:
        into.append((id_, text, run_check))
        return run_check

    return add


async def check_server(
    subject: CheckSubject, *, pauses: bool = False, note: Callable[[Finding], None] = lambda _: None
) -> list[Finding]:
    """Run all checks, in order. Stop after the first check if it fails: no other check could pass.

    Args:
        subject: the server.
        pauses: also pause and resume the server. Its other users wait meanwhile.
        note: called with each finding when the check has finished.
    """
    findings: list[Finding] = []
    for id_, text, run_check in [*CHECKS, *(PAUSE_CHECKS if pauses else ())]:
        started = time.monotonic()
        state, reason = CheckState.KEPT, ""
        try:
            await run_check(subject)
        except Absent as error:
            state, reason = CheckState.ABSENT, str(error)
        except CheckFailed as error:
            state, reason = CheckState.BROKEN, str(error)
        except ModelError as error:
            hint = f" ({error.hint})" if error.hint else ""
            state, reason = CheckState.BROKEN, f"{error.message}{hint}"
        findings.append(Finding(id_, text, state, reason, time.monotonic() - started))
        note(findings[-1])
        if state is CheckState.BROKEN and len(findings) == 1:
            break
    return findings


@_check("L1", "It takes token ids, and returns sampled ids with a log-probability each.")
async def _ids(subject: CheckSubject) -> None:
    sampled = await subject.sample(Sampling(max_tokens=4))
    if not sampled.exact:
        raise CheckFailed("it returns text instead of ids: use it for evaluation, not for training")


@_check("L2", "A turn stops at the requested number of tokens, and its finish reason says so.")
async def _length(subject: CheckSubject) -> None:
    for limit in (1, 5):
        sampled = await subject.sample(Sampling(max_tokens=limit))
        if sampled.finish_reason == "length" and len(sampled.ids) != limit:
            raise CheckFailed(f"it stopped for length after {len(sampled.ids)} ids instead of {limit}")


@_check("L3", "A stop id ends a turn, and comes back as its last id.")
async def _stop(subject: CheckSubject) -> None:
    first = (await subject.sample(_GREEDY)).ids[0]
    client = subject.with_stops(first)
    try:
        sampled = await client.generate(subject.prompt_ids, _GREEDY, session="check")
    finally:
        await client.aclose()
    if sampled.ids != (first,) or sampled.finish_reason != "stop":
        raise CheckFailed(
            f"with the stop id {first}, it sampled {list(sampled.ids)[:8]} ({sampled.finish_reason})"
        )


@_check("L4", "Turns that are sampled concurrently do not mix up their prompts.")
async def _at_once(subject: CheckSubject) -> None:
    prompts = [[*subject.prompt_ids, *subject.prompt_ids[: number + 1]] for number in range(_AT_ONCE)]
    sequential = [await subject.sample(_GREEDY, prompt) for prompt in prompts[:2]]
    concurrent = await asyncio.gather(*(subject.sample(_GREEDY, prompt) for prompt in prompts))
    for before, now in zip(sequential, concurrent, strict=False):
        if before.ids[:1] != now.ids[:1]:
            raise Absent("the first greedy token depends on the load: answers cannot be repeated exactly")


@_check("L5", "Log-probabilities are those of the sampling policy, temperature included.")
async def _temperature(subject: CheckSubject) -> None:
    cold: dict[int, float] = {}
    for _ in range(_TRIES):
        sampled = await subject.sample(Sampling(temperature=0.6, max_tokens=1))
        cold[sampled.ids[0]] = sampled.logprobs[0]
    for _ in range(_TRIES):
        sampled = await subject.sample(Sampling(temperature=1.6, max_tokens=1))
        known = cold.get(sampled.ids[0])
        if known is not None and min(known, sampled.logprobs[0]) < -0.01:
            if abs(known - sampled.logprobs[0]) < 1e-4:
                raise Absent(
                    "they ignore the temperature: sample with temperature 1, or start vLLM with "
                    "--logprobs-mode processed_logprobs"
                )
            return
    raise Absent("no token was sampled at both temperatures, so this could not be checked")


@_check("L6", "A seed repeats an answer.")
async def _seed(subject: CheckSubject) -> None:
    seeded = Sampling(max_tokens=8, seed=7)
    if (await subject.sample(seeded)).ids != (await subject.sample(seeded)).ids:
        raise Absent("the answers differ, so samples with a seed cannot be repeated")


@_check("L7", "It reports how many prompt tokens it found in its cache.")
async def _cache(subject: CheckSubject) -> None:
    long = [*subject.prompt_ids] * (256 // len(subject.prompt_ids) + 1)
    await subject.sample(Sampling(max_tokens=1), long)
    cached = (await subject.sample(Sampling(max_tokens=1), long)).cached_tokens
    if cached is None:
        raise Absent("it does not (vLLM: --enable-prompt-tokens-details), so metrics have no hit rate")
    if not cached:
        raise Absent(
            "it found none of a prompt that was sent twice: is prefix caching on? turns will be slow"
        )


@_check("L8", "It names the version of its weights.")
async def _version(subject: CheckSubject) -> None:
    client = subject.client
    news = await client.look() if isinstance(client, ControllableServer) else None
    if not (news and news.weight_version) and not (await subject.sample(_GREEDY)).weight_version:
        raise Absent(
            "it does not (vLLM: VLLM_SERVER_DEV_MODE=1 and --enable-scale-out), so the version of the last "
            "`resume` is used"
        )


@_check("L9", "It can be paused during turns, and resumed.", PAUSE_CHECKS)
async def _pause(subject: CheckSubject) -> None:
    client = subject.client
    if not isinstance(client, ControllableServer) or not await client.pause("keep"):
        raise Absent(
            "it has no such route (vLLM: VLLM_SERVER_DEV_MODE=1), so the service only holds new turns"
        )
    await client.resume("")
    await subject.sample(_GREEDY)


@_check("L10", "A turn in flight can be aborted, and returns the tokens sampled so far.", PAUSE_CHECKS)
async def _abort(subject: CheckSubject) -> None:
    client = subject.with_stops()
    turn = asyncio.create_task(client.generate(subject.prompt_ids, _LONG, session="check"))
    try:
        await asyncio.wait([turn], timeout=_BEGUN_S)
        if not isinstance(client, ControllableServer) or not await client.pause("abort"):
            raise Absent(
                "it has no such route: turns in flight are disconnected, and their sampled tokens are lost"
            )
        try:
            sampled = await turn
        finally:
            await client.resume("")
    finally:
        turn.cancel()
        await asyncio.wait([turn])
        await client.aclose()
    if sampled.finish_reason != "abort":
        raise Absent("the turn finished before the abort, so this could not be checked")
