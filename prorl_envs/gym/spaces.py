"""Space of any Unicode text. `gymnasium.spaces.Text` has a fixed alphabet without spaces or newlines."""

from typing import Any

import numpy as np
from gymnasium import spaces

#: Characters of samples: printable ASCII and white space, and a few others, so that samples cover both.
_ALPHABET = "\n\t" + "".join(map(chr, range(32, 127))) + "äßπλже日本語🙂"
_MAX_SAMPLE = 64


class UnicodeText(spaces.Space[str]):
    """Space of every valid Unicode string up to a length, including the empty one.

    Args:
        max_length: maximum characters (code points) of a member.
        seed: seed of the space's generator, or a generator.
    """

    def __init__(self, max_length: int, seed: int | np.random.Generator | None = None) -> None:
        super().__init__(dtype=str, seed=seed)
        self.max_length = max_length

    def sample(self, mask: Any | None = None, probability: Any | None = None) -> str:
        """Return a short random text. Nothing can be masked, so both arguments must be None.

        Raises:
            ValueError: a mask or probabilities were given.
        """
        if mask is not None or probability is not None:
            raise ValueError("a UnicodeText space takes neither mask nor probability")
        length = int(self.np_random.integers(0, min(self.max_length, _MAX_SAMPLE), endpoint=True))
        return "".join(_ALPHABET[i] for i in self.np_random.integers(0, len(_ALPHABET), size=length))

    def contains(self, x: Any) -> bool:
        if not isinstance(x, str) or len(x) > self.max_length:
            return False
        try:
            x.encode()
        except UnicodeEncodeError:  # a lone surrogate
            return False
        return True

    @property
    def is_np_flattenable(self) -> bool:
        return False

    def __repr__(self) -> str:
        return f"UnicodeText({self.max_length})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, UnicodeText) and self.max_length == other.max_length

    def __hash__(self) -> int:
        return hash((type(self), self.max_length))
