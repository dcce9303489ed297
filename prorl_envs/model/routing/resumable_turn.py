"""Turns that servers interrupt and continue, on the machine that holds the ids."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from prorl_envs.errors import ModelError
from prorl_envs.model.answer_checks import continued
from prorl_envs.model.types import (
    ChatClient,
    Conversation,
    Heard,
    ModelClient,
    Partial,
    Sampled,
    Sampling,
    Streaming,
)

#: Most parts of one turn: with more interruptions, it counts as failed.
MAX_PARTS = 16


async def in_parts(
    sample: Callable[[Sequence[int], Sampling, Heard | None], Awaitable[Sampled]],
    prompt_ids: Sequence[int],
    sampling: Sampling,
    resample: Callable[[], bool],
    heard: Heard | None = None,
) -> Sampled:
    """Sample a complete turn. Continue after an interruption (docs/decisions/model-servers.md).

    Args:
        sample: samples a part, given the context, the remaining sampling budget and a callback for partial
            answers.
        prompt_ids: the context of the whole turn.
        sampling: how to sample.
        resample: whether a part that is interrupted now is discarded.
        heard: receives the partial turn during sampling.

    Raises:
        ModelError: the turn was interrupted too often, or any that `sample` raises.
    """
    whole: Sampled | None = None
    for _ in range(MAX_PARTS):
        begun = whole.ids if whole else ()
        left = sampling.model_copy(update={"max_tokens": sampling.max_tokens - len(begun)})
        listener = _following(heard, whole) if heard is not None and whole is not None else heard
        part = await sample([*prompt_ids, *begun] if begun else prompt_ids, left, listener)
        whole = continued(whole, part) if whole else part
        if part.finish_reason != "abort":
            return whole
        if len(whole.ids) >= sampling.max_tokens:
            return replace(whole, finish_reason="length")
        if resample() or not whole.exact:
            whole = None
    raise ModelError(f"the model servers broke one turn off {MAX_PARTS} times")


async def sample_on(
    client: ModelClient,
    prompt_ids: Sequence[int],
    sampling: Sampling,
    session: str,
    conversation: Conversation | None,
    heard: Heard | None = None,
) -> Sampled:
    """Call one server once, in the form that it accepts: messages or ids, with or without streaming.

    Raises:
        ModelError: as `ModelClient.generate`.
    """
    if conversation is not None and isinstance(client, ChatClient):
        return await client.chat(conversation, sampling, session=session)
    if heard is not None and isinstance(client, Streaming):
        return await client.stream(prompt_ids, sampling, session=session, heard=heard)
    return await client.generate(prompt_ids, sampling, session=session)


def _following(heard: Heard, before: Sampled) -> Heard:
    """Return a callback that reports a part of a turn to `heard`, appended to the parts before it."""

    def report(part: Partial) -> None:
        version = before.weight_version or part.weight_version
        ids, logprobs = [*before.ids, *part.ids], [*before.logprobs, *part.logprobs]
        heard(Partial(ids, logprobs, version, part.server))

    return report
