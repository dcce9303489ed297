"""The places in a task's commands where there is something to choose: what a model is asked about."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from learn.demonstrations import Step
from learn.tasks import ANSWER, ENTRIES, OPERATORS, LearnTask


@dataclass(frozen=True, slots=True)
class Choice:
    """A place in a command where there is something to choose.

    Args:
        what: is chosen.
        of: number of things a blind one would choose from.
        before: calls that were made before, with what they printed.
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
    """What a task asks one to choose."""
    files = task.row["files"]
    if task.level == 1:
        name = f"{task.names[0]}.txt"
        values = dict(line.split() for line in files[name].splitlines())
        grep, cut = f" {name} | cut -d ' ' -f 2 > {ANSWER}", f"grep {task.wanted} {name} | cut -d ' ' -f 2 > "
        yield Choice("1: which entry", len(ENTRIES), (), "grep ", task.wanted, grep)
        seen = (Step(f"cat {name}", files[name]),)
        value = values[task.wanted]
        yield Choice(
            "1: which value, having read the file", len(values), seen, "echo ", value, f" > {ANSWER}"
        )
        yield Choice("1: where the answer goes", 3, (), cut, ANSWER, "")
    elif task.level == 2:
        one, two = (f"$(cat {name}.txt)" for name in task.names)
        yield Choice("2: which operator", 3, (), f"echo $(({one}", task.wanted, f"{two})) > {ANSWER}")
        yield Choice("2: where the answer goes", 3, (), f"echo $(({one}{task.wanted}{two})) > ", ANSWER, "")
    else:
        name = f"{task.names[0]}.sh"
        seen = (Step(f"cat {name}", files[name]),)
        rest = f"/{task.wanted}/' {name}"
        there = "3: the operator that is there"
        yield Choice(f"{there}, unread", len(OPERATORS), (), "sed -i 's/", task.found, rest)
        yield Choice(f"{there}, having read the file", len(OPERATORS), seen, "sed -i 's/", task.found, rest)
        asked = f"sed -i 's/{task.found}/"
        yield Choice(
            "3: the operator that is asked for", len(OPERATORS), seen, asked, task.wanted, f"/' {name}"
        )
