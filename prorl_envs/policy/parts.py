"""A turn that servers break off and go on with, and one call of a server: what happens where the ids are."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from prorl_envs.errors import ModelError
from prorl_envs.policy.protocol import continued
from prorl_envs.policy.types import (
    ChatClient,
    Conversation,
    Heard,
    ModelClient,
    Partial,
    Sampled,
    Sampling,
    Streaming,
)

#: How often one turn may be broken off and go on before it counts as failed.
MAX_PARTS = 16


async def in_parts(
    sample: Callable[[Sequence[int], Sampling, Heard | None], Awaitable[Sampled]],
    prompt_ids: Sequence[int],
    sampling: Sampling,
    resample: Callable[[], bool],
    heard: Heard | None = None,
) -> Sampled:
    """Sample a turn to its end. Where it is broken off it goes on from what was sampled (0027 in
    docs/decisions).

    Args:
        sample: samples a part, given the context, how much is left, and who is told of it meanwhile.
        prompt_ids: the context of the whole turn.
        sampling: how to sample.
        resample: whether a part that was broken off now is thrown away.
        heard: told of the turn while it is sampled.

    Raises:
        ModelError: it was broken off too often, or what `sample` raises.
    """
    whole: Sampled | None = None
    for _ in range(MAX_PARTS):
        begun = whole.ids if whole else ()
        left = sampling.model_copy(update={"max_tokens": sampling.max_tokens - len(begun)})
        told = _following(heard, whole) if heard is not None and whole is not None else heard
        part = await sample([*prompt_ids, *begun] if begun else prompt_ids, left, told)
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
    """One call of one server, in the terms that it takes.

    Raises:
        ModelError: as `ModelClient.generate`.
    """
    if conversation is not None and isinstance(client, ChatClient):
        return await client.chat(conversation, sampling, session=session)
    if heard is not None and isinstance(client, Streaming):
        return await client.stream(prompt_ids, sampling, session=session, heard=heard)
    return await client.generate(prompt_ids, sampling, session=session)


def _following(heard: Heard, before: Sampled) -> Heard:
    """Tells `heard` of a part of a turn as of what comes behind the parts before it."""

    def told(part: Partial) -> None:
        version = before.weight_version or part.weight_version
        ids, logprobs = [*before.ids, *part.ids], [*before.logprobs, *part.logprobs]
        heard(Partial(ids, logprobs, version, part.server))

    return told
