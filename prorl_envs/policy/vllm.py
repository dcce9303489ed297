"""One vLLM server, spoken to in token ids.

Protocol: `POST /v1/completions` with token ids as the prompt and `return_token_ids`
(https://docs.vllm.ai/en/latest/serving/openai_compatible_server.html). Versions differ in where they put ids
and log-probabilities; every shape seen is read here. A server that was started with `--enable-scale-out` also
has `/inference/v1/generate`, which alone says which tokens were sampled by which version of the weights, and
is preferred. `/pause`, `/resume`, `/weight_info` and `/update_weight_version` exist on servers that run with
`VLLM_SERVER_DEV_MODE=1`.
"""

import asyncio
from collections.abc import Sequence
from typing import Unpack

import msgspec

from prorl_envs.errors import ModelError
from prorl_envs.policy.context import ids_json
from prorl_envs.policy.link import LinkOptions, ServerLink, first_model, session_headers
from prorl_envs.policy.protocol import (
    Expectation,
    ProtocolError,
    Refusal,
    WireSpan,
    check_finish,
    check_ids,
    check_logprobs,
    check_spans,
    neutral_sampling,
    version_name,
)
from prorl_envs.policy.types import InFlight, Sampled, Sampling, ServerNews, VersionSpan

_TOKEN_ID = "token_id:"
_GENERATE = "/inference/v1/generate"
_METHOD_NOT_ALLOWED = 405
_IDS_HINT = "the server must support return_token_ids (vLLM 0.10.2 or later)"
#: What it calls the ways to treat requests in flight.
_PAUSE_MODES: dict[InFlight, str] = {"finish": "wait", "abort": "abort", "keep": "keep"}


class VllmClient:
    """Samples turns from one server. Implements `ModelClient` and `Steerable`.

    Args:
        url: base URL, with or without `/v1`.
        stop_ids: ids that end a turn (`Renderer.stop_ids`).
        vocab_size: ids must lie below; None skips that check.
        model: model name; None takes the first the server names.
        options: of `ServerLink`.

    Raises:
        InputError: the URL is not one.
    """

    protocol = "vllm"

    def __init__(
        self,
        url: str,
        *,
        stop_ids: Sequence[int],
        vocab_size: int | None = None,
        model: str | None = None,
        **options: Unpack[LinkOptions],
    ) -> None:
        self._link = ServerLink(url, **options)
        self.url = self._link.url
        self._stop_ids = tuple(stop_ids)
        self._vocab_size = vocab_size
        self._model = model
        self._names_versions = True
        self._has_generate: bool | None = None
        self._asking = asyncio.Lock()

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str) -> Sampled:
        """See `ModelClient.generate`.

        Raises:
            ServerUnavailable: no answer within the attempts.
            ProtocolError: the server refuses the request, or its answer breaks the token protocol.
        """
        model = await self.model_name()
        if await self._generates():
            path, encode = _GENERATE, encode_generate
        else:
            path, encode = "/v1/completions", encode_request
        body = encode(model, prompt_ids, sampling, self._stop_ids)
        answer = await self._link.request("POST", path, body, session_headers(session))
        expected = Expectation(prompt_ids, sampling.max_tokens, self._vocab_size, self.url)
        return read_answer(answer, expected)

    async def model_name(self) -> str:
        """The model asked for, or the first the server names."""
        if self._model is None:
            self._model = first_model(await self._link.request("GET", "/v1/models"), self.url).id
        return self._model

    async def _generates(self) -> bool:
        """Whether the server has the route that names versions. Asked once, in a way that samples nothing."""
        async with self._asking:
            if self._has_generate is None:
                try:
                    await self._link.ask("GET", _GENERATE)
                    self._has_generate = False  # whatever answers this is not vLLM's
                except Refusal as error:
                    self._has_generate = error.status == _METHOD_NOT_ALLOWED
                except ModelError:
                    return False  # the request itself will say what is wrong
            return self._has_generate

    @property
    def complaints(self) -> int:
        """See `Steerable.complaints`."""
        return self._link.complaints

    async def look(self) -> ServerNews:
        """See `Steerable.look`."""
        served = first_model(await self._link.ask("GET", "/v1/models"), self.url)
        version = ""
        if self._names_versions:
            try:
                version = _read_version(await self._link.ask("GET", "/weight_info"))
            except Refusal as error:
                self._names_versions = not error.unknown_route
        return ServerNews(self._model or served.id, version)

    async def pause(self, mode: InFlight) -> bool:
        """See `Steerable.pause`. The prefix cache is emptied: after an update it is of other weights."""
        return await self._link.tell(f"/pause?mode={_PAUSE_MODES[mode]}&clear_cache=true")

    async def resume(self, weight_version: str) -> bool:
        """See `Steerable.resume`."""
        if weight_version:
            await self._link.tell("/update_weight_version", {"new_version": weight_version})
        return await self._link.tell("/resume")

    async def aclose(self) -> None:
        """Close the connections; generations in flight end."""
        await self._link.aclose()


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
    weight_versions: list[WireSpan] | None = None


