"""One llama.cpp server, spoken to in token ids by its native interface.

Protocol: `POST /completion` with ids as the prompt, `return_tokens` and `n_probs`
(https://github.com/ggml-org/llama.cpp/blob/master/tools/server/README.md). What is peculiar about it:

- Its stream ends with an event that has no ids, and counts all that it sampled.
- An id that ends within a character has no probability, and is left out of streams: such an answer is
  refused.
- It stops at the ends of turns that its GGUF file names, and cannot be told of others by id. What it samples
  behind a stop id of ours is cut off here, which changes no token before.
- Of a character that is not whole it may sample the rest beyond the limit; that is cut off as well.
- Sampling settings left out are its own defaults (top_k 40, min_p 0.05), so the whole chain is named.
- It has no routes for pauses and versions of weights.
- Some versions answer 500 where the text of what was sampled is not UTF-8 throughout, and lose it
  (https://github.com/ggml-org/llama.cpp/issues/27543). Sampling again until it is would be another policy.
"""

import math
from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from prorl_envs.policy.clients import TokenClient, Unsteered
from prorl_envs.policy.context import ids_json
from prorl_envs.policy.link import session_headers
from prorl_envs.policy.protocol import (
    Expectation,
    ProtocolError,
    ServerUnavailable,
    check_finish,
    check_ids,
    check_logprobs,
)
from prorl_envs.policy.streams import Events
from prorl_envs.policy.types import FinishReason, Heard, Sampled, Sampling

#: Its name for what ended a turn, and ours.
_FINISH: dict[str, FinishReason] = {"eos": "stop", "limit": "length"}
#: What it says where it lost an answer whose text is not UTF-8.
_LOST = "does not match the expected Content-only format"
_SKIPPED = "it gives no probability for an id that ends within a character"
#: Seeds are 32 bits there, and the last one means none.
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
    """Samples turns from one server. Implements `ModelClient`, `Streaming` and `Steerable`.

    Args: as of `TokenClient`.
    """

    protocol = "llamacpp"

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str) -> Sampled:
        """See `ModelClient.generate`. Where the caller leaves, the server notices the closed connection.

        Raises:
            ServerUnavailable: no answer within the attempts.
            ProtocolError: the server refuses the request, or its answer breaks the token protocol.
        """
        answer = await self._ask(encode_request(prompt_ids, sampling), session)
        return read_answer(answer, self._expected(prompt_ids, sampling), self._stop_ids)

    async def stream(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str, heard: Heard
    ) -> Sampled:
        """See `Streaming.stream`.

        Raises:
            ServerUnavailable, ProtocolError: as `generate`.
        """
        events = CompletionEvents(heard, self._expected(prompt_ids, sampling), self._stop_ids)
        await self._ask(encode_request(prompt_ids, sampling, stream=True), session, events)
        return events.whole()

    async def _ask(self, body: bytes, session: str, events: "CompletionEvents | None" = None) -> bytes:
        headers = session_headers(session)
        try:
            return await self._link.request("POST", "/completion", body, headers, events, final=_LOST)
        except ServerUnavailable as error:
            if _LOST not in error.message:
                raise
            raise _lost(self.url) from error


def encode_request(prompt_ids: Sequence[int], sampling: Sampling, *, stream: bool = False) -> bytes:
    """The body of one request."""
    body: dict[str, Any] = {
        "prompt": msgspec.Raw(ids_json(prompt_ids)),
        "n_predict": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "samplers": ["temperature", "top_p"],  # no other one is applied, and in the order of other servers
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


def read_answer(body: bytes, expected: Expectation, stop_ids: Collection[int]) -> Sampled:
    """Read and check one answer of `/completion`.

    Raises:
        ProtocolError: anything in it is missing, of the wrong type, or impossible.
    """
    answer = _decoded(body, expected)
    ids, cut = _until_stop(answer.tokens, expected.max_tokens, stop_ids)
    return _judged(answer, ids, _values(answer, expected)[: len(ids)], cut, expected)


class CompletionEvents(Events):
    """An answer of `/completion` as events, each with what is new.

    Args:
        heard, expected: see `Events`.
        stop_ids: as `read_answer`.
    """

    def __init__(self, heard: Heard, expected: Expectation, stop_ids: Collection[int]) -> None:
        self._stop_ids = stop_ids
        super().__init__(heard, expected)

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
            room = self._expected.max_tokens - len(self._partial.ids)
            ids, self._cut = _until_stop(answer.tokens, room, self._stop_ids)
            self._sampled(ids, _values(answer, self._expected)[: len(ids)], "")
        if answer.stop_type:
            self._last, self._ended = answer, True

    def _judged(self) -> Sampled:
        if self._last.tokens_predicted not in (None, self._count):
            raise ProtocolError(f"{self._expected.server} left ids out of its stream", hint=_SKIPPED)
        self._last.tokens_predicted = self._count
        partial = self._partial
        return _judged(self._last, partial.ids, partial.logprobs, self._cut, self._expected)


def _decoded(body: bytes, expected: Expectation) -> _Answer:
    try:
        return msgspec.json.decode(body, type=_Answer)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ProtocolError(f"{expected.server} did not answer as llama.cpp does: {error}") from error


def _values(answer: _Answer, expected: Expectation) -> list[float | None]:
    """The log-probabilities of its ids.

    Raises:
        ProtocolError: they are of others.
    """
    probabilities = answer.completion_probabilities or []
    if [each.id for each in probabilities] != answer.tokens[: len(probabilities)]:
        raise ProtocolError(
            f"{expected.server} gave the log-probabilities of other ids than it sampled", hint=_SKIPPED
        )
    return [_logarithm(each.prob) for each in probabilities]


def _judged(
    answer: _Answer,
    ids: Sequence[int],
    logprobs: Sequence[float | None],
    cut: FinishReason | None,
    expected: Expectation,
) -> Sampled:
    """The whole answer, checked.

    Args:
        answer: what there is about it.
        ids, logprobs: of what counts of it.
        cut: why that ends before what was sampled does.
        expected: what it is held against.
    """
    _check_context(answer, expected)
    checked = check_ids(ids, expected)
    cached = answer.timings.cache_n if answer.timings else None
    return Sampled(
        ids=checked,
        logprobs=check_logprobs(logprobs, len(checked), expected),
        finish_reason=check_finish(
            cut or _FINISH.get(answer.stop_type, answer.stop_type), len(ids), expected
        ),
        weight_version="",
        server=expected.server,
        cached_tokens=cached if cached is not None and 0 <= cached <= len(expected.prompt_ids) else None,
    )


def _lost(url: str) -> ProtocolError:
    hint = "its text was not UTF-8: see issue 27543 of llama.cpp, and try another version of it"
    return ProtocolError(f"{url} lost what it had sampled", hint=hint)


def _check_context(answer: _Answer, expected: Expectation) -> None:
    """Raises: ProtocolError: the model did not see the prompt as it was sent, or not to its end."""
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
    ids: list[int], most: int, stop_ids: Collection[int]
) -> tuple[list[int], FinishReason | None]:
    """The ids up to the first stop id, or to the most there may be; and why they end there, if they go on."""
    for at, number in enumerate(ids[:most]):
        if number in stop_ids:
            return ids[: at + 1], "stop"
    return ids[:most], "length" if len(ids) > most else None


def _logarithm(probability: float | None) -> float | None:
    """None where there is none, or it is impossible for a sampled id."""
    return math.log(probability) if probability is not None and probability > 0 else None
