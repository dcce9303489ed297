"""Parser of actions. An action is a text: a tool call in JSON, a malformed call, or an answer."""

from prorl_envs.strict_json import STRICT_JSON
from prorl_envs.tools.types import ToolCall

EXAMPLE = '{"name": "bash", "arguments": {"command": "ls"}}'


class ActionError(ValueError):
    """Error for a text that is not a tool call; the message is written for the agent."""


def parse_action(text: str, call_id: str) -> ToolCall | None:
    """Read `{"name": ..., "arguments": {...}}`; None if the text does not look like a call.

    Args:
        text: the action; hostile.
        call_id: id for the call.

    Raises:
        ActionError: the text starts like a call, but is malformed.
    """
    if not text.lstrip().startswith("{"):
        return None
    # ValueError covers bad JSON and numbers out of range; RecursionError covers deep nesting.
    try:
        value = STRICT_JSON.decode(text)
    except (ValueError, RecursionError) as error:
        raise ActionError(f"Not a tool call: {error}. A tool call is JSON, such as {EXAMPLE}") from error
    match value:
        case {"name": str(name), "arguments": dict(arguments), **others} if not others:
            return ToolCall(id=call_id, name=name, arguments=arguments)
    raise ActionError(f"Not a tool call: give an object with exactly name and arguments, such as {EXAMPLE}")