class _Meta(msgspec.Struct):
    weight_version: str | int | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _Details | None = None


class _Version(msgspec.Struct):
    weight_version: str | int | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice]
    prompt_token_ids: msgspec.Raw = msgspec.Raw(b"null")
    weight_version: str | int | None = None
    weight_versions: list[WireSpan] | None = None
    meta_info: _Meta | None = None
    usage: _Usage | None = None


def encode_request(
    model: str, prompt_ids: Sequence[int], sampling: Sampling, stop_ids: Sequence[int]
) -> bytes:
    """The body of one completion request."""
    body: dict[str, object] = {
        "model": model,
        "prompt": msgspec.Raw(ids_json(prompt_ids)),
        "max_tokens": sampling.max_tokens,
        **neutral_sampling(sampling),
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


def encode_generate(
    model: str, prompt_ids: Sequence[int], sampling: Sampling, stop_ids: Sequence[int]
) -> bytes:
    """The body of one request to the route that names versions."""
    params: dict[str, object] = {
        **neutral_sampling(sampling),
        "max_tokens": sampling.max_tokens,
        "stop_token_ids": list(stop_ids),
        "logprobs": 0,  # of the sampled token alone
        "detokenize": False,
    }
    if sampling.seed is not None:
        params["seed"] = sampling.seed
    body = {
        "model": model,
        "token_ids": msgspec.Raw(ids_json(prompt_ids)),
        "sampling_params": params,
        "return_token_ids": True,
        "stream": False,
    }
    return msgspec.json.encode(body)


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


def _check_prompt(echo: msgspec.Raw, expected: Expectation) -> None:
    if bytes(echo) in (b"null", ids_json(expected.prompt_ids)):
        return  # compared as text, which is the same where a server writes no white space
    try:
        echoed = msgspec.json.decode(echo, type=list[int])
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
    return check_ids(ids, expected)


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


def _sampled_logprobs(choice: _Choice) -> Sequence[float | None] | None:
    if choice.logprobs is None:
        return None
    if choice.logprobs.token_logprobs is None and choice.logprobs.content is not None:
        return [item.logprob for item in choice.logprobs.content]
    return choice.logprobs.token_logprobs


def _weight_version(answer: _Answer, choice: _Choice) -> str:
    meta = answer.meta_info.weight_version if answer.meta_info else None
    named = (choice.weight_version, answer.weight_version, meta)
    spans = choice.weight_versions or answer.weight_versions or ()
    return next(
        (version_name(version) for version in (*named, *(s.version for s in spans)) if version is not None),
        "",
    )


def _version_spans(
    answer: _Answer, choice: _Choice, count: int, expected: Expectation
) -> tuple[VersionSpan, ...]:
    spans = choice.weight_versions if choice.weight_versions is not None else answer.weight_versions
    return check_spans(spans, count, expected) if spans else ()


def _cached_tokens(answer: _Answer, expected: Expectation) -> int | None:
    """What the server found in its cache, where that can be."""
    details = answer.usage.prompt_tokens_details if answer.usage else None
    cached = details.cached_tokens if details else None
    return cached if cached is not None and 0 <= cached <= len(expected.prompt_ids) else None


def _read_version(body: bytes) -> str:
    try:
        return version_name(msgspec.json.decode(body, type=_Version).weight_version)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return ""
