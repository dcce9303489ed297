"""Which form a model writes its tool calls in: found by trying, not by the model's name.

A model's own template writes a call; the form that reads the same call back is the model's. So fine-tuned and
renamed models are served like their originals.
"""

from prorl_envs.errors import InputError
from prorl_envs.policy.formats.gemma import Gemma
from prorl_envs.policy.formats.harmony import Harmony
from prorl_envs.policy.formats.hermes import Hermes
from prorl_envs.policy.formats.marked import DeepSeek, Kimi, Llama, Mistral
from prorl_envs.policy.formats.reading import Declared, Format, ReadCall
from prorl_envs.policy.formats.tagged import Coder, Dsml, Glm
from prorl_envs.tools.types import JsonObject, ToolSpec

#: In the order in which they are tried.
FORMATS: dict[str, Format] = {
    each.name: each
    for each in (
        Hermes(),
        Coder(),
        Glm(),
        DeepSeek(),
        Dsml(),
        Kimi(),
        Mistral(),
        Gemma(),
        Harmony(),
        Llama(),
    )
}

#: The call that is written on trial: a text, and a value that is none.
TRIAL_TOOL = ToolSpec(
    "trial_tool",
    "Tried out.",
    {"type": "object", "properties": {"value": {"type": "string"}, "number": {"type": "integer"}}},
)
_CALL = ReadCall(TRIAL_TOOL.name, {"value": "text of the trial", "number": 3})


def trial_message() -> JsonObject:
    """An assistant message with the call on trial."""
    function = {"name": _CALL.name, "arguments": dict(_CALL.arguments)}
    call = {"id": "abcdefgh1", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def choose_format(name: str, written: str) -> Format | None:
    """The form that is named, or the one in which a template writes calls.

    Args:
        name: of a form, or `auto`.
        written: what the template writes for `trial_message`, from the generation prompt on.

    Returns:
        None where `auto` finds none.

    Raises:
        InputError: there is no such form.
    """
    if name != "auto":
        if name not in FORMATS:
            raise InputError(
                f"there is no form of tool calls {name[:40]!r}", hint=f"known: auto, {', '.join(FORMATS)}"
            )
        return FORMATS[name]
    declared = Declared.of([TRIAL_TOOL])
    read = (each for each in FORMATS.values() if each.turn(written, declared=declared).calls == (_CALL,))
    return next(read, None)
