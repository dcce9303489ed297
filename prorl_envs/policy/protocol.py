"""What every answer in token ids is held against, and the errors of what does not hold.

An answer that is wrong in one number would train the policy on something it never sampled, so everything is
checked. How a kind of server spells its answers is in that server's own module.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from prorl_envs.errors import ModelError
from prorl_envs.policy.types import FinishReason, Sampled, Sampling, VersionSpan

# A log-probability computed in low precision may come out slightly above 0.
_LOGPROB_SLACK = 1e-2
# What vLLM writes in place of a log-probability that it does not have, or that is no number.
_NONE_KNOWN = -9999.0
#: Most stretches of versions in one answer.
MAX_SPANS = 64
MAX_VERSION = 200
LOGPROBS_HINT = "the server must return one log-probability for each sampled token"


class ServerUnavailable(ModelError):
    """The server cannot be reached, is overloaded or is failing; another server may do."""


class Overloaded(ServerUnavailable):
    """The server has too much to do: it answered 429 or 503 to the last attempt."""


class ProtocolError(ModelError):
    """The server answered, and its answer breaks the token protocol or refuses the request."""


class Refusal(ProtocolError):
    """The server refuses a request.

    Args:
        message, hint: as of every error.
        status: of its HTTP answer.
    """

    def __init__(self, message: str, *, hint: str = "", status: int) -> None:
        super().__init__(message, hint=hint)
        self.status = status

    @property
    def unknown_route(self) -> bool:
        """The server has nothing at this path."""
        return self.status in (404, 405)


@dataclass(frozen=True, slots=True)
class Expectation:
    """What an answer is held against.

    Args:
        prompt_ids: the prompt that was sent.
        max_tokens: most ids that may come back.
        vocab_size: ids lie in [0, vocab_size); None where it is not known.
        server: base URL, for messages and for the record.
    """

    prompt_ids: Sequence[int]
    max_tokens: int
    vocab_size: int | None
    server: str


class WireSpan(msgspec.Struct):
    """A stretch of versions, as vLLM and SGLang write it."""

    version: str | int
    start: int
    end: int


def neutral_sampling(sampling: Sampling) -> dict[str, Any]:
    """The settings both vLLM and SGLang know by these names.

    Those which a model's generation_config.json would change behind our back (top_k, min_p, penalties) are
    sent with neutral values: otherwise the server samples from another policy than the trainer computes.
    """
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "n": 1,
    }


def check_ids(ids: Sequence[int], expected: Expectation) -> tuple[int, ...]:
    """Sampled ids that can be.

    Raises:
        ProtocolError: too many of them, or one outside the vocabulary.
    """
    if len(ids) > expected.max_tokens:
        raise ProtocolError(f"{expected.server} returned {len(ids)} ids, {expected.max_tokens} were asked")
    limit = expected.vocab_size
    strange = next((number for number in ids if number < 0 or (limit is not None and number >= limit)), None)
    if strange is not None:
        raise ProtocolError(
            f"{expected.server} returned the id {strange}, which is outside the vocabulary of {limit}",
            hint="is it serving the model whose tokenizer is in use?",
        )
    return tuple(ids)


def check_logprobs(
    values: Sequence[float | None] | None, count: int, expected: Expectation
) -> tuple[float, ...]:
    """One possible log-probability for each of `count` ids.

    Raises:
        ProtocolError: another number of them, or one that is missing, infinite, no number or positive.
    """
    if values is None and count == 0:
        return ()
    if values is None or len(values) != count:
        found = "no" if values is None else str(len(values))
        raise ProtocolError(
            f"{expected.server} returned {found} log-probabilities for {count} ids", hint=LOGPROBS_HINT
        )
    numbers = [value for value in values if value is not None and math.isfinite(value)]
    if len(numbers) != count or not all(_NONE_KNOWN < value <= _LOGPROB_SLACK for value in numbers):
        raise ProtocolError(f"{expected.server} returned an impossible log-probability", hint=LOGPROBS_HINT)
    return tuple(min(value, 0.0) for value in numbers)


def check_finish(reason: str | None, count: int, expected: Expectation) -> FinishReason:
    """Why sampling ended.

    Raises:
        ProtocolError: a reason that is not known, or nothing was sampled and it ended in order.
    """
    match reason:
        case "stop" if count > 0:
            return "stop"
        case "length" if count > 0:
            return "length"
        case "abort":
            return "abort"
        case "stop" | "length":
            raise ProtocolError(f"{expected.server} returned no ids", hint="is the prompt too long for it?")
        case other:
            raise ProtocolError(f"{expected.server} ended a turn for an unknown reason: {str(other)[:40]!r}")


def check_spans(spans: Sequence[WireSpan], count: int, expected: Expectation) -> tuple[VersionSpan, ...]:
    """Stretches of versions that cover all ids without a gap; none where one version sampled everything.

    Raises:
        ProtocolError: they do not, or there are too many.
    """
    edges = [0, *(span.end for span in spans)]
    whole = all(span.start == edge and span.end >= edge for span, edge in zip(spans, edges[:-1], strict=True))
    if not whole or edges[-1] != count or len(spans) > MAX_SPANS:
        raise ProtocolError(f"{expected.server} returned weight versions that do not cover the answer")
    filled = [span for span in spans if span.end > span.start]
    return joined_spans(
        [VersionSpan(version=version_name(s.version), start=s.start, end=s.end) for s in filled]
    )


def joined_spans(spans: Sequence[VersionSpan]) -> tuple[VersionSpan, ...]:
    """Neighbours of one version become one stretch; a single stretch says nothing and becomes none."""
    joined: list[VersionSpan] = []
    for span in spans:
        if joined and joined[-1].version == span.version:
            joined[-1] = joined[-1].model_copy(update={"end": span.end})
        else:
            joined.append(span)
    return tuple(joined) if len(joined) > 1 else ()


def version_name(version: str | int | None) -> str:
    """A version as text, of bounded length."""
    return "" if version is None else str(version)[:MAX_VERSION]


def continued(first: Sampled, second: Sampled) -> Sampled:
    """One turn out of two answers: the second went on where the first had been broken off."""
    at = len(first.ids)
    spans = [*_spans(first, 0), *_spans(second, at)]
    return Sampled(
        ids=first.ids + second.ids,
        logprobs=first.logprobs + second.logprobs,
        finish_reason=second.finish_reason,
        weight_version=first.weight_version if at else second.weight_version,
        server=second.server,
        version_spans=joined_spans(spans),
        cached_tokens=first.cached_tokens if at else second.cached_tokens,
        exact=first.exact and second.exact,
    )


def _spans(sampled: Sampled, at: int) -> list[VersionSpan]:
    whole = VersionSpan(version=sampled.weight_version, start=0, end=len(sampled.ids))
    return [
        VersionSpan(version=span.version, start=at + span.start, end=at + span.end)
        for span in sampled.version_spans or (whole,)
        if span.end > span.start
    ]
