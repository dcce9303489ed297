"""Harmony, the format of gpt-oss: a turn is a series of messages on channels.

    <|channel|>analysis<|message|>I look first.<|end|><|start|>assistant
    <|channel|>commentary to=functions.bash <|constrain|>json<|message|>{"command": "ls"}<|call|>

Format: https://cookbook.openai.com/articles/openai-harmony. OpenAI's library reads the format from ids of a
vocabulary that it downloads. This module reads it from text, which the tokenizer in use decodes.
"""

import re
from collections.abc import Sequence

from prorl_envs.model.tool_formats.reading import (
    MAX_CALLS,
    NOTHING_DECLARED,
    Declared,
    Malformed,
    ReadCall,
    ReadTurn,
    ToolFormat,
    checked,
    read_arguments,
    skip_space,
)

_START, _MESSAGE = "<|start|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", _START)
_END = re.compile("|".join(map(re.escape, _ENDS)))
# In some answers, a message that is not a call lacks its end token.
_NEXT = re.compile(f"{_END.pattern}|{re.escape('<|channel|>')}")
# A message to everyone, itself or the user is no call.
_RECIPIENT = re.compile(r"\bto=(?!(?:all|assistant|user)(?:[\s<]|\Z))([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>(\w+)")


class Harmony(ToolFormat):
    name = "harmony"
    form = "Write <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>."

    def find(self, text: str, at: int) -> int:
        """Return the start of the next message's text, or -1."""
        found = text.find(_MESSAGE, at)
        return found if found < 0 else found + len(_MESSAGE)

    def read(self, text: str, at: int, declared: Declared) -> tuple[Sequence[ReadCall], int]:
        """Parse the call whose arguments begin at `at`; its header precedes `at`."""
        header = text[max(text.rfind(end, 0, at) for end in ("<|start|>", "<|end|>", "<|call|>")) + 1 : at]
        recipient = _RECIPIENT.search(header)
        if not recipient:
            raise Malformed("A tool call names no recipient.")
        arguments, end = read_arguments(text, at, _ENDS)
        end = skip_space(text, end)
        if end != len(text) and not text.startswith(_ENDS, end):
            raise Malformed("There is text after the JSON of a tool call.")
        return [checked(recipient[1].removeprefix("functions."), arguments)], end

    def resume(self, text: str, at: int) -> int:
        following = _NEXT.search(text, at)
        return following.start() if following else len(text)

    def turn(self, text: str, *, opened: str = "", declared: Declared = NOTHING_DECLARED) -> ReadTurn:
        """See `ToolFormat.turn`. If a turn contains no message, its whole text is the content."""
        texts: dict[str, list[str]] = {"analysis": [], "final": [], "commentary": []}
        calls, malformed = list[ReadCall](), list[str]()
        at, channel, incomplete = 0, "final", False
        while (body := self.find(text, at)) >= 0:
            *broken, header = _END.split(text[at:body])
            incomplete |= any(map(_names_call, broken))
            match = _CHANNEL.search(header)
            channel = match[1] if match else channel
            at = self.resume(text, body)
            if not _RECIPIENT.search(header):
                texts.setdefault(channel, []).append(text[body:at].strip())
                continue
            if len(calls) + len(malformed) >= MAX_CALLS:
                malformed.append(f"Only the first {MAX_CALLS} tool calls of a turn are read.")
                break
            try:
                read, at = self.read(text, body, declared)
                calls.extend(read)
            except Malformed as error:
                malformed.append(f"{error} {self.form}")
        incomplete |= any(map(_names_call, _END.split(text[at:])))
        if incomplete and len(malformed) <= MAX_CALLS - len(calls):
            malformed.append(f"A tool call has no {_MESSAGE} before its JSON. {self.form}")
        content = [*texts["commentary"], *texts["final"]]
        if not at:
            content = [text.strip()]
        reasoning = "\n\n".join(filter(None, texts["analysis"]))
        return ReadTurn("\n\n".join(filter(None, content)), tuple(calls), tuple(malformed), reasoning)


def _names_call(header: str) -> bool:
    return bool(_CHANNEL.search(header) and _RECIPIENT.search(header))
