"""Client of an SGLang server that uses token ids in its native interface.

Protocol: `POST /generate` with `input_ids` (https://docs.sglang.io/basic_usage/native_api.html). The answer
has `output_ids`, and in `meta_info` the log-probabilities as `[logprob, id, text]`. The ids of both must be
equal.
"""

import asyncio
import uuid
from collections.abc import Sequence
from typing import Any, Unpack

import msgspec

from prorl_envs.errors import ModelError
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
from prorl_envs.model.http.client import session_headers
from prorl_envs.model.http.event_stream import Events
from prorl_envs.model.servers.base import TokenClient, TokenOptions
from prorl_envs.model.types import InFlight, OnPartial, Sampled, Sampling, ServerNews

#: SGLang's modes for requests in flight. `retract` returns the requests to the server's queue, so that the
#: cache can be emptied after the update, and continues them after that.
_PAUSE_MODES: dict[InFlight, str] = {"finish": "retract", "abort": "abort", "keep": "retract"}

_OTHER_IDS = "{} gave the log-probabilities of other ids than it sampled"
#: Number of events of one answer, for a server that repeats the whole answer in each event.
_EVENTS = 64


class _Reason(msgspec.Struct):
    type: str | None = None


class _Meta(msgspec.Struct):
    finish_reason: _Reason | None = None
    output_token_logprobs: list[list[Any]] | None = None
    weight_version: str | int | None = None
    weight_versions: list[WireSpan] | None = None
    cached_tokens: int | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Answer(msgspec.Struct):
    meta_info: _Meta
    output_ids: list[int] | None = None


class _ServerInfo(msgspec.Struct):
    incremental_streaming_output: bool = False
    stream_output: bool = False  # former name


class _Info(msgspec.Struct):
    model_path: str = ""
    weight_version: str | int | None = None


def encode_request(
    prompt_ids: Sequence[int], sampling: Sampling, stop_ids: Sequence[int], rid: str, interval: int = 0
) -> bytes:
    """Return the body of one request; `interval` is the number of tokens per event, 0 without streaming."""
    params: dict[str, Any] = {
        **neutral_sampling(sampling),
        "max_new_tokens": sampling.max_tokens,
        "stop_token_ids": list(stop_ids),
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
    }
    if sampling.seed is not None:
        params["sampling_seed"] = sampling.seed
    if interval:
        params["stream_interval"] = interval
    body = {
        "rid": rid,
        "input_ids": list(prompt_ids),
        "sampling_params": params,
        "return_logprob": True,
        "logprob_start_len": -1,
        "top_logprobs_num": 0,
        "stream": interval > 0,
    }
    return msgspec.json.encode(body)


def read_info(body: bytes, server: str) -> ServerNews:
    """Return the model and the weight version in an answer of `/get_model_info`.

    Raises:
        ProtocolError: the answer has another format.
    """
    info = decoded(body, _Info, f"{server}/get_model_info is not SGLang's")
    return ServerNews(info.model_path, version_name(info.weight_version))


def read_incremental(body: bytes) -> bool:
    """Return whether, according to `/get_server_info`, each event of a stream has only the new tokens."""
    try:
        info = decoded(body, _ServerInfo, "")
    except ProtocolError:
        return False
    return info.incremental_streaming_output or info.stream_output


def read_answer(body: bytes, expected: RequestContract) -> Sampled:
    """Read and check one answer of `/generate`.

    Raises:
        ProtocolError: a part of the answer is missing, has a wrong type, or is impossible.
    """
    return _checked(_decoded(body, expected), expected)


class GenerateEvents(Events):
    """Reader of a `/generate` answer as events, each with the new tokens or (default) all tokens so far."""

    def begin(self) -> None:
        """See `Events.begin`."""
        self._latest: _Meta | None = None
        super().begin()

    def _read(self, event: bytes) -> None:
        answer = _decoded(event, self._expected)
        meta, known = answer.meta_info, self._partial.ids
        values, paired_ids = _pairs(meta.output_token_logprobs, self._expected)
        ids = paired_ids if answer.output_ids is None else answer.output_ids
        if ids != paired_ids:
            raise ProtocolError(_OTHER_IDS.format(self._expected.server))
        # `completion_tokens` always counts all tokens. In the first event both forms are equal.
        repeated = meta.completion_tokens in (None, len(ids)) and ids[: len(known)] == known
        new = len(known) if repeated else 0
        if meta.completion_tokens not in (None, len(known) + len(ids) - new):
            raise ProtocolError(f"{self._expected.server} left tokens out of its stream")
        self._add_sampled(ids[new:], values[new:], version_name(meta.weight_version))
        self._latest = meta

    def _judged(self) -> Sampled:
        if self._latest is None:
            raise ProtocolError(f"{self._expected.server} sent an empty stream")
        pairs = zip(self._partial.logprobs, self._partial.ids, strict=True)
        self._latest.output_token_logprobs = [list(pair) for pair in pairs]
        return _checked(_Answer(self._latest), self._expected)


