"""Client of an OpenAI-compatible chat server, which takes messages and returns text: the less capable mode.

The server renders the prompt and parses the tool calls itself, so the ids it saw and sampled are unknown. The
client renders the answer with the model's chat template, tokenises it and marks it as inexact: a trajectory
with such a turn can be graded and read, but is never offered to a trainer.

Protocol: `POST /v1/chat/completions` (https://platform.openai.com/docs/api-reference/chat).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

import msgspec

from prorl_envs.errors import ModelError
from prorl_envs.model.answer_checks import ProtocolError, decoded
from prorl_envs.model.http.client import LinkOptions, first_model, session_headers
from prorl_envs.model.servers.base import Unsteered
from prorl_envs.model.types import Conversation, FinishReason, Sampled, Sampling
from prorl_envs.strict_json import call_arguments

#: Maximum tool calls of one answer.
MAX_CALLS = 64


class _Function(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] | None = None


class _Call(msgspec.Struct):
    function: _Function


class _Message(msgspec.Struct):
    content: str | None = None
    tool_calls: list[_Call] | None = None


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice]


class OpenAIChatClient(Unsteered):
    """Client that samples turns as text. Implements `ModelClient` and `ControllableServer`.

    Args:
        url: base URL, with or without `/v1`.
        encode: returns the ids of an assistant message in OpenAI's format (`TemplateRenderer.assistant`).
        model: model name; None takes the first in the server's list.
        options: options of `ModelHttpClient`.

    Raises:
        InputError: the URL is invalid.
    """

    protocol = "openai"

    def __init__(
        self,
        url: str,
        *,
        encode: Callable[[Mapping[str, Any]], list[int]],
        model: str | None = None,
        **options: Unpack[LinkOptions],
    ) -> None:
        super().__init__(url, **options)
        self._encode = encode
        self._model = model

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str) -> Sampled:
        """Raise an error: this server takes no ids; see `chat`.

        Raises:
            ModelError: always.
        """
        raise ModelError(
            f"{self.url} takes no token ids",
            hint="only the rollout service's own agent loop can use a chat server",
        )

    async def chat(self, conversation: Conversation, sampling: Sampling, *, session: str) -> Sampled:
        """Sample one turn; `Sampled.exact` is False.

        Raises:
            ServerUnavailable: no answer within the attempts.
            ProtocolError: the server refuses the request, or its answer has another format.
        """
        if self._model is None:
            self._model = first_model(await self._link.request("GET", "/v1/models"), self.url).id
        body = encode_request(self._model, conversation, sampling)
        answer = await self._link.request("POST", "/v1/chat/completions", body, session_headers(session))
        message, reason = read_answer(answer, self.url)
        # These may be more ids than the server sampled, but a turn must not exceed the requested length.
        ids = self._encode(message)
        if len(ids) > sampling.max_tokens:
            ids, reason = ids[: sampling.max_tokens], "length"
        return Sampled(
            ids=tuple(ids),
            logprobs=(0.0,) * len(ids),
            finish_reason=reason,
            weight_version="",
            server=self.url,
            exact=False,
        )


def encode_request(model: str, conversation: Conversation, sampling: Sampling) -> bytes:
    """Return the body of one request."""
    body: dict[str, Any] = {
        "model": model,
        "messages": list(conversation.messages),
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "n": 1,
        "stream": False,
    }
    if conversation.tools:
        body["tools"] = [tool.to_openai() for tool in conversation.tools]
    if sampling.seed is not None:
        body["seed"] = sampling.seed
    return msgspec.json.encode(body)


def read_answer(body: bytes, server: str) -> tuple[dict[str, Any], FinishReason]:
    """Return a completion's assistant message (OpenAI's format, parsed arguments) and its finish reason.

    Raises:
        ProtocolError: the answer has another format, or not exactly one choice.
    """
    answer = decoded(body, _Answer, f"{server} did not answer with a chat completion")
    if len(answer.choices) != 1:
        raise ProtocolError(f"{server} answered with {len(answer.choices)} choices instead of one")
    choice = answer.choices[0]
    content, calls = choice.message.content or "", choice.message.tool_calls or []
    if len(calls) > MAX_CALLS:
        raise ProtocolError(f"{server} answered with {len(calls)} tool calls")
    tool_calls: list[dict[str, Any]] = []
    for call in calls:
        arguments = call_arguments(call.function.arguments)
        if (
            arguments is None
        ):  # the model's mistake is kept, in the form in which the model would have written it
            name = json.dumps(call.function.name)
            written = f'<tool_call>\n{{"name": {name}, "arguments": {call.function.arguments}\n</tool_call>'
            content = f"{content}\n{written}".strip()
        else:
            function = {"name": call.function.name, "arguments": arguments}
            tool_calls.append({"id": f"call_{len(tool_calls)}", "type": "function", "function": function})
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if tool_calls:
        message["tool_calls"] = tool_calls
    return message, "length" if choice.finish_reason == "length" else "stop"
