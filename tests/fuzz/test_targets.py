"""Every fuzzing target with its seeds and some hundred mutated seeds, without a fuzzer.

`make fuzz` also uses coverage to find inputs.
"""

import random

import pytest

from fuzz.targets import TARGETS, run

ROUNDS = 500


def mutated(random_: random.Random, data: bytes, other: bytes) -> bytes:
    """Return an input near a seed: bytes changed, cut out, doubled, or taken from another seed."""
    changed = bytearray(data)
    for _ in range(random_.randint(1, 4)):
        start = random_.randint(0, len(changed))
        end = min(len(changed), start + random_.choice((1, 1, 1, 2, 4, 8, 100)))
        match random_.randrange(5):
            case 0:
                changed[start:end] = random_.randbytes(end - start)
            case 1:
                changed[start:end] = random_.choice((b"\0", b"\xff", b"\x7f\xff\xff\xff", b"\x80" * 8, b""))
            case 2:
                changed[start:start] = changed[start:end]
            case 3:
                changed[start:end] = other[start : start + 40]
            case 4:
                del changed[start:]
    return bytes(changed)


@pytest.mark.parametrize("name", TARGETS)
def test_every_input_is_accepted_or_refused(name: str) -> None:
    seeds = [b"", *TARGETS[name].seeds()]
    for seed in seeds:
        run(name, seed)
    random_ = random.Random(f"prorl {name}")  # the same inputs every time, so that a failure is reproducible
    for _ in range(ROUNDS):
        data = mutated(random_, random_.choice(seeds), random_.choice(seeds))
        try:
            run(name, data)
        except BaseException as error:
            error.add_note(f"with the input {data!r}")
            raise
