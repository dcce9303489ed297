"""Wire format of vLLM: encoding of requests and decoding of answers, both with token ids.

The routes differ in the place of log-probabilities and versions; both formats are read here.
"""

from collections.abc import Sequence

import msgspec

from prorl_envs.model.answer_checks import (
    ProtocolError,
    RequestContract,
    WireSpan,
    check_finish,
    check_ids,
    check_logprobs,
    check_spans,
    decoded,
    neutral_sampling,
    version_name,
)
from prorl_envs.model.http.event_stream import Events
from prorl_envs.model.types import Sampled, Sampling, VersionSpan

_IDS_HINT = "the server must support return_token_ids (vLLM 0.10.2 or later)"


class _ContentItem(msgspec.Struct):
    logprob: float | None = None


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float | None] | None = None
    content: list[_ContentItem] | None = None


class _Choice(msgspec.Struct):
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: msgspec.Raw = msgspec.Raw(b"null")  # as long as the history, so rarely parsed
    logprobs: _Logprobs | None = None
    weight_version: str | int | None = None
    weight_versions: list[WireSpan] | None = None


class _Meta(msgspec.Struct):
    weight_version: str | int | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _Details | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice]
    prompt_token_ids: msgspec.Raw = msgspec.Raw(b"null")
    weight_version: str | int | None = None
    weight_versions: list[WireSpan] | None = None
    meta_info: _Meta | None = None
    usage: _Usage | None = None


def encode_request(
    model: str,
    prompt_ids: Sequence[int],
    sampling: Sampling,
    stop_ids: Sequence[int],
    *,
    generate: bool = False,
    stream: bool = False,
) -> bytes:
    """Return the body of one completion request; with `generate`, for the route that reports versions."""
    params = {
        **neutral_sampling(sampling),
        "max_tokens": sampling.max_tokens,
        "stop_token_ids": list(stop_ids),
        **({} if sampling.seed is None else {"seed": sampling.seed}),
    }
    body: dict[str, object] = {"model": model, "return_token_ids": True, "stream": stream}
    if generate:
        params |= {"logprobs": 0, "detokenize": False}  # log-probabilities of the sampled tokens only
        body |= {"token_ids": list(prompt_ids), "sampling_params": params}
    else:
        body |= {"prompt": list(prompt_ids), **params, "logprobs": 1, "skip_special_tokens": False}
    if stream:
        body["stream_options"] = {"include_usage": True}
    return msgspec.json.encode(body)


def read_answer(body: bytes, expected: RequestContract) -> Sampled:
    """Read and check one completion.

    Raises:
        ProtocolError: a part of the answer is missing, has a wrong type, or is impossible.
    """
    return _checked(_decoded(body, expected), expected)


class CompletionEvents(Events):
    """Reader of a completion that arrives as events, each with the ids since the previous event."""

    def begin(self) -> None:
        """See `Events.begin`."""
        self._merged = _Answer([])
        super().begin()

    def _read(self, event: bytes) -> None:
        answer = _decoded(event, self._expected)
        for choice in answer.choices:
            if choice.token_ids:
                self._add_sampled(
                    choice.token_ids, _sampled_logprobs(choice), _weight_version(answer, choice)
                )
        _merge(self._merged, answer)

    def _judged(self) -> Sampled:
        return _checked(self._merged, self._expected)


def _decoded(body: bytes, expected: RequestContract) -> _Answer:
    return decoded(body, _Answer, f"{expected.server} did not answer with a completion")


def _merge(total: _Answer, event: _Answer) -> None:
    """Merge an event of a stream into `total`. Fields that occur once apply to the whole answer."""
    total.weight_version = event.weight_version if event.weight_version is not None else total.weight_version
    total.meta_info = event.meta_info or total.meta_info
    total.usage = event.usage or total.usage
    total.weight_versions = event.weight_versions or total.weight_versions
    if not event.choices:
        return
    new = event.choices[0]
    if not total.choices:
        total.choices.append(new)
        return
    choice = total.choices[0]
    choice.finish_reason = new.finish_reason or choice.finish_reason
    choice.weight_version = new.weight_version if new.weight_version is not None else choice.weight_version
    choice.weight_versions = new.weight_versions or choice.weight_versions
    choice.token_ids = _extended(choice.token_ids, new.token_ids)
    if choice.logprobs is None or new.logprobs is None:
        choice.logprobs = choice.logprobs or new.logprobs
        return
    choice.logprobs.content = _extended(choice.logprobs.content, new.logprobs.content)
    choice.logprobs.token_logprobs = _extended(choice.logprobs.token_logprobs, new.logprobs.token_logprobs)


