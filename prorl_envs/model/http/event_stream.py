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
from prorl_envs.model.types import Heard, Partial, Sampled

#: Most bytes of one event: servers that repeat the whole answer in each event send long ones.
_EVENT_BYTES = 64 * 2**20
_SAID = 500


class Events(ABC):
    """One answer as events. Implements `model.http.client.Listener`.

    Args:
        heard: receives the partial answer.
        expected: request properties that the answer must match.
    """

    def __init__(self, heard: Heard, expected: RequestContract) -> None:
        self._heard = heard
        self._expected = expected
        self.begin()

    def begin(self) -> None:
        """Start the answer, or restart it."""
        self._rest = bytearray()
        self._ended = False
        self._problem: ModelError | None = None
        self._partial = Partial([], [], "", self._expected.server)
        self._heard(self._partial)

    def feed(self, data: bytes) -> bool:
        """Receive more of the answer; return False if an event is too long."""
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
            self._heard(self._partial)
        return len(self._rest) <= _EVENT_BYTES

    def whole(self) -> Sampled:
        """Return the answer, once it is complete.

        Raises:
            ServerUnavailable: the server reports that it failed.
            ProtocolError: it breaks off, or a part of it is missing, of the wrong type, or impossible.
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
            said = event[:_SAID].decode("utf-8", "replace")
            raise ServerUnavailable(f"{self._expected.server} failed within its answer: {said}")
        elif event:
            self._read(event)

    def _sampled(self, ids: Sequence[int], logprobs: Sequence[float | None] | None, version: str) -> None:
        """Add sampled ids.

        Raises:
            ProtocolError: the ids or log-probabilities are invalid.
        """
        known = self._partial
        room = replace(self._expected, max_tokens=self._expected.max_tokens - len(known.ids))
        new = check_ids(ids, room)
        known.logprobs.extend(check_logprobs(logprobs, len(new), room))
        known.ids.extend(new)
        known.weight_version = known.weight_version or version

    @abstractmethod
    def _read(self, event: bytes) -> None:
        """Process one event, and pass new ids to `_sampled`.

        Raises:
            ProtocolError: it cannot be read.
        """

    @abstractmethod
    def _judged(self) -> Sampled:
        """Check the complete answer and return it.

        Raises:
            ProtocolError: see `whole`.
        """
