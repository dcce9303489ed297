"""Client of a vLLM server that uses token ids.

Protocol: `POST /v1/completions` with token ids as the prompt and `return_token_ids`
(https://docs.vllm.ai/en/latest/serving/openai_compatible_server.html). A server that was started with
`--enable-scale-out` also has `/inference/v1/generate`. That route is preferred, because it alone reports
which version of the weights sampled which tokens. `/pause`, `/resume`, `/weight_info` and
`/update_weight_version` exist on servers that run with `VLLM_SERVER_DEV_MODE=1`.
"""

import asyncio
from collections.abc import Sequence
from typing import Unpack

from prorl_envs.errors import ModelError
from prorl_envs.model.answer_checks import Refusal, RequestContract
from prorl_envs.model.http.client import first_model, session_headers
from prorl_envs.model.http.event_stream import Events
from prorl_envs.model.servers.base import TokenClient, TokenOptions
from prorl_envs.model.servers.vllm_wire import CompletionEvents, encode_request, read_answer, read_version
from prorl_envs.model.types import InFlight, OnPartial, Sampled, Sampling, ServerNews

_COMPLETIONS = "/v1/completions"
_GENERATE = "/inference/v1/generate"
_METHOD_NOT_ALLOWED = 405
#: vLLM's modes for requests in flight.
_PAUSE_MODES: dict[InFlight, str] = {"finish": "wait", "abort": "abort", "keep": "keep"}


class VllmClient(TokenClient):
    """Client that samples turns. Implements `ModelClient`, `Streaming` and `ControllableServer`.

    Args: those of `TokenClient`, and
        model: model name; None takes the first in the server's list.
    """

    protocol = "vllm"

    def __init__(self, url: str, *, model: str | None = None, **options: Unpack[TokenOptions]) -> None:
        super().__init__(url, **options)
        self._model = model
        self._names_versions = True
        self._has_generate: bool | None = None
        self._detecting = asyncio.Lock()

    async def _send(
        self, prompt_ids: Sequence[int], sampling: Sampling, session: str, events: Events | None = None
    ) -> bytes:
        model = await self.model_name()
        form = {"generate": await self._supports_generate(), "stream": events is not None}
        body = encode_request(model, prompt_ids, sampling, self._stop_ids, **form)
        path = _GENERATE if form["generate"] else _COMPLETIONS
        return await self._link.request("POST", path, body, session_headers(session), events)

    def _read(self, answer: bytes, expected: RequestContract) -> Sampled:
        return read_answer(answer, expected)

    def _events(self, on_partial: OnPartial, expected: RequestContract) -> Events:
        return CompletionEvents(on_partial, expected)

    async def model_name(self) -> str:
        """Return the configured model, or the first in the server's list."""
        if self._model is None:
            self._model = first_model(await self._link.request("GET", "/v1/models"), self.url).id
        return self._model

    async def _supports_generate(self) -> bool:
        """Return true if the server has the route that reports versions. Asks once, without sampling."""
        async with self._detecting:
            if self._has_generate is None:
                try:
                    await self._link.ask("GET", _GENERATE)
                    self._has_generate = False  # a route that answers GET is not vLLM's
                except Refusal as error:
                    if not error.unknown_route:
                        return False  # the route was refused: ask again with the next request
                    self._has_generate = error.status == _METHOD_NOT_ALLOWED
                except ModelError:
                    return False  # the sampling request will show the problem
            return self._has_generate

    async def look(self) -> ServerNews:
        """See `ControllableServer.look`."""
        served = first_model(await self._link.ask("GET", "/v1/models"), self.url)
        version = ""
        if self._names_versions:
            try:
                version = read_version(await self._link.ask("GET", "/weight_info"))
            except Refusal as error:
                self._names_versions = not error.unknown_route
        return ServerNews(self._model or served.id, version)

    async def pause(self, mode: InFlight) -> bool:
        """See `ControllableServer.pause`. Empties the prefix cache, which is invalid after an update."""
        return await self._link.post(f"/pause?mode={_PAUSE_MODES[mode]}&clear_cache=true")

    async def resume(self, weight_version: str) -> bool:
        """See `ControllableServer.resume`. Empties the prefix cache, because a `finish` pause does not notify
        the server."""
        if weight_version:
            await self._link.post("/update_weight_version", {"new_version": weight_version})
            await self._link.post("/reset_prefix_cache")
        return await self._link.post("/resume")
