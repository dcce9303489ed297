"""Checks of answers that consist of token ids, and the errors of model servers.

An answer with one wrong number would train the policy on tokens it never sampled, so everything is checked.
The wire format of each kind of server is in that server's own module.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from prorl_envs.errors import ModelError
from prorl_envs.model.types import FinishReason, Sampled, Sampling, VersionSpan, joined_spans, spans_at

# A log-probability that is computed in low precision may be slightly above 0.
_LOGPROB_SLACK = 1e-2
# vLLM's placeholder for a log-probability that is missing or NaN.
_MISSING_LOGPROB = -9999.0
#: Maximum version spans in one answer, and maximum characters of a version.
MAX_SPANS = 64
MAX_VERSION = 200
LOGPROBS_HINT = "the server must return one log-probability for each sampled token"


class ServerUnavailable(ModelError):
    """Server that cannot be reached, is overloaded or is failing; another server may work."""


class Overloaded(ServerUnavailable):
    """Overload of the server: it answered 429 or 503 to the last attempt."""


class ProtocolError(ModelError):
    """Answer that breaks the token protocol or refuses the request."""


class Refusal(ProtocolError):
    """Refusal of a request by the server.

    Args:
        message, hint: as for every error.
        status: status of the HTTP answer; 0 if another machine sent the request.
    """

    def __init__(self, message: str, *, hint: str = "", status: int = 0) -> None:
        super().__init__(message, hint=hint)
        self.status = status

    @property
    def unknown_route(self) -> bool:
        """True if the server has no such route."""
        return self.status in (404, 405)


class RouteRefused(Refusal, ServerUnavailable):
    """Refusal of the route or the client, regardless of the request; another server may work."""


class NotAModelServer(ProtocolError, ServerUnavailable):
    """Answer from a URL at which no supported model server runs; another server may work."""


@dataclass(frozen=True, slots=True)
class RequestContract:
    """Request properties that an answer must match.

    Args:
        prompt_ids: the prompt that was sent.
        max_tokens: maximum ids in the answer.
        vocab_size: ids lie in [0, vocab_size); None if unknown.
        server: base URL of the server, for error messages and for the answer.
    """

    prompt_ids: Sequence[int]
    max_tokens: int
    vocab_size: int | None
    server: str

    def cached(self, count: int | None) -> int | None:
        """Return the reported number of cached prompt tokens; None if it is not possible."""
        return count if count is not None and 0 <= count <= len(self.prompt_ids) else None


class WireSpan(msgspec.Struct):
    """A span of one weight version, as vLLM and SGLang write it."""

    version: str | int
    start: int
    end: int


def neutral_sampling(sampling: Sampling) -> dict[str, Any]:
    """Return the sampling settings that vLLM and SGLang share under the same names.

    Settings that a model's generation_config.json would silently change (top_k, min_p, penalties) are sent
    with neutral values. Otherwise the server would sample from another policy than the trainer computes.
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


def decoded[T](body: bytes, kind: type[T], problem: str) -> T:
    """Decode the JSON of a server.

    Raises:
        ProtocolError: it has another format; the message is `problem` and the reason.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ProtocolError(f"{problem}: {error}") from error


def check_ids(ids: Sequence[int], expected: RequestContract) -> tuple[int, ...]:
    """Check the sampled ids.

    Raises:
        ProtocolError: there are too many ids, or an id is outside the vocabulary.
    """
    if len(ids) > expected.max_tokens:
        raise ProtocolError(
            f"{expected.server} returned {len(ids)} ids, {expected.max_tokens} were requested"
        )
    limit = expected.vocab_size
    invalid = next((number for number in ids if number < 0 or (limit is not None and number >= limit)), None)
    if invalid is not None:
        raise ProtocolError(
            f"{expected.server} returned the id {invalid}, which is outside the vocabulary of {limit}",
            hint="is it serving the model whose tokenizer is in use?",
        )
    return tuple(ids)


def check_logprobs(
    values: Sequence[float | None] | None, count: int, expected: RequestContract
) -> tuple[float, ...]:
    """Check that each of `count` ids has one possible log-probability.

    Raises:
        ProtocolError: the number of values differs, or a value is missing, infinite, NaN or positive.
    """
    if values is None and count == 0:
        return ()
    if values is None or len(values) != count:
        found = "no" if values is None else str(len(values))
        raise ProtocolError(
            f"{expected.server} returned {found} log-probabilities for {count} ids", hint=LOGPROBS_HINT
        )
    numbers = [value for value in values if value is not None and math.isfinite(value)]
    if len(numbers) != count or not all(_MISSING_LOGPROB < value <= _LOGPROB_SLACK for value in numbers):
        raise ProtocolError(f"{expected.server} returned an impossible log-probability", hint=LOGPROBS_HINT)
    return tuple(min(value, 0.0) for value in numbers)


def check_finish(reason: str | None, count: int, expected: RequestContract) -> FinishReason:
    """Return the reason why sampling stopped.

    Raises:
        ProtocolError: the reason is unknown, or the answer is empty without having been aborted.
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


def check_spans(spans: Sequence[WireSpan], count: int, expected: RequestContract) -> tuple[VersionSpan, ...]:
    """Return version spans that cover all ids without a gap; none if one version sampled everything.

    Raises:
        ProtocolError: the spans have a gap or an overlap, or there are too many.
    """
    edges = [0, *(span.end for span in spans)]
    adjacent = all(
        span.start == edge and span.end >= edge for span, edge in zip(spans, edges[:-1], strict=True)
    )
    if not adjacent or edges[-1] != count or len(spans) > MAX_SPANS:
        raise ProtocolError(f"{expected.server} returned weight versions that do not cover the answer")
    filled = [span for span in spans if span.end > span.start]
    return _several(VersionSpan(version=version_name(s.version), start=s.start, end=s.end) for s in filled)


def _several(spans: Iterable[VersionSpan]) -> tuple[VersionSpan, ...]:
    """Join adjacent spans of one version. If a single span remains, it is redundant, so return none."""
    joined = joined_spans(spans)
    return tuple(joined) if len(joined) > 1 else ()


def version_name(version: str | int | None) -> str:
    """Return a version as text of bounded length; "" for None."""
    return "" if version is None else str(version)[:MAX_VERSION]


def continued(first: Sampled, second: Sampled) -> Sampled:
    """Join two answers into one turn. The first was interrupted, and the second continues it."""
    count = len(first.ids)
    spans = [
        *spans_at(0, count, first.weight_version, first.version_spans),
        *spans_at(count, len(second.ids), second.weight_version, second.version_spans),
    ]
    return Sampled(
        ids=first.ids + second.ids,
        logprobs=first.logprobs + second.logprobs,
        finish_reason=second.finish_reason,
        weight_version=first.weight_version if count else second.weight_version,
        server=second.server,
        version_spans=_several(spans),
        cached_tokens=first.cached_tokens if count else second.cached_tokens,
        exact=first.exact and second.exact,
    )
