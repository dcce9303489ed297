"""Demonstrations for the initial imitation: well-formed calls that are sometimes right.

A demonstrator knows the commands, but only partly their purpose: it chooses one of the plans at random,
copies names from the task or elsewhere, knows the right value or operator half of the time and guesses
otherwise, and may write the answer to the wrong file. Sometimes it stops early or breaks off a call. The
imitation therefore teaches the form and the sources of information; the reward teaches the right choices.
"""

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from learn.tasks import ANSWER, ENTRIES, OPERATORS, LearnTask

#: Final message of a demonstrator.
LAST_WORDS = "Done."
#: Share of names that it copies from the task, of values and operators that it knows, and of answers that it
#: puts into the right file.
COPIES, KNOWS, AIMS = 0.9, 0.5, 0.5
#: Share of calls that it breaks off, and share after which it gives up.
BREAKS, STOPS = 0.03, 0.05
_ELSEWHERE = ("out.txt", "result.txt")


@dataclass(frozen=True, slots=True)
class Step:
    """One call of a demonstration.

    Args:
        command: the bash command.
        output: its output.
        broken: whether the call is broken off, so that it never runs.
    """

    command: str
    output: str = ""
    broken: bool = False


def demonstrations(tasks: Iterator[LearnTask], seed: int) -> Iterator[tuple[LearnTask, list[Step]]]:
    """Make a demonstration for each task.

    Args:
        seed: determines all choices.
    """
    chance = random.Random(seed)
    for task in tasks:
        yield task, list(_cut(_PLANS[task.level](task, chance), chance))


def _cut(steps: Iterator[Step], chance: random.Random) -> Iterator[Step]:
    for step in steps:
        if chance.random() < STOPS:
            return
        if chance.random() < BREAKS:
            yield Step(step.command, broken=True)
            return
        yield step


def _read(task: LearnTask, chance: random.Random) -> Iterator[Step]:
    files = task.row["files"]
    name = _copied(f"{task.names[0]}.txt", files, chance)
    if chance.random() < 0.5:
        entry = _copied(task.wanted, ENTRIES, chance)
        yield Step(f"grep {entry} {name} | cut -d ' ' -f 2 > {_target(chance)}")
        return
    yield Step(f"cat {name}", files[name])
    values = dict(line.split() for line in files[name].splitlines())
    value = _known(values.get(task.wanted, ""), values.values(), chance)
    yield Step(f"echo {value} > {_target(chance)}")


def _compute(task: LearnTask, chance: random.Random) -> Iterator[Step]:
    files = [f"{name}.txt" for name in task.names]
    one, two = _copied(files[0], files, chance), _copied(files[1], files, chance)
    sign = _known(task.wanted, OPERATORS, chance)
    yield Step(f"echo $(($(cat {one}){sign}$(cat {two}))) > {_target(chance)}")


def _mend(task: LearnTask, chance: random.Random) -> Iterator[Step]:
    name = f"{task.names[0]}.sh"
    found = chance.choice(OPERATORS)
    if chance.random() < 0.5:
        yield Step(f"cat {name}", task.row["files"][name])
        found = _copied(task.found, OPERATORS, chance)
    yield Step(f"sed -i 's/{found}/{_known(task.wanted, OPERATORS, chance)}/' {name}")


_PLANS = {1: _read, 2: _compute, 3: _mend}


def _copied(right: str, others: Iterable[str], chance: random.Random, share: float = COPIES) -> str:
    return right if right and chance.random() < share else chance.choice(list(others))


def _known(right: str, others: Iterable[str], chance: random.Random) -> str:
    return _copied(right, others, chance, KNOWS)


def _target(chance: random.Random) -> str:
    return ANSWER if chance.random() < AIMS else chance.choice(_ELSEWHERE)
