"""The completions token protocol of vLLM: what is sent, and what an answer must hold to be believed.

Protocol: `POST /v1/completions` with token ids as the prompt and `return_token_ids`
(https://docs.vllm.ai/en/latest/serving/openai_compatible_server.html). Servers differ in where they put ids
and log-probabilities; every shape seen is read here, and everything is checked: an answer that is wrong in
one number would train the policy on something it never sampled.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from prorl_envs.errors import ModelError
from prorl_envs.policy.context import ids_json
from prorl_envs.policy.types import FinishReason, Sampled, Sampling

# A log-probability computed in low precision may come out slightly above 0.
_LOGPROB_SLACK = 1e-2
_TOKEN_ID = "token_id:"
_IDS_HINT = "the server must support return_token_ids (vLLM 0.10.2 or later)"
_LOGPROBS_HINT = "the server must return one log-probability for each sampled token"


class ServerUnavailable(ModelError):
    """The server cannot be reached, is overloaded or is failing; another server may do."""


class ProtocolError(ModelError):
    """The server answered, and its answer breaks the token protocol or refuses the request."""


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


class _ContentItem(msgspec.Struct):
    logprob: float | None = None
    token: str = ""
    token_id: int | None = None


class _Logprobs(msgspec.Struct):
    tokens: list[str] | None = None
    token_logprobs: list[float | None] | None = None
    content: list[_ContentItem] | None = None


class _Choice(msgspec.Struct):
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: msgspec.Raw = msgspec.Raw(b"null")  # as long as the history: seldom worth reading
    logprobs: _Logprobs | None = None
    weight_version: str | int | None = None


class _Meta(msgspec.Struct):
    weight_version: str | int | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice]
    weight_version: str | int | None = None
    meta_info: _Meta | None = None


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


def encode_request(
    model: str, prompt_ids: Sequence[int], sampling: Sampling, stop_ids: Sequence[int]
) -> bytes:
    """The body of one completion request.

    The settings a model's generation_config.json would change behind our back (top_k, min_p, penalties) are
    sent with neutral values: otherwise the server samples from another policy than the trainer computes.
    """
    body: dict[str, object] = {
        "model": model,
        "prompt": msgspec.Raw(ids_json(prompt_ids)),
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "n": 1,
        "stream": False,
        "logprobs": 1,
        "stop_token_ids": list(stop_ids),
        "skip_special_tokens": False,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    if sampling.seed is not None:
        body["seed"] = sampling.seed
    return msgspec.json.encode(body)


def read_models(body: bytes, server: str) -> str:
    """The first model a server names in `/v1/models`.

    Raises:
        ProtocolError: it names none.
    """
    try:
        models = msgspec.json.decode(body, type=_Models).data
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"{server}/v1/models is not a list of models: {error}") from error
    if not models:
        raise ProtocolError(f"{server} serves no model", hint="is a model still being loaded?")
    return models[0].id


def read_answer(body: bytes, expected: Expectation) -> Sampled:
    """Read and check one completion.

    Raises:
        ProtocolError: anything in it is missing, of the wrong type, or impossible.
    """
    try:
        answer = msgspec.json.decode(body, type=_Answer)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ProtocolError(f"{expected.server} did not answer with a completion: {error}") from error
    if len(answer.choices) != 1:
        raise ProtocolError(f"{expected.server} answered with {len(answer.choices)} choices instead of one")
    choice = answer.choices[0]
    _check_prompt(choice, expected)
    ids = _sampled_ids(choice, expected)
    logprobs = _sampled_logprobs(choice, len(ids), expected)
    return Sampled(
        ids=ids,
        logprobs=logprobs,
        finish_reason=_finish_reason(choice, len(ids), expected),
        weight_version=_weight_version(answer, choice),
        server=expected.server,
    )


def _check_prompt(choice: _Choice, expected: Expectation) -> None:
    if bytes(choice.prompt_token_ids) in (b"null", ids_json(expected.prompt_ids)):
        return  # compared as text, which is the same where a server writes no white space
    try:
        echoed = msgspec.json.decode(choice.prompt_token_ids, type=list[int])
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"{expected.server} did not answer with a completion: {error}") from error
    if echoed != list(expected.prompt_ids):
        raise ProtocolError(
            f"{expected.server} read another prompt than it was sent"
            f" ({len(echoed)} ids instead of {len(expected.prompt_ids)})",
            hint="does it add special tokens, or truncate prompts?",
        )


def _sampled_ids(choice: _Choice, expected: Expectation) -> tuple[int, ...]:
    ids = choice.token_ids
    if ids is None:
        ids = _ids_in_tokens(choice.logprobs)
    if ids is None:
        raise ProtocolError(f"{expected.server} did not return the sampled token ids", hint=_IDS_HINT)
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


def _ids_in_tokens(logprobs: _Logprobs | None) -> list[int] | None:
    """Ids from tokens written as `token_id:123`, the older way of returning them."""
    if logprobs is None:
        return None
    if logprobs.content and all(item.token_id is not None for item in logprobs.content):
        return [item.token_id for item in logprobs.content if item.token_id is not None]
    tokens = logprobs.tokens if logprobs.tokens is not None else [i.token for i in logprobs.content or ()]
    numbers = [token.removeprefix(_TOKEN_ID) for token in tokens if token.startswith(_TOKEN_ID)]
    if not tokens or len(numbers) != len(tokens):
        return None
    if not all(number.isascii() and number.isdigit() and len(number) < 12 for number in numbers):
        return None
    return [int(number) for number in numbers]


def _sampled_logprobs(choice: _Choice, count: int, expected: Expectation) -> tuple[float, ...]:
    values: Sequence[float | None] | None = None
    if choice.logprobs is not None:
        values = choice.logprobs.token_logprobs
        if values is None and choice.logprobs.content is not None:
            values = [item.logprob for item in choice.logprobs.content]
    if values is None and count == 0:
        return ()
    if values is None or len(values) != count:
        found = "no" if values is None else str(len(values))
        raise ProtocolError(
            f"{expected.server} returned {found} log-probabilities for {count} ids", hint=_LOGPROBS_HINT
        )
    numbers = [value for value in values if value is not None and math.isfinite(value)]
    if len(numbers) != count or any(value > _LOGPROB_SLACK for value in numbers):
        raise ProtocolError(f"{expected.server} returned an impossible log-probability", hint=_LOGPROBS_HINT)
    return tuple(min(value, 0.0) for value in numbers)


def _finish_reason(choice: _Choice, count: int, expected: Expectation) -> FinishReason:
    match choice.finish_reason:
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


def _weight_version(answer: _Answer, choice: _Choice) -> str:
    meta = answer.meta_info.weight_version if answer.meta_info else None
    named = (choice.weight_version, answer.weight_version, meta)
    return next((str(version) for version in named if version is not None), "")
