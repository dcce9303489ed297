"""Bounded output: the start and the end are kept, and the bytes in between are counted."""

from dataclasses import dataclass

from prorl_envs.tools.protocol.messages import DISPLAY_LIMIT, MIME_LIMIT

#: Maximum characters of all rich representations that are forwarded per cell.
DISPLAY_CHARACTERS = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Captured:
    """Kept parts of an output, and the number of omitted bytes between `head` and `tail`."""

    head: bytes
    tail: bytes
    omitted: int

    def text(self) -> str:
        """Return the output as valid Unicode, with a line that names the number of omitted bytes."""
        if not self.omitted:
            return (self.head + self.tail).decode("utf-8", "replace")
        head, tail = _drop_partial_end(self.head), _drop_partial_start(self.tail)
        omitted = self.omitted + len(self.head) - len(head) + len(self.tail) - len(tail)
        return (
            f"{head.decode('utf-8', 'replace')}\n"
            f"[... {omitted} bytes of output left out ...]\n"
            f"{tail.decode('utf-8', 'replace')}"
        )

    def data(self) -> bytes:
        """Return the kept bytes, with a line that names the number of omitted bytes."""
        if not self.omitted:
            return self.head + self.tail
        return b"%b\n[... %d bytes of output left out ...]\n%b" % (self.head, self.omitted, self.tail)


class OutputBuffer:
    """Collector for an output of any length in bounded memory.

    Args:
        limit: bytes kept; the first half from the start, the rest from the end.
    """

    def __init__(self, limit: int) -> None:
        self._head_limit = limit // 2
        self._tail_limit = limit - limit // 2
        self._head = bytearray()
        self._tail = bytearray()
        self._omitted = 0

    def feed(self, data: bytes) -> None:
        """Append output."""
        room = self._head_limit - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        self._tail += data
        # Trimming at twice the limit keeps the cost of each byte constant.
        if len(self._tail) > 2 * self._tail_limit:
            self._trim()

    @property
    def size(self) -> int:
        """Bytes fed since the last `take`."""
        return len(self._head) + len(self._tail) + self._omitted

    def take(self) -> Captured:
        """Return the collected output and reset the buffer."""
        self._trim()
        captured = Captured(bytes(self._head), bytes(self._tail), self._omitted)
        self._head.clear()
        self._tail.clear()
        self._omitted = 0
        return captured

    def _trim(self) -> None:
        excess = len(self._tail) - self._tail_limit
        if excess > 0:
            del self._tail[:excess]
            self._omitted += excess


class DisplayBuffer:
    """Bounded collection of a cell's rich representations."""

    def __init__(self) -> None:
        self._bundles: list[dict[str, str]] = []
        self._characters = 0

    def add(self, bundle: dict[str, str]) -> bool:
        """Keep a representation, by MIME type. Return False if it exceeds a limit."""
        total = self._characters + sum(map(len, bundle)) + sum(map(len, bundle.values()))
        allowed = len(self._bundles) < DISPLAY_LIMIT and len(bundle) <= MIME_LIMIT
        if not allowed or total > DISPLAY_CHARACTERS:
            return False
        self._bundles.append(bundle)
        self._characters = total
        return True

    def take(self) -> list[dict[str, str]]:
        """Return the kept representations and reset the collection."""
        bundles, self._bundles, self._characters = self._bundles, [], 0
        return bundles


def clip(text: str, limit: int) -> tuple[str, int]:
    """Bound a text to about `limit` bytes of UTF-8, keeping both ends.

    Returns:
        The text, and the number of omitted bytes.
    """
    data = text.encode("utf-8", "replace")
    if len(data) <= limit:
        return data.decode(), 0
    buffer = OutputBuffer(limit)
    buffer.feed(data)
    captured = buffer.take()
    return captured.text(), captured.omitted


def _drop_partial_end(data: bytes) -> bytes:
    """Drop a UTF-8 sequence that the cut left incomplete at the end."""
    for back in range(1, min(4, len(data) + 1)):
        byte = data[-back]
        if byte >= 0xC0:
            needed = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return data[:-back] if back < needed else data
        if byte < 0x80:
            break
    return data


def _drop_partial_start(data: bytes) -> bytes:
    """Drop the continuation bytes that the cut left at the start."""
    start = 0
    while start < min(3, len(data)) and data[start] & 0xC0 == 0x80:
        start += 1
    return data[start:]
