"""Answers that arrive as server-sent events
(https://html.spec.whatwg.org/multipage/server-sent-events.html), read incrementally.

Each event is checked and reported at once; only the sampled data is kept. The complete answer gets the same
checks as any other answer.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

from prorl_envs.errors import ModelError
from prorl_envs.model.answer_checks import (
    ProtocolError,
    RequestContract,
    ServerUnavailable,
    check_ids,
    check_logprobs,
)
from prorl_envs.model.types import OnPartial, Partial, Sampled

#: Maximum bytes of one event. Some servers repeat the whole answer in each event, so events can be long.
_EVENT_BYTES = 64 * 2**20
#: Bytes of a server's error event that are shown.
_SHOWN_BYTES = 500


class Events(ABC):
    """Reader of one answer that arrives as events.

    Args:
        on_partial: receives the partial answer.
        expected: request properties that the answer must match.
    """

    def __init__(self, on_partial: OnPartial, expected: RequestContract) -> None:
        self._on_partial = on_partial
        self._expected = expected
        self.begin()

    def begin(self) -> None:
        """Start an attempt; data of earlier attempts is void."""
        self._rest = bytearray()
        self._ended = False
        self._problem: ModelError | None = None
        self._partial = Partial([], [], "", self._expected.server)
        self._on_partial(self._partial)

    def feed(self, data: bytes) -> bool:
        """Receive more of the answer; return False if an event is too long. Never raises."""
        if self._problem is not None:
            return True
        *lines, rest = data.split(b"\n")
        if lines:
            lines[0] = bytes(self._rest) + lines[0]
            self._rest.clear()
        self._rest += rest
        before = len(self._partial.ids)
        try:
            for line in lines:
                if line.startswith(b"data:"):
                    self._take(line.removeprefix(b"data:").strip())
        except ModelError as error:
            self._problem = error
        if len(self._partial.ids) > before:
            self._on_partial(self._partial)
        return len(self._rest) <= _EVENT_BYTES

    def whole(self) -> Sampled:
        """Return the answer, once it is complete.

        Raises:
            ServerUnavailable: the server reports that it failed.
            ProtocolError: the answer is incomplete, or a part of it has a wrong type or an impossible value.
        """
        if self._problem is not None:
            raise self._problem
        if not self._ended:
            raise ProtocolError(f"{self._expected.server} broke its stream off", hint="its log may say why")
        return self._judged()

    def _take(self, event: bytes) -> None:
        if event == b"[DONE]":
            self._ended = True
        elif event.startswith(b'{"error"'):  # HTTP status 200 was already sent
            excerpt = event[:_SHOWN_BYTES].decode("utf-8", "replace")
            raise ServerUnavailable(f"{self._expected.server} failed during its answer: {excerpt}")
        elif event:
            self._read(event)

    def _add_sampled(self, ids: Sequence[int], logprobs: Sequence[float | None] | None, version: str) -> None:
        """Add sampled ids.

        Raises:
            ProtocolError: the ids or log-probabilities are invalid.
        """
        partial = self._partial
        remaining = replace(self._expected, max_tokens=self._expected.max_tokens - len(partial.ids))
        new = check_ids(ids, remaining)
        partial.logprobs.extend(check_logprobs(logprobs, len(new), remaining))
        partial.ids.extend(new)
        partial.weight_version = partial.weight_version or version

    @abstractmethod
    def _read(self, event: bytes) -> None:
        """Process one event, and pass new ids to `_add_sampled`.

        Raises:
            ProtocolError: the event cannot be read.
        """

    @abstractmethod
    def _judged(self) -> Sampled:
        """Check the complete answer and return it.

        Raises:
            ProtocolError: see `whole`.
        """
