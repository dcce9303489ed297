"""What a model server has to do for rollouts, tried out on a live one.

Each check is one sentence and one function. Some are needed for any rollout, some only make more of one; what
a server lacks of the latter is said with what follows from it. Nothing here changes a server, but for the
check of pauses, which is tried on request.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from prorl_envs.errors import ModelError
from prorl_envs.policy.servers import Servers
from prorl_envs.policy.types import ModelClient, Sampled, Sampling, Steerable

_GREEDY = Sampling(temperature=0.0, max_tokens=8)
_AT_ONCE = 8
_TRIES = 12
#: As long a turn as a small context allows, to be ended in the middle, and how long it may have begun before.
_LONG = Sampling(max_tokens=1024)
_BEGUN_S = 0.3


class State(StrEnum):
    KEPT = "kept"
    BROKEN = "broken"
    ABSENT = "absent"


class Broken(Exception):
    """Rollouts cannot be trusted; the message says what was seen."""


class Absent(Exception):
    """Rollouts go on without it; the message says with what consequence."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What came of a check.

    Args:
        id, text: of the check.
        state: what came of it.
        reason: what was seen, unless it is kept.
        seconds: it took.
    """

    id: str
    text: str
    state: State
    reason: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Subject:
    """A server under check.

    Args:
        client: speaks to it.
        servers: makes clients with other stop ids.
        url: its base URL, its protocol included.
        prompt_ids: a prompt of the model's, at least 2 ids.
    """

    client: ModelClient
    servers: Servers
    url: str
    prompt_ids: Sequence[int]

    def with_stops(self, *stop_ids: int) -> ModelClient:
        """Another client of the same server, that knows these stop ids."""
        return replace(self.servers, stop_ids=stop_ids).connect(self.url)

    async def sample(self, sampling: Sampling, prompt_ids: Sequence[int] | None = None) -> Sampled:
        """One answer."""
        prompt = self.prompt_ids if prompt_ids is None else prompt_ids
        return await self.client.generate(prompt, sampling, session="check")


type Try = Callable[[Subject], Awaitable[None]]

CHECKS: list[tuple[str, str, Try]] = []
PAUSE_CHECKS: list[tuple[str, str, Try]] = []


def _check(id_: str, text: str, into: list[tuple[str, str, Try]] = CHECKS) -> Callable[[Try], Try]:
    def add(tried: Try) -> Try:
        into.append((id_, text, tried))
        return tried

    return add


async def check_server(
    subject: Subject, *, pauses: bool = False, note: Callable[[Finding], None] = lambda _: None
) -> list[Finding]:
    """Try everything, in order. Ends after the first check if that is broken: nothing else could hold.

    Args:
        subject: the server.
        pauses: pause and resume it, too. Whoever else uses it waits meanwhile.
        note: told of each finding as it comes.
    """
    findings: list[Finding] = []
    for id_, text, tried in [*CHECKS, *(PAUSE_CHECKS if pauses else ())]:
        started = time.monotonic()
        state, reason = State.KEPT, ""
        try:
            await tried(subject)
        except Absent as error:
            state, reason = State.ABSENT, str(error)
        except Broken as error:
            state, reason = State.BROKEN, str(error)
        except ModelError as error:
            state, reason = State.BROKEN, f"{error.message} ({error.hint})" if error.hint else error.message
        findings.append(Finding(id_, text, state, reason, time.monotonic() - started))
        note(findings[-1])
        if state is State.BROKEN and len(findings) == 1:
            break
    return findings


@_check("L1", "It takes token ids, and returns sampled ids with a log-probability each.")
async def _ids(subject: Subject) -> None:
    sampled = await subject.sample(Sampling(max_tokens=4))
    if not sampled.exact:
        raise Broken("it gives text: good for evaluation, never for training")


@_check("L2", "A turn ends at the asked number of tokens, and says so.")
async def _length(subject: Subject) -> None:
    for most in (1, 5):
        sampled = await subject.sample(Sampling(max_tokens=most))
        if sampled.finish_reason == "length" and len(sampled.ids) != most:
            raise Broken(f"{len(sampled.ids)} ids, cut at the length, where {most} were asked for")


@_check("L3", "A stop id ends a turn, and comes back as its last id.")
async def _stop(subject: Subject) -> None:
    first = (await subject.sample(_GREEDY)).ids[0]
    client = subject.with_stops(first)
    try:
        sampled = await client.generate(subject.prompt_ids, _GREEDY, session="check")
    finally:
        await client.aclose()
    if sampled.ids != (first,) or sampled.finish_reason != "stop":
        raise Broken(
            f"asked to stop at {first}, it sampled {list(sampled.ids)[:8]} ({sampled.finish_reason})"
        )


@_check("L4", "Turns that are sampled at once are each of their own prompt.")
async def _at_once(subject: Subject) -> None:
    prompts = [[*subject.prompt_ids, *subject.prompt_ids[: number + 1]] for number in range(_AT_ONCE)]
    alone = [await subject.sample(_GREEDY, prompt) for prompt in prompts[:2]]
    together = await asyncio.gather(*(subject.sample(_GREEDY, prompt) for prompt in prompts))
    for one, other in zip(alone, together, strict=False):
        if one.ids[:1] != other.ids[:1]:
            raise Absent("the first greedy token differs with the load: answers cannot be repeated exactly")


@_check("L5", "Log-probabilities are those of the sampling policy, temperature included.")
async def _temperature(subject: Subject) -> None:
    cold: dict[int, float] = {}
    for _ in range(_TRIES):
        sampled = await subject.sample(Sampling(temperature=0.6, max_tokens=1))
        cold[sampled.ids[0]] = sampled.logprobs[0]
    for _ in range(_TRIES):
        sampled = await subject.sample(Sampling(temperature=1.6, max_tokens=1))
        same = cold.get(sampled.ids[0])
        if same is not None and min(same, sampled.logprobs[0]) < -0.01:
            if abs(same - sampled.logprobs[0]) < 1e-4:
                raise Absent(
                    "they are those before temperature: sample with temperature 1, or start vLLM with "
                    "--logprobs-mode processed_logprobs"
                )
            return
    raise Absent("no token came twice, so it could not be seen")


@_check("L6", "A seed repeats an answer.")
async def _seed(subject: Subject) -> None:
    asked = Sampling(max_tokens=8, seed=7)
    if (await subject.sample(asked)).ids != (await subject.sample(asked)).ids:
        raise Absent("it does not: samples with a seed cannot be repeated")


@_check("L7", "It says how much of a prompt it found in its cache.")
async def _cache(subject: Subject) -> None:
    long = [*subject.prompt_ids] * (256 // len(subject.prompt_ids) + 1)
    await subject.sample(Sampling(max_tokens=1), long)
    cached = (await subject.sample(Sampling(max_tokens=1), long)).cached_tokens
    if cached is None:
        raise Absent("it does not say (vLLM: --enable-prompt-tokens-details): no hit rate in metrics")
    if not cached:
        raise Absent("nothing of a prompt sent twice: is prefix caching on? turns will be slow")


@_check("L8", "It names the version of its weights.")
async def _version(subject: Subject) -> None:
    client = subject.client
    news = await client.look() if isinstance(client, Steerable) else None
    if not (news and news.weight_version) and not (await subject.sample(_GREEDY)).weight_version:
        raise Absent(
            "it does not (vLLM: VLLM_SERVER_DEV_MODE=1 and --enable-scale-out): the version of the last "
            "`resume` counts"
        )


@_check("L9", "It can be paused within turns, and goes on.", PAUSE_CHECKS)
async def _pause(subject: Subject) -> None:
    client = subject.client
    if not isinstance(client, Steerable) or not await client.pause("keep"):
        raise Absent("it cannot be told (vLLM: VLLM_SERVER_DEV_MODE=1): turns are held here instead")
    await client.resume("")
    await subject.sample(_GREEDY)


@_check("L10", "A turn in flight ends when it is told to, and gives what it had sampled.", PAUSE_CHECKS)
async def _abort(subject: Subject) -> None:
    client = subject.with_stops()
    turn = asyncio.create_task(client.generate(subject.prompt_ids, _LONG, session="check"))
    try:
        await asyncio.wait([turn], timeout=_BEGUN_S)
        if not isinstance(client, Steerable) or not await client.pause("abort"):
            raise Absent("it cannot be told: such turns are hung up on, and what they had sampled is lost")
        try:
            sampled = await turn
        finally:
            await client.resume("")
    finally:
        turn.cancel()
        await asyncio.wait([turn])
        await client.aclose()
    if sampled.finish_reason != "abort":
        raise Absent("it could not be seen: the turn was over before")
