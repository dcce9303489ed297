"""Client of a llama.cpp server that uses token ids in its native interface.

Protocol: `POST /completion` with ids as the prompt, `return_tokens` and `n_probs`
(https://github.com/ggml-org/llama.cpp/blob/master/tools/server/README.md). Peculiarities:

- The last event of its stream has no ids, and counts all sampled ids.
- An id that ends within a character has no probability, and is omitted from streams. The client refuses such
  answers.
- It stops at the turn ends that its GGUF file names, and accepts no further stop ids. Ids after one of our
  stop ids are cut off here, which changes no earlier token.
- To complete a partial character, it may sample beyond the limit; those ids are cut off as well.
- Omitted sampling settings take its own defaults (top_k 40, min_p 0.05), so the whole sampler chain is sent.
- It has no routes for pauses and weight versions.
- Some versions answer 500 if the sampled text is not valid UTF-8, and lose the text
  (https://github.com/ggml-org/llama.cpp/issues/27543). Resampling until it is valid would change the policy.
"""

import math
from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from prorl_envs.model.answer_checks import (
    ProtocolError,
    RequestContract,
    ServerUnavailable,
    check_finish,
    check_ids,
    check_logprobs,
    decoded,
)
from prorl_envs.model.http.client import session_headers
from prorl_envs.model.http.event_stream import Events
from prorl_envs.model.servers.base import TokenClient, Unsteered
from prorl_envs.model.types import FinishReason, OnPartial, Sampled, Sampling

#: llama.cpp's finish reasons, and ours.
_FINISH: dict[str, FinishReason] = {"eos": "stop", "limit": "length"}
#: Part of the server's error message if it lost an answer because the text is not UTF-8.
_LOST = "does not match the expected Content-only format"
_SKIPPED = "it gives no probability for an id that ends within a character"
#: Seeds have 32 bits in llama.cpp, and the largest value means none.
_SEEDS = 2**32 - 1


class _Probability(msgspec.Struct):
    id: int
    prob: float | None = None


class _Timings(msgspec.Struct):
    cache_n: int | None = None


class _Answer(msgspec.Struct):
    tokens: list[int]
    stop_type: str = ""
    completion_probabilities: list[_Probability] | None = None
    tokens_predicted: int | None = None
    tokens_evaluated: int | None = None
    truncated: bool = False
    timings: _Timings | None = None


class LlamaCppClient(TokenClient, Unsteered):
    """Client that samples turns. Implements `ModelClient`, `Streaming` and `ControllableServer`.

    Args: those of `TokenClient`.
    """

    protocol = "llamacpp"

    async def _send(
        self, prompt_ids: Sequence[int], sampling: Sampling, session: str, events: Events | None = None
    ) -> bytes:
        body = encode_request(prompt_ids, sampling, stream=events is not None)
        headers = session_headers(session)
        try:
            return await self._link.request("POST", "/completion", body, headers, events, final=_LOST)
        except ServerUnavailable as error:
            if _LOST not in error.message:
                raise
            raise _lost(self.url) from error

    def _read(self, answer: bytes, expected: RequestContract) -> Sampled:
        return read_answer(answer, expected, self._stop_ids)

    def _events(self, on_partial: OnPartial, expected: RequestContract) -> Events:
        return LlamaCppEvents(on_partial, expected, self._stop_ids)


def encode_request(prompt_ids: Sequence[int], sampling: Sampling, *, stream: bool = False) -> bytes:
    """Return the body of one request."""
    body: dict[str, Any] = {
        "prompt": list(prompt_ids),
        "n_predict": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "samplers": ["temperature", "top_p"],  # only these, in the order of other servers
        "seed": -1 if sampling.seed is None else sampling.seed % _SEEDS,
        "return_tokens": True,
        "n_probs": 1,
        "post_sampling_probs": True,
        "cache_prompt": True,
        "stream": stream,
        "response_fields": [
            "tokens",
            "stop_type",
            "completion_probabilities",
            "tokens_predicted",
            "tokens_evaluated",
            "truncated",
            "timings",
        ],
    }
    return msgspec.json.encode(body)


def read_answer(body: bytes, expected: RequestContract, stop_ids: Collection[int]) -> Sampled:
    """Read and check one answer of `/completion`.

    Raises:
        ProtocolError: a part of the answer is missing, has a wrong type, or is impossible.
    """
    answer = _decoded(body, expected)
    ids, cut = _until_stop(answer.tokens, expected.max_tokens, stop_ids)
    return _judged(answer, ids, _values(answer, expected)[: len(ids)], cut, expected)


