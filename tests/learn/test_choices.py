"""Choices for tests of a model: the right choices are those that solve the tasks."""

import itertools
from collections import Counter

from learn.choices import choices
from learn.demonstrations import Step
from learn.tasks import tasks


def test_every_right_choice_occurs_in_a_command_that_solves_the_task() -> None:
    kinds = Counter[str]()
    for task in itertools.islice(tasks("held_out", 0), 30):
        (reference,) = task.row["reference"]
        for choice in choices(task):
            kinds[choice.what] += 1
            for step in choice.before:
                assert step == Step(f"cat {(name := step.command[4:])}", task.row["files"][name])
            if "value" in choice.what:
                assert task.row["checks"][1]["text"] == f"{choice.right}\n"
                assert choice.command == f"echo {choice.right} > answer.txt"
            elif "first" in choice.what:
                assert choice.command == f"cat {task.names[0]}.sh"
            else:
                assert choice.command == reference["arguments"]["command"]
    assert len(kinds) == 10
    assert set(kinds.values()) == {10}
