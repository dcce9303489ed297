"""What the model imitates before it learns: well-formed calls that are right now and then.

A demonstrator knows the commands, and half of what they are for: it takes one plan or the other, copies names
from the task or from somewhere else, knows which value or operator is right every other time and guesses
otherwise, and forgets where the answer goes. Now and then it stops early or breaks off a call. So the
imitation teaches the form, and what there is to look at; what is right is left to the reward.
"""

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from learn.tasks import ANSWER, ENTRIES, OPERATORS, LearnTask

#: What the demonstrator says when it has finished.
LAST_WORDS = "Done."
#: The share of names that it copies from the task, of values and operators that it knows, and of answers that
#: it puts into the right file.
COPIES, KNOWS, AIMS = 0.9, 0.5, 0.5
#: The share of calls that it breaks off, and after which it gives up.
BREAKS, STOPS = 0.03, 0.05
_ELSEWHERE = ("out.txt", "result.txt")


@dataclass(frozen=True, slots=True)
class Step:
    """One call of a demonstration.

    Args:
        command: what bash is told.
        output: what it prints.
        broken: the call is broken off, so it is never carried out.
    """

    command: str
    output: str = ""
    broken: bool = False


def demonstrations(tasks: Iterator[LearnTask], seed: int) -> Iterator[tuple[LearnTask, list[Step]]]:
    """A demonstration for each task.

    Args:
        seed: the same choices in the same order.
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
