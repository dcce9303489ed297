"""Conversion between the two formats of a conversation: our chat messages, and NeMo Gym's Responses API
items.

Protocol: the OpenAI Responses API, as NeMo Gym's `responses_create_params` and `response` carry it. Pure.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prorl_envs.env.base import Message
from prorl_envs.errors import InputError
from prorl_envs.tools.types import JsonObject, ToolSpec

_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_TEXT_PARTS = ("input_text", "output_text", "text")
_THOUGHT_END = "</think>"
_NOTHING: JsonObject = {"type": "object", "properties": {}}


def chat_messages(params: Mapping[str, Any]) -> list[Message]:
    """Return the first messages of an episode: `instructions` and `input` of a row's
    `responses_create_params`.

    The developer role becomes the system role. Chat templates often accept only one system message, so
    consecutive system messages are joined. Reasoning of earlier turns is dropped, as chat templates do.

    Raises:
        InputError: names the field whose content is not text.
    """
    given = params.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list) or not items:
        raise InputError("responses_create_params.input: a text or a list of messages is expected")
    messages: list[Message] = []
    if instructions := params.get("instructions"):
        _add(messages, {"role": "system", "content": str(instructions)})
    for number, item in enumerate(items):
        _read_item(messages, item, f"responses_create_params.input[{number}]")
    return messages


def _read_item(messages: list[Message], item: object, where: str) -> None:
    if not isinstance(item, Mapping):
        raise InputError(f"{where}: an object is expected, not a {type(item).__name__}")
    match item.get("type", "message"):
        case "message":
            role = _ROLES.get(str(item.get("role")))
            if role is None:
                raise InputError(f"{where}.role: {item.get('role')!r}", hint=f"one of {', '.join(_ROLES)}")
            _add(messages, {"role": role, "content": _text(item.get("content"), f"{where}.content")})
        case "function_call":
            name, arguments = _texts(item, where, "name", "arguments")
            call = {"type": "function", "function": {"name": name, "arguments": arguments}}
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            messages[-1].setdefault("tool_calls", []).append({"id": str(item.get("call_id")), **call})
        case "function_call_output":
            (output,) = _texts(item, where, "output")
            messages.append({"role": "tool", "tool_call_id": str(item.get("call_id")), "content": output})
        case "reasoning":
            pass
        case other:
            raise InputError(f"{where}.type: {other!r} is not known", hint="messages and calls are")


def _add(messages: list[Message], message: Message) -> None:
    if messages and message["role"] == "system" == messages[-1]["role"]:
        messages[-1]["content"] += "\n\n" + message["content"]
    else:
        messages.append(message)


def _text(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InputError(f"{where}: a text or a list of parts is expected")
    return "".join(_part(part, f"{where}[{number}]") for number, part in enumerate(content))


def _part(part: object, where: str) -> str:
    if isinstance(part, Mapping) and part.get("type") in _TEXT_PARTS and isinstance(part.get("text"), str):
        return str(part["text"])
    raise InputError(f"{where}: not a text", hint="images and files cannot be given to the model yet")


def _texts(item: Mapping[str, Any], where: str, *names: str) -> Iterator[str]:
    for name in names:
        if not isinstance(item.get(name), str):
            raise InputError(f"{where}.{name}: a text is expected")
        yield str(item[name])


def function_tools(params: Mapping[str, Any]) -> list[ToolSpec]:
    """Return the tools of a row's `responses_create_params`.

    Raises:
        InputError: names the field of a tool that is not a function.
    """
    tools = params.get("tools") or []
    if not isinstance(tools, list):
        raise InputError("responses_create_params.tools: a list is expected")
    return [_tool(tool, f"responses_create_params.tools[{number}]") for number, tool in enumerate(tools)]


def _tool(tool: object, where: str) -> ToolSpec:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        raise InputError(f"{where}: not a function", hint='{"type": "function", "name", "parameters"}')
    (name,) = _texts(tool, where, "name")
    parameters = tool.get("parameters") or _NOTHING
    if not isinstance(parameters, dict):
        raise InputError(f"{where}.parameters: a JSON schema is expected")
    return ToolSpec(name, str(tool.get("description") or ""), parameters)


def output_items(messages: Sequence[Message], observed: Sequence[str] | None = None) -> list[JsonObject]:
    """Return the model's answers and the results of its calls as `response.output`.

    Notes to the model, for example about a call that could not be parsed, have no equivalent in a response
    and are omitted. The answer that caused the note is included as a message.

    Args:
        messages: the conversation after its prompt.
        observed: the result of each call, in the order of the calls. None takes the results from `messages`,
            which lack the last results if the episode finished before the model was shown them.
    """
    if observed is None:
        observed = [str(message["content"]) for message in messages if message["role"] == "tool"]
    items: list[JsonObject] = []
    used_ids: set[str] = set()
    results = iter(observed)
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        calls = [_call_item(call, used_ids) for call in message.get("tool_calls", ())]
        items += _answer_items(str(message.get("content") or ""), number, always=not calls)
        items += calls
        for call, output in zip(calls, results, strict=False):
            items.append({"type": "function_call_output", "call_id": call["call_id"], "output": output})
    return items


def _answer_items(content: str, number: int, *, always: bool) -> Iterator[JsonObject]:
    """Yield an answer's reasoning and text as separate items, as servers with a reasoning parser do."""
    thought, ended, answer = content.partition(_THOUGHT_END)
    if not ended:
        thought, answer = "", content
    if thought := thought.strip().removeprefix("<think>").strip():
        summary = [{"type": "summary_text", "text": thought}]
        yield {"type": "reasoning", "id": f"rs_{number}", "summary": summary}
    if answer := answer.strip() if ended else answer:
        always = True
    if always:
        text = {"type": "output_text", "text": answer, "annotations": []}
        message = {"type": "message", "role": "assistant", "status": "completed", "content": [text]}
        yield {"id": f"msg_{number}", **message}


def _call_item(call: Mapping[str, Any], used_ids: set[str]) -> JsonObject:
    """Return the item of a call, with an id that is not in `taken`; add the id to `taken`."""
    preferred = str(call.get("id") or "call")
    unique = preferred if preferred not in used_ids else f"{preferred}_{len(used_ids)}"
    used_ids.add(unique)
    function = call["function"]
    return {
        "type": "function_call",
        "id": f"fc_{unique}",
        "call_id": unique,
        "name": function["name"],
        "arguments": function["arguments"],
        "status": "completed",
    }


def said_messages(items: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Convert `response.output` to chat messages.

    Raises:
        InputError: as `chat_messages`.
    """
    return chat_messages({"input": list(items)}) if items else []
