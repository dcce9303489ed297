"""Tools for chat templates without tool support (Gemma 3, Phi 3, distilled models), as text in the messages.

The first message describes the tools. Calls are written into the assistant's text, in the Hermes format. All
results of one turn form one user message, because such templates require users and models to alternate.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from prorl_envs.tools.types import JsonObject, ToolSpec

_RESULTS = "The result comes between <tool_response> tags."


def about(tools: Sequence[ToolSpec], form: str, *, plain: bool) -> str:
    """Return the description of the tools for the model.

    Args:
        tools: the offered tools.
        form: description of the format of a call.
        plain: True if results are written as text of a user message.
    """
    if not tools:
        return ""
    listed = "\n".join(json.dumps(tool.to_openai(), ensure_ascii=False) for tool in tools)
    text = f"You can call these functions, each given as a JSON schema:\n{listed}\nTo call one: {form}"
    return f"{text}\n{_RESULTS}" if plain else text


def introduced(messages: Sequence[Mapping[str, Any]], about: str) -> list[JsonObject]:
    """Return the conversation with the tool description at the end of its first message."""
    plain = [dict(message) for message in messages]
    if about and plain and plain[0].get("role") in ("system", "developer", "user"):
        first = plain[0].get("content") or ""
        parts = [{"type": "text", "text": first}] if isinstance(first, str) else list(first)
        plain[0]["content"] = [*parts, {"type": "text", "text": f"\n\n{about}"}]
    return plain


def written(message: Mapping[str, Any]) -> JsonObject:
    """Return a message with its calls written into its text."""
    calls = message.get("tool_calls")
    plain = {key: value for key, value in message.items() if key != "tool_calls"}
    if not calls:
        return plain
    texts = [plain.get("content") or ""]
    for call in calls:
        function = call["function"]
        arguments = function.get("arguments", {})
        encoded = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        name = json.dumps(function.get("name"), ensure_ascii=False)
        texts.append(f'<tool_call>\n{{"name": {name}, "arguments": {encoded}}}\n</tool_call>')
    plain["content"] = "\n".join(filter(None, texts))
    return plain


def as_user(observations: Sequence[Mapping[str, Any]]) -> list[JsonObject]:
    """Return the observations as one user message."""
    texts = [
        f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"
        if message.get("role") == "tool"
        else str(message.get("content") or "")
        for message in observations
    ]
    return [{"role": "user", "content": "\n".join(texts)}]


def joined(messages: Sequence[Mapping[str, Any]]) -> list[JsonObject]:
    """Return the conversation with the results after each answer joined to one user message."""
    plain: list[JsonObject] = []
    waiting: list[Mapping[str, Any]] = []
    for message in messages:
        if message.get("role") == "tool" or (waiting and message.get("role") == "user"):
            waiting.append(message)
            continue
        plain += as_user(waiting) if waiting else []
        waiting = []
        plain.append(dict(message))
    return [*plain, *(as_user(waiting) if waiting else [])]
