"""Sampling of turns that servers may interrupt. Runs on the machine that holds the ids."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from prorl_envs.errors import ModelError
from prorl_envs.model.answer_checks import continued
from prorl_envs.model.servers.chat import OpenAIChatClient
from prorl_envs.model.types import (
    Conversation,
    ModelClient,
    OnPartial,
    Partial,
    Sampled,
    Sampling,
    Streaming,
)

#: Maximum parts of one turn; a turn with more interruptions fails.
MAX_PARTS = 16


async def in_parts(
    sample: Callable[[Sequence[int], Sampling, OnPartial | None], Awaitable[Sampled]],
    prompt_ids: Sequence[int],
    sampling: Sampling,
    resample: Callable[[], bool],
    on_partial: OnPartial | None = None,
) -> Sampled:
    """Sample a complete turn. Continue after an interruption (docs/decisions/model-servers.md).

    Args:
        sample: samples a part, given the context, the remaining sampling budget and a callback for partial
            answers.
        prompt_ids: the context of the whole turn.
        sampling: sampling settings of the whole turn.
        resample: returns True if the ids of an interrupted part are discarded.
        on_partial: receives the partial turn during sampling.

    Raises:
        ModelError: the turn was interrupted too often, or `sample` raised the error.
    """
    turn: Sampled | None = None
    for _ in range(MAX_PARTS):
        sampled = turn.ids if turn else ()
        remaining = sampling.model_copy(update={"max_tokens": sampling.max_tokens - len(sampled)})
        listener = _following(on_partial, turn) if on_partial is not None and turn is not None else on_partial
        part = await sample([*prompt_ids, *sampled] if sampled else prompt_ids, remaining, listener)
        turn = continued(turn, part) if turn else part
        if part.finish_reason != "abort":
            return turn
        if len(turn.ids) >= sampling.max_tokens:
            return replace(turn, finish_reason="length")
        if resample() or not turn.exact:
            turn = None
    raise ModelError(f"the model servers interrupted one turn {MAX_PARTS} times")


async def sample_on(
    client: ModelClient,
    prompt_ids: Sequence[int],
    sampling: Sampling,
    session: str,
    conversation: Conversation | None,
    on_partial: OnPartial | None = None,
) -> Sampled:
    """Call a server once: with messages or ids, with or without streaming, as the server supports it.

    Raises:
        ModelError: as `ModelClient.generate`.
    """
    if conversation is not None and isinstance(client, OpenAIChatClient):
        return await client.chat(conversation, sampling, session=session)
    if on_partial is not None and isinstance(client, Streaming):
        return await client.stream(prompt_ids, sampling, session=session, on_partial=on_partial)
    return await client.generate(prompt_ids, sampling, session=session)


def _following(on_partial: OnPartial, before: Sampled) -> OnPartial:
    """Return a callback that reports a part of a turn to `on_partial`, appended to the parts before it."""

    def report(part: Partial) -> None:
        version = before.weight_version or part.weight_version
        ids, logprobs = [*before.ids, *part.ids], [*before.logprobs, *part.logprobs]
        on_partial(Partial(ids, logprobs, version, part.server))

    return report
