"""Choices in a task's commands, on which a model is tested."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from learn.demonstrations import Step
from learn.tasks import ANSWER, ENTRIES, LearnTask


@dataclass(frozen=True, slots=True)
class Choice:
    """A choice in a command.

    Args:
        what: kind of the choice.
        of: number of options of a random choice.
        before: earlier calls, with their output.
        lead, right, rest: the command, with the right choice in the middle.
    """

    what: str
    of: int
    before: Sequence[Step]
    lead: str
    right: str
    rest: str

    @property
    def command(self) -> str:
        return f"{self.lead}{self.right}{self.rest}"


def choices(task: LearnTask) -> Iterator[Choice]:
    """Return the choices in a task."""
    yield from _OF_LEVEL[task.level](task)


def _read(task: LearnTask) -> Iterator[Choice]:
    name = f"{task.names[0]}.txt"
    text = task.row["files"][name]
    value = dict(line.split() for line in text.splitlines())[task.wanted]
    cut = f" {name} | cut -d ' ' -f 2 > "
    seen = (Step(f"cat {name}", text),)
    yield Choice(
        "1: to search the file (else: to read it)", 2, (), "", "grep", f" {task.wanted}{cut}{ANSWER}"
    )
    yield Choice("1: which entry", len(ENTRIES), (), "grep ", task.wanted, f"{cut}{ANSWER}")
    yield Choice("1: which value, having read the file", 3, seen, "echo ", value, f" > {ANSWER}")
    yield Choice("1: where the answer goes", 3, (), f"grep {task.wanted}{cut}", ANSWER, "")


def _compute(task: LearnTask) -> Iterator[Choice]:
    one, two = (f"$(cat {name}.txt)" for name in task.names)
    yield Choice("2: which operator", 3, (), f"echo $(({one}", task.wanted, f"{two})) > {ANSWER}")
    yield Choice("2: where the answer goes", 3, (), f"echo $(({one}{task.wanted}{two})) > ", ANSWER, "")


def _mend(task: LearnTask) -> Iterator[Choice]:
    name = f"{task.names[0]}.sh"
    seen = (Step(f"cat {name}", task.row["files"][name]),)
    lead, rest = "sed -i 's/", f"/{task.wanted}/' {name}"
    there = "3: the operator that is there"
    yield Choice("3: to read the file first", 2, (), "", "cat", f" {name}")
    yield Choice(f"{there}, unread", 3, (), lead, task.found, rest)
    yield Choice(f"{there}, having read the file", 3, seen, lead, task.found, rest)
    asked = f"{lead}{task.found}/"
    yield Choice("3: the operator that is asked for", 3, seen, asked, task.wanted, f"/' {name}")


_OF_LEVEL = {1: _read, 2: _compute, 3: _mend}
