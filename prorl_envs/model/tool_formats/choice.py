"""Choice of the format in which a model writes its tool calls: detected by a trial, not by the model's name.

The chat template of the model writes a call, and each format tries to read it. The format that returns the
same call is chosen. So fine-tuned and renamed models work like their originals.
"""

from prorl_envs.errors import InputError
from prorl_envs.model.tool_formats.gemma import FunctionGemma, Gemma
from prorl_envs.model.tool_formats.harmony import Harmony
from prorl_envs.model.tool_formats.marked import DeepSeek, Hermes, Kimi, Llama, Mistral
from prorl_envs.model.tool_formats.pythonic import Pythonic
from prorl_envs.model.tool_formats.reading import Declared, ReadCall, ToolFormat
from prorl_envs.model.tool_formats.tagged import Coder, Dsml, Glm, MiniMax
from prorl_envs.tools.types import JsonObject, ToolSpec

#: Formats by name, in the order of the trials.
FORMATS: dict[str, ToolFormat] = {
    each.name: each
    for each in (
        Hermes(),
        Coder(),
        Glm(),
        DeepSeek(),
        Dsml(),
        MiniMax(),
        Kimi(),
        Mistral(),
        Gemma(),
        FunctionGemma(),
        Harmony(),
        Llama(),
        Pythonic(),
    )
}

#: Tool of the trial call, which has a text argument and a non-text argument.
TRIAL_TOOL = ToolSpec(
    "trial_tool",
    "Tried out.",
    {"type": "object", "properties": {"value": {"type": "string"}, "number": {"type": "integer"}}},
)
_CALL = ReadCall(TRIAL_TOOL.name, {"value": "text of the trial", "number": 3})


def trial_message() -> JsonObject:
    """Return an assistant message with the trial call."""
    function = {"name": _CALL.name, "arguments": dict(_CALL.arguments)}
    call = {"id": "abcdefgh1", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def choose_format(name: str, written: str) -> ToolFormat | None:
    """Return the named format, or the format in which a template writes calls.

    Args:
        name: name of a format, or `auto`.
        written: output of the template for `trial_message`, after the generation prompt.

    Returns:
        the format; None if `auto` finds none.

    Raises:
        InputError: the name is unknown.
    """
    if name != "auto":
        if name not in FORMATS:
            raise InputError(
                f"there is no tool call format {name[:40]!r}", hint=f"known: auto, {', '.join(FORMATS)}"
            )
        return FORMATS[name]
    declared = Declared.of([TRIAL_TOOL])
    matching = (each for each in FORMATS.values() if each.turn(written, declared=declared).calls == (_CALL,))
    return next(matching, None)