def _decoded(body: bytes, expected: RequestContract) -> _Answer:
    return decoded(body, _Answer, f"{expected.server} did not answer as SGLang does")


def _checked(answer: _Answer, expected: RequestContract) -> Sampled:
    meta = answer.meta_info
    if meta.prompt_tokens is not None and meta.prompt_tokens != len(expected.prompt_ids):
        raise ProtocolError(
            f"{expected.server} read {meta.prompt_tokens} prompt ids, {len(expected.prompt_ids)} were sent",
            hint="does it truncate prompts?",
        )
    values, paired_ids = _pairs(meta.output_token_logprobs, expected)
    ids = check_ids(paired_ids if answer.output_ids is None else answer.output_ids, expected)
    logprobs = check_logprobs(values, len(ids), expected)
    if list(ids) != paired_ids:
        raise ProtocolError(_OTHER_IDS.format(expected.server))
    spans = check_spans(meta.weight_versions, len(ids), expected) if meta.weight_versions else ()
    versions = [*(span.version for span in spans), meta.weight_version]
    versions += [span.version for span in meta.weight_versions or ()]
    return Sampled(
        ids=ids,
        logprobs=logprobs,
        finish_reason=check_finish(
            meta.finish_reason.type if meta.finish_reason else None, len(ids), expected
        ),
        weight_version=next((version_name(version) for version in versions if version is not None), ""),
        server=expected.server,
        version_spans=spans,
        cached_tokens=expected.cached(meta.cached_tokens),
    )


def _pairs(items: list[list[Any]] | None, expected: RequestContract) -> tuple[list[float], list[int]]:
    """Return the log-probabilities and ids of the items `[logprob, id, ...]`."""
    values: list[float] = []
    ids: list[int] = []
    for item in items or ():
        match item:
            case [(float() | int()) as value, int() as number, *_] if not isinstance(number, bool):
                values.append(float(value))
                ids.append(number)
            case _:
                raise ProtocolError(f"{expected.server} returned a log-probability without its id")
    return values, ids


class SglangClient(TokenClient):
    """Client that samples turns. Implements `ModelClient`, `Streaming` and `ControllableServer`.

    Args: those of `TokenClient`.
    """

    protocol = "sglang"

    def __init__(self, url: str, **options: Unpack[TokenOptions]) -> None:
        super().__init__(url, **options)
        self._aborts: set[asyncio.Task[None]] = set()
        self._incremental: bool | None = None
        self._detecting = asyncio.Lock()

    async def _send(
        self, prompt_ids: Sequence[int], sampling: Sampling, session: str, events: Events | None = None
    ) -> bytes:
        interval = 0 if events is None else await self._interval(sampling)
        rid = uuid.uuid4().hex
        body = encode_request(prompt_ids, sampling, self._stop_ids, rid, interval)
        try:
            return await self._link.request("POST", "/generate", body, session_headers(session), events)
        except asyncio.CancelledError:
            # SGLang checks the connection only from time to time. An abort request stops the request at once.
            abort = asyncio.create_task(self._abort(rid))
            self._aborts.add(abort)
            abort.add_done_callback(self._aborts.discard)
            raise

    def _read(self, answer: bytes, expected: RequestContract) -> Sampled:
        return read_answer(answer, expected)

    def _events(self, on_partial: OnPartial, expected: RequestContract) -> Events:
        return GenerateEvents(on_partial, expected)

    async def _interval(self, sampling: Sampling) -> int:
        """Return the number of tokens per event. A server without `--incremental-streaming-output` repeats
        the whole answer in each event, so few events are requested."""
        async with self._detecting:
            if self._incremental is None:
                try:
                    self._incremental = read_incremental(await self._link.ask("GET", "/get_server_info"))
                except ModelError:
                    self._incremental = False
        return 1 if self._incremental else max(1, sampling.max_tokens // _EVENTS)

    async def look(self) -> ServerNews:
        """See `ControllableServer.look`."""
        return read_info(await self._link.ask("GET", "/get_model_info"), self.url)

    async def pause(self, mode: InFlight) -> bool:
        """See `ControllableServer.pause`."""
        return await self._link.post("/pause_generation", {"mode": _PAUSE_MODES[mode]})

    async def resume(self, weight_version: str) -> bool:
        """See `ControllableServer.resume`. Empties the prefix cache, which belongs to the old weights."""
        if weight_version:
            await self._link.post("/update_weight_version", {"new_version": weight_version})
            await self._link.post("/flush_cache", {})
        return await self._link.post("/continue_generation", {})

    async def aclose(self) -> None:
        """Close the connections; this stops generations in flight."""
        if self._aborts:
            await asyncio.wait(self._aborts)
        await super().aclose()

    async def _abort(self, rid: str) -> None:
        try:
            await self._link.post("/abort_request", {"rid": rid})
        except ModelError:
            return  # the closed connection stops the request too, but later
