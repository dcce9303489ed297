"""Answers that come as server-sent events, read as they come
(https://html.spec.whatwg.org/multipage/server-sent-events.html).

Each event is checked and told at once; only what is sampled is kept. What comes last is judged as any answer.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

from prorl_envs.errors import ModelError
from prorl_envs.policy.protocol import (
    Expectation,
    ProtocolError,
    ServerUnavailable,
    check_ids,
    check_logprobs,
)
from prorl_envs.policy.types import Heard, Partial, Sampled

#: Bytes of one event: servers that tell all again each time have long ones.
_EVENT_BYTES = 64 * 2**20
_SAID = 500


class Events(ABC):
    """One answer as events. Implements `link.Listener`.

    Args:
        heard: told of all that is sampled by then.
        expected: what the answer is held against.
    """

    def __init__(self, heard: Heard, expected: Expectation) -> None:
        self._heard = heard
        self._expected = expected
        self.begin()

    def begin(self) -> None:
        """The answer begins, or begins anew."""
        self._rest = bytearray()
        self._ended = False
        self._problem: ModelError | None = None
        self._partial = Partial([], [], "", self._expected.server)
        self._heard(self._partial)

    def feed(self, data: bytes) -> bool:
        """More of it; False where it is too much."""
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
        """The answer, once all of it has come.

        Raises:
            ServerUnavailable: the server says that it failed.
            ProtocolError: it breaks off, or anything in it is missing, of the wrong type, or impossible.
        """
        if self._problem is not None:
            raise self._problem
        if not self._ended:
            raise ProtocolError(f"{self._expected.server} broke its stream off", hint="its log may say why")
        return self._judged()

    def _take(self, event: bytes) -> None:
        if event == b"[DONE]":
            self._ended = True
        elif event.startswith(b'{"error"'):  # the status was sent before
            said = event[:_SAID].decode("utf-8", "replace")
            raise ServerUnavailable(f"{self._expected.server} failed within its answer: {said}")
        elif event:
            self._read(event)

    def _sampled(self, ids: Sequence[int], logprobs: Sequence[float | None] | None, version: str) -> None:
        """More was sampled.

        Raises:
            ProtocolError: it cannot be.
        """
        known = self._partial
        room = replace(self._expected, max_tokens=self._expected.max_tokens - len(known.ids))
        new = check_ids(ids, room)
        known.logprobs.extend(check_logprobs(logprobs, len(new), room))
        known.ids.extend(new)
        known.weight_version = known.weight_version or version

    @abstractmethod
    def _read(self, event: bytes) -> None:
        """Take one event in, telling `_sampled` of what is new.

        Raises:
            ProtocolError: it cannot be read.
        """

    @abstractmethod
    def _judged(self) -> Sampled:
        """The whole answer, checked.

        Raises:
            ProtocolError: see `whole`.
        """
