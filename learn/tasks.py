"""The tasks: rows of the bash family, of three kinds, generated from a seed.

| level | task | choices |
|---|---|---|
| 1 | one entry of a file, into `answer.txt` | file, entry, where it goes |
| 2 | the sum, difference or product of the numbers in two files | both files, the operator |
| 3 | a script with a wrong operator, to be corrected in place | the wrong operator, and the right one |

The subject of a task is its *topic*: a file with an entry, or with an operation (and the one it has by
mistake). A quarter of the topics never occur in training; held-out tasks use only those.
"""

import operator
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal
from zlib import crc32

Split = Literal["train", "held_out"]

LEVELS = (1, 2, 3)
FILES = ("box", "cup", "desk", "gate", "hall", "lamp", "map", "park", "road", "shop", "tree", "wall")
ENTRIES = ("age", "colour", "cost", "guard", "height", "level", "owner", "room", "size", "state")
VALUES: tuple[str, ...] = (
    "black",
    "blue",
    "brown",
    "deep",
    "flat",
    "green",
    "grey",
    "high",
    "long",
    "low",
    "new",
    "old",
)
VALUES += ("open", "pink", "red", "round", "short", "thin", "wet", "white")
#: By the word in the instruction: the operator in a shell, and the function.
OPERATIONS: dict[str, tuple[str, Callable[[int, int], int]]] = {
    "sum": ("+", operator.add),
    "difference": ("-", operator.sub),
    "product": ("*", operator.mul),
}
OPERATORS = tuple(sign for sign, _ in OPERATIONS.values())
ANSWER = "answer.txt"
#: One topic in this many is held out.
HELD_OUT = 4


@dataclass(frozen=True, slots=True)
class LearnTask:
    """One task, and its solution.

    Args:
        row: a row of the bash family.
        level: 1 to 3.
        names: names of its files, without their suffixes.
        wanted: the entry (level 1) or the operator (levels 2 and 3) that belongs into the command.
        found: level 3: the wrong operator in the script.
    """

    row: dict[str, Any]
    level: int
    names: tuple[str, ...]
    wanted: str
    found: str = ""


def tasks(split: Split, seed: int) -> Iterator[LearnTask]:
    """Generate tasks endlessly, cycling through the levels.

    Args:
        split: the set of topics; the splits share none.
        seed: determines the tasks and their order.
    """
    chance = random.Random(f"{split}/{seed}")
    number = 0
    while True:
        level = LEVELS[number % len(LEVELS)]
        yield _DRAW[level](split, f"{split}-{seed}-{number}", chance)
        number += 1


def held_out(*topic: str) -> bool:
    """Return whether a topic is held out of training."""
    return crc32("/".join(topic).encode()) % HELD_OUT == 0


def _belongs(split: Split, *topic: str) -> bool:
    return held_out(*topic) == (split == "held_out")


def _read(split: Split, id_: str, chance: random.Random) -> LearnTask:
    topics = [(f, e) for f in FILES for e in ENTRIES if _belongs(split, f, e)]
    name, entry = chance.choice(topics)
    other = chance.choice([file for file in FILES if file != name])
    entries = [entry, *chance.sample([e for e in ENTRIES if e != entry], 2)]
    chance.shuffle(entries)
    right, wrong = (dict(zip(entries, chance.sample(VALUES, 3), strict=True)) for _ in range(2))
    while wrong[entry] == right[entry]:  # otherwise the wrong file would be right too
        wrong[entry] = chance.choice(VALUES)
    row = {
        "id": id_,
        "instruction": f"Write the {entry} in {name}.txt to {ANSWER}",
        "files": {f"{name}.txt": _lines(right), f"{other}.txt": _lines(wrong)},
        **_answer("[a-z]", right[entry]),
        "reference": _calls(f"grep {entry} {name}.txt | cut -d ' ' -f 2 > {ANSWER}"),
    }
    return LearnTask(row, 1, (name,), entry)


def _compute(split: Split, id_: str, chance: random.Random) -> LearnTask:
    topics = [(f, word) for f in FILES for word in OPERATIONS if _belongs(split, f, word)]
    first, word = chance.choice(topics)
    second = chance.choice([file for file in FILES if file != first])
    sign, compute = OPERATIONS[word]
    one, two = _numbers(chance)
    row = {
        "id": id_,
        "instruction": f"Write the {word} of {first}.txt and {second}.txt to {ANSWER}",
        "files": {f"{first}.txt": f"{one}\n", f"{second}.txt": f"{two}\n"},
        **_answer("[0-9]", str(compute(one, two))),
        "reference": _calls(f"echo $(($(cat {first}.txt){sign}$(cat {second}.txt))) > {ANSWER}"),
    }
    return LearnTask(row, 2, (first, second), sign)


def _mend(split: Split, id_: str, chance: random.Random) -> LearnTask:
    topics = [
        (f, word, found)
        for f in FILES
        for word, (sign, _) in OPERATIONS.items()
        for found in OPERATORS
        if found != sign and _belongs(split, f, word, found)
    ]
    name, word, found = chance.choice(topics)
    sign, compute = OPERATIONS[word]
    checks = []
    for one, two in (_numbers(chance), _numbers(chance)):
        command = f"bash {name}.sh {one} {two}"
        checks.append({"type": "command", "command": command, "stdout": f"{compute(one, two)}\n"})
    row = {
        "id": id_,
        "instruction": f"Mend {name}.sh so that it prints the {word} of both numbers",
        "files": {f"{name}.sh": f"echo $(($1{found}$2))\n"},
        "checks": checks,
        "reference": _calls(f"sed -i 's/{found}/{sign}/' {name}.sh"),
    }
    return LearnTask(row, 3, (name,), sign, found)


_DRAW: dict[int, Callable[[Split, str, random.Random], LearnTask]] = {1: _read, 2: _compute, 3: _mend}


def _numbers(chance: random.Random) -> tuple[int, int]:
    """Return two numbers whose sum, difference and product all differ."""
    return chance.randint(3, 19), chance.randint(3, 19)


def _lines(entries: dict[str, str]) -> str:
    return "".join(f"{entry} {value}\n" for entry, value in entries.items())


def _answer(pattern: str, right: str) -> dict[str, Any]:
    """Give a third of the reward for an answer of the right kind in its place, the rest for the right one."""
    kind = {"type": "file_matches", "path": ANSWER, "pattern": pattern, "weight": 1.0}
    same = {"type": "file_equals", "path": ANSWER, "text": f"{right}\n", "weight": 2.0}
    return {"checks": [kind, same], "scoring": "weighted"}


def _calls(command: str) -> list[dict[str, Any]]:
    return [{"tool": "bash", "arguments": {"command": command}}]