class LlamaCppEvents(Events):
    """Reader of a `/completion` answer that arrives as events, each with the new ids.

    Args:
        on_partial, expected: see `Events`.
        stop_ids: ids that stop a turn.
    """

    def __init__(self, on_partial: OnPartial, expected: RequestContract, stop_ids: Collection[int]) -> None:
        self._stop_ids = stop_ids
        super().__init__(on_partial, expected)

    def begin(self) -> None:
        """See `Events.begin`."""
        self._last = _Answer([])
        self._cut: FinishReason | None = None
        self._count = 0
        super().begin()

    def _take(self, event: bytes) -> None:
        if event.startswith(b'{"error"') and _LOST.encode() in event:
            raise _lost(self._expected.server)
        super()._take(event)

    def _read(self, event: bytes) -> None:
        answer = _decoded(event, self._expected)
        self._count += len(answer.tokens)
        if self._cut is None:
            remaining = self._expected.max_tokens - len(self._partial.ids)
            ids, self._cut = _until_stop(answer.tokens, remaining, self._stop_ids)
            self._add_sampled(ids, _values(answer, self._expected)[: len(ids)], "")
        if answer.stop_type:
            self._last, self._ended = answer, True

    def _judged(self) -> Sampled:
        if self._last.tokens_predicted not in (None, self._count):
            raise ProtocolError(f"{self._expected.server} left ids out of its stream", hint=_SKIPPED)
        self._last.tokens_predicted = self._count
        partial = self._partial
        return _judged(self._last, partial.ids, partial.logprobs, self._cut, self._expected)


def _decoded(body: bytes, expected: RequestContract) -> _Answer:
    return decoded(body, _Answer, f"{expected.server} did not answer as llama.cpp does")


def _values(answer: _Answer, expected: RequestContract) -> list[float | None]:
    """Return the log-probabilities of the answer's ids.

    Raises:
        ProtocolError: they belong to other ids.
    """
    probabilities = answer.completion_probabilities or []
    if [item.id for item in probabilities] != answer.tokens[: len(probabilities)]:
        raise ProtocolError(
            f"{expected.server} gave the log-probabilities of other ids than it sampled", hint=_SKIPPED
        )
    return [_logarithm(item.prob) for item in probabilities]


def _judged(
    answer: _Answer,
    ids: Sequence[int],
    logprobs: Sequence[float | None],
    cut: FinishReason | None,
    expected: RequestContract,
) -> Sampled:
    """Check the complete answer and return it.

    Args:
        answer: the server's data about the answer.
        ids, logprobs: ids up to the first stop id or the limit, and their log-probabilities.
        cut: the reason if further sampled ids were cut off, or None.
        expected: request properties that the answer must match.
    """
    _check_context(answer, expected)
    checked = check_ids(ids, expected)
    return Sampled(
        ids=checked,
        logprobs=check_logprobs(logprobs, len(checked), expected),
        finish_reason=check_finish(
            cut or _FINISH.get(answer.stop_type, answer.stop_type), len(ids), expected
        ),
        weight_version="",
        server=expected.server,
        cached_tokens=expected.cached(answer.timings.cache_n if answer.timings else None),
    )


def _lost(url: str) -> ProtocolError:
    hint = "its text was not UTF-8: see issue 27543 of llama.cpp, and try another version of it"
    return ProtocolError(f"{url} lost what it had sampled", hint=hint)


def _check_context(answer: _Answer, expected: RequestContract) -> None:
    """Check that the model read the whole prompt as it was sent, and kept it until the last token.

    Raises:
        ProtocolError: the model read another number of ids, or dropped a part of the context.
    """
    sent = len(expected.prompt_ids)
    if answer.tokens_evaluated not in (None, sent):
        raise ProtocolError(
            f"{expected.server} read {answer.tokens_evaluated} prompt ids, {sent} were sent",
            hint="does it add a token, or truncate prompts?",
        )
    sampled = len(answer.tokens) if answer.tokens_predicted is None else answer.tokens_predicted
    if answer.truncated and (answer.stop_type != "limit" or sampled >= expected.max_tokens):
        raise ProtocolError(
            f"{expected.server} dropped a part of the context while it sampled",
            hint="start it without --context-shift, or with a larger --ctx-size",
        )


def _until_stop(
    ids: list[int], limit: int, stop_ids: Collection[int]
) -> tuple[list[int], FinishReason | None]:
    """Return the ids up to the first stop id or the limit, and the reason for the cut, or None."""
    for index, number in enumerate(ids[:limit]):
        if number in stop_ids:
            return ids[: index + 1], "stop"
    return ids[:limit], "length" if len(ids) > limit else None


def _logarithm(probability: float | None) -> float | None:
    """Return the logarithm; None if the probability is missing or not positive."""
    return math.log(probability) if probability is not None and probability > 0 else None
