"""Conversion of a Jupyter kernel's messages for a cell to a reply. Pure; the kernel is untrusted."""

import re
from typing import Any

import msgspec

from prorl_envs.tools.protocol.messages import ERROR_NAME_LIMIT, PythonDone
from prorl_envs.tools.protocol.output import DisplayBuffer, OutputBuffer

_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


class Stream(msgspec.Struct):
    """Content of a `stream` message."""

    text: str


class Bundle(msgspec.Struct):
    """Content of an `execute_result` or `display_data` message."""

    data: dict[str, Any]


class CellFailure(msgspec.Struct):
    """Content of an `error` message."""

    ename: str
    traceback: list[str]


class KernelStatus(msgspec.Struct):
    """Content of a `status` message."""

    execution_state: str


class CellReply(msgspec.Struct):
    """Content of an `execute_reply` message."""

    status: str


class CellOutput:
    """Bounded collection of a cell's messages.

    Args:
        output_limit: bytes of text kept.
    """

    def __init__(self, output_limit: int) -> None:
        self._text = OutputBuffer(output_limit)
        self._display = DisplayBuffer()
        self._error = ""

    def take(self, kind: str, content: Any) -> bool:
        """Add one message's content; return True if the cell has finished.

        Raises:
            msgspec.ValidationError: the content does not match its kind.
        """
        match kind:
            case "stream":
                self._write(msgspec.convert(content, Stream).text)
            case "execute_result" | "display_data":
                self._show(msgspec.convert(content, Bundle).data)
            case "error":
                failure = msgspec.convert(content, CellFailure)
                self._error = _without_surrogates(failure.ename[:ERROR_NAME_LIMIT])
                self._write(_COLOUR.sub("", "\n".join(failure.traceback)) + "\n")
            case "status":
                return msgspec.convert(content, KernelStatus).execution_state == "idle"
            case "execute_reply":
                if msgspec.convert(content, CellReply).status == "aborted":
                    self._error = "Aborted"
                    self._write("[this cell did not run, because an attached client's cell failed]\n")
        return False

    def reply(self, *, timed_out: bool, notice: str, error: str = "") -> PythonDone:
        """Return the reply for the model."""
        captured = self._text.take()
        display = self._display.take()
        return PythonDone(
            0, captured.text(), captured.omitted, error or self._error, timed_out, notice, display
        )

    def _write(self, text: str) -> None:
        self._text.feed(text.encode("utf-8", "replace"))

    def _show(self, bundle: dict[str, Any]) -> None:
        rich = {
            _without_surrogates(mime): _without_surrogates(str(value))
            for mime, value in bundle.items()
            if mime != "text/plain"
        }
        if "text/plain" in bundle:
            self._write(f"{bundle['text/plain']}\n")
        if rich and not self._display.add(rich):
            size = sum(map(len, rich.values()))
            self._write(f"[display data of {size} characters left out]\n")


def _without_surrogates(text: str) -> str:
    """Replace lone surrogates, which JSON can contain but a reply cannot."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()
