"""The Hermes format: JSON between tags. Qwen 2.5, Qwen 3, Hermes, and most models fine-tuned for tools.

<tool_call>
{"name": "bash", "arguments": {"command": "ls"}}
</tool_call>
"""

from collections.abc import Sequence

from prorl_envs.model.tool_formats.reading import (
    Declared,
    ReadCall,
    ToolFormat,
    call_of,
    end_of,
    read_object,
    resume_behind,
)

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class Hermes(ToolFormat):
    name = "hermes"
    form = 'Write <tool_call>{"name": ..., "arguments": {...}}</tool_call> with valid JSON.'

    def find(self, text: str, at: int) -> int:
        return text.find(OPEN, at)

    def read(self, text: str, at: int, declared: Declared) -> tuple[Sequence[ReadCall], int]:
        value, end = read_object(text, at + len(OPEN))
        return [call_of(value)], end_of(text, end, CLOSE)

    def resume(self, text: str, at: int) -> int:
        return resume_behind(text, at, OPEN, CLOSE)
