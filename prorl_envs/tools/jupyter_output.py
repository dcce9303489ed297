"""What a Jupyter kernel publishes while a cell runs, made into an answer. Pure; the kernel is hostile."""

import re
from typing import Any

import msgspec

from prorl_envs.tools.output import OutputBuffer
from prorl_envs.tools.wire import DISPLAY_LIMIT, ERROR_NAME_LIMIT, MIME_LIMIT, PythonDone

#: Characters of all rich representations handed on per cell.
DISPLAY_CHARACTERS = 1024 * 1024
_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


class Stream(msgspec.Struct):
    """Content of a `stream` message."""

    text: str


class Bundle(msgspec.Struct):
    """Content of an `execute_result` or `display_data` message."""

    data: dict[str, Any]


class Failure(msgspec.Struct):
    """Content of an `error` message."""

    ename: str
    traceback: list[str]


class Status(msgspec.Struct):
    """Content of a `status` message."""

    execution_state: str


class CellOutput:
    """Collects a cell's messages, bounded.

    Args:
        output_limit: bytes of text kept.
    """

    def __init__(self, output_limit: int) -> None:
        self._text = OutputBuffer(output_limit)
        self._display: list[dict[str, str]] = []
        self._display_characters = 0
        self._error = ""

    def take(self, kind: str, content: Any) -> bool:
        """Take one message's content; True where the cell has ended.

        Raises:
            msgspec.ValidationError: the content is not what its kind says.
        """
        match kind:
            case "stream":
                self._write(msgspec.convert(content, Stream).text)
            case "execute_result" | "display_data":
                self._show(msgspec.convert(content, Bundle).data)
            case "error":
                failure = msgspec.convert(content, Failure)
                self._error = _whole(failure.ename[:ERROR_NAME_LIMIT])
                self._write(_COLOUR.sub("", "\n".join(failure.traceback)) + "\n")
            case "status":
                return msgspec.convert(content, Status).execution_state == "idle"
        return False

    def reply(self, *, timed_out: bool, notice: str, error: str = "") -> PythonDone:
        """What the model is told."""
        captured = self._text.take()
        return PythonDone(
            0, captured.text(), captured.omitted, error or self._error, timed_out, notice, self._display
        )

    def _write(self, text: str) -> None:
        self._text.feed(text.encode("utf-8", "replace"))

    def _show(self, bundle: dict[str, Any]) -> None:
        rich = {_whole(mime): _whole(str(value)) for mime, value in bundle.items() if mime != "text/plain"}
        if "text/plain" in bundle:
            self._write(f"{bundle['text/plain']}\n")
        if not rich:
            return
        size = sum(map(len, rich.values()))
        total = self._display_characters + size + sum(map(len, rich))
        few = len(self._display) < DISPLAY_LIMIT and len(rich) <= MIME_LIMIT
        if few and total <= DISPLAY_CHARACTERS:
            self._display.append(rich)
            self._display_characters = total
        else:
            self._write(f"[display data of {size} characters left out]\n")


def _whole(text: str) -> str:
    """The text without lone surrogates: JSON can spell them, and no answer can carry them."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()