def _extended[T](known: list[T] | None, new: list[T] | None) -> list[T] | None:
    if known is None or new is None:
        return known if new is None else new
    known.extend(new)
    return known


def _checked(answer: _Answer, expected: RequestContract) -> Sampled:
    if len(answer.choices) != 1:
        raise ProtocolError(f"{expected.server} answered with {len(answer.choices)} choices instead of one")
    choice = answer.choices[0]
    for echo in (choice.prompt_token_ids, answer.prompt_token_ids):
        _check_prompt(echo, expected)
    ids = _sampled_ids(choice, expected)
    logprobs = check_logprobs(_sampled_logprobs(choice), len(ids), expected)
    spans = _version_spans(answer, choice, len(ids), expected)
    return Sampled(
        ids=ids,
        logprobs=logprobs,
        finish_reason=check_finish(choice.finish_reason, len(ids), expected),
        weight_version=spans[0].version if spans else _weight_version(answer, choice),
        server=expected.server,
        version_spans=spans,
        cached_tokens=_cached_tokens(answer, expected),
    )


def _check_prompt(echo: msgspec.Raw, expected: RequestContract) -> None:
    if bytes(echo) == b"null" or bytes(echo) == msgspec.json.encode(list(expected.prompt_ids)):
        return  # without parsing, which takes 9 ms for 128,000 ids, if the server writes no white space
    echoed = decoded(bytes(echo), list[int], f"{expected.server} did not answer with a completion")
    if echoed != list(expected.prompt_ids):
        raise ProtocolError(
            f"{expected.server} read another prompt than it was sent"
            f" ({len(echoed)} ids instead of {len(expected.prompt_ids)})",
            hint="does it add special tokens, or truncate prompts?",
        )


def _sampled_ids(choice: _Choice, expected: RequestContract) -> tuple[int, ...]:
    if choice.token_ids is None:
        raise ProtocolError(f"{expected.server} did not return the sampled token ids", hint=_IDS_HINT)
    return check_ids(choice.token_ids, expected)


def _sampled_logprobs(choice: _Choice) -> Sequence[float | None] | None:
    if choice.logprobs is None:
        return None
    if choice.logprobs.token_logprobs is None and choice.logprobs.content is not None:
        return [item.logprob for item in choice.logprobs.content]
    return choice.logprobs.token_logprobs


def _weight_version(answer: _Answer, choice: _Choice) -> str:
    meta = answer.meta_info.weight_version if answer.meta_info else None
    given = (choice.weight_version, answer.weight_version, meta)
    spans = choice.weight_versions or answer.weight_versions or ()
    return next(
        (version_name(version) for version in (*given, *(s.version for s in spans)) if version is not None),
        "",
    )


def _version_spans(
    answer: _Answer, choice: _Choice, count: int, expected: RequestContract
) -> tuple[VersionSpan, ...]:
    spans = choice.weight_versions if choice.weight_versions is not None else answer.weight_versions
    return check_spans(spans, count, expected) if spans else ()


def _cached_tokens(answer: _Answer, expected: RequestContract) -> int | None:
    """Return the number of cached prompt tokens, if it is reported and possible."""
    details = answer.usage.prompt_tokens_details if answer.usage else None
    return expected.cached(details.cached_tokens if details else None)


def read_version(body: bytes) -> str:
    """Return the weight version in an answer of `/weight_info`; "" if it names none."""
    try:
        return version_name(decoded(body, _Meta, "").weight_version)
    except ProtocolError:
        return ""
