"""The audit finds defects that public reports describe, and names them rightly."""

from pathlib import Path
from typing import Any

import pytest

from prorl_envs.env.audit.audit import TaskAudit, audit, judge, validate
from prorl_envs.env.audit.episodes import PlayedEpisode
from prorl_envs.env.audit.findings import MEANING, AuditFinding, FindingKind, Severity
from prorl_envs.env.base import Environment, Grade
from prorl_envs.env.node import Node
from prorl_envs.envs.bash.env import BashEnvironment
from prorl_envs.envs.bash.task import BashTask
from prorl_envs.envs.ipython.env import IPythonEnvironment
from prorl_envs.envs.math.env import MathEnvironment
from prorl_envs.sandbox.drivers.bubblewrap import BubblewrapDriver


@pytest.fixture
def node(shared_driver: BubblewrapDriver, tmp_path: Path) -> Node:
    return Node(shared_driver, tmp_path)


SOLUTION = "def add(first, second):\n    total = first + second\n    return total  # the right result\n"
TEST = """\
import unittest
from calc import add


class AddTest(unittest.TestCase):
    def test_small_and_large_numbers(self):
        self.assertEqual(add(1, 2), 3)
        self.assertEqual(add(123456789, 987654321), 1111111110)


if __name__ == "__main__":
    unittest.main()
"""


def shell(command: str) -> dict[str, Any]:
    return {"tool": "bash", "arguments": {"command": command}}


def check(command: str, **fields: Any) -> dict[str, Any]:
    return {"type": "command", "name": "check", "command": command, **fields}


def task(name: str, **fields: Any) -> BashTask:
    row = {
        "id": name,
        "instruction": "Remove the file f.",
        "files": {"f": "x"},
        "checks": [{"type": "file_absent", "path": "f", "name": "gone"}],
        "reference": [shell("rm f")],
    }
    loaded: BashTask = BashEnvironment.load({**row, **fields})
    return loaded


def calc(name: str, command: str, tests: str = "tests/test_calc.py", **fields: Any) -> BashTask:
    """A task in which the agent sees the tests that grade it."""
    return task(
        name,
        **{
            "instruction": f"Mend add in calc.py; the tests of {name} are in the workspace.",
            "files": {"calc.py": "def add(first, second):\n    return 0\n", tests: TEST},
            "checks": [check(command)],
            "reference": [shell(f"cat > calc.py <<'END'\n{SOLUTION}END")],
            **fields,
        },
    )


@pytest.mark.anyio
async def test_the_quick_part_names_the_defect_of_each_task(node: Node) -> None:
    tasks = [
        task("good"),
        task("no-reference", reference=[]),
        task("generous", files={}),
        task("wrong-reference", reference=[shell("true")]),
        task("refused-call", reference=[{"tool": "no_tool", "arguments": {}}, shell("rm f")]),
        task("ungradable", checks=[{"type": "file_matches", "path": "f", "pattern": "("}]),
        task("unpreparable", setup="exit 1"),
        task("unavailable", requires=["no-such-program"]),
    ]
    results = await validate(BashEnvironment, node, tasks)
    assert [result.task_id for result in results] == [task.id for task in tasks]
    said = {result.task_id: " ".join(found.text for found in result.findings) for result in results}
    assert said["good"] == ""
    assert "no reference" in said["no-reference"]
    assert "untouched workspace scores 1" in said["generous"]
    assert (
        'reference scores 0, not 1 (failed: gone): {"name": "gone", "passed": false'
        in said["wrong-reference"]
    )
    assert "reference call 1 (no_tool) was refused" in said["refused-call"]
    assert said["ungradable"].startswith("grader: grep on f")
    assert said["unpreparable"].startswith("environment: setup failed")
    assert [result.ok for result in results] == [True, True, *[False] * 6]
    assert results[0].reference == (1.0, 1.0)
    assert results[0].untouched == 0.0
    assert "no-such-program" in results[-1].skipped


def kinds(result: TaskAudit) -> set[FindingKind]:
    return {found.kind for found in result.findings}


#: The runs of the shell's tests: each passes if there is no test, if all are empty, or if all are skipped.
EACH = "for t in tests/*.sh; do [ ! -e $t ] || sh $t || exit 1; done"
SHELL_TEST = "#!/bin/sh\n[ $(python3 -c 'from calc import add; print(add(1, 2))') = 3 ]\n"
RANDOM_SHARE = "od -An -N4 -tu4 /dev/urandom | awk '{print $1 / 4294967296}' > /logs/verifier/reward.txt"
LEAKED = (
    "printf 'def add(first, second):\\n    total = first + second\\n    return total  # the right result\\n'"
)
HISTORY = (
    f"git init -q . && git config user.email a@b && git config user.name a && git add -A && "
    f"git commit -qm start && {LEAKED} > old.py && git add -A && git commit -qm solved && "
    "git reset -q --hard HEAD~1"
)

PLANTED: list[tuple[FindingKind, BashTask]] = [
    (FindingKind.VACUOUS, task("exists", checks=[check("[ -e f ] || [ ! -e f ]")])),
    (FindingKind.VACUOUS, task("piped", checks=[check("cat no-such-file | true")])),
    (
        FindingKind.VACUOUS,
        task("half", scoring="weighted", checks=[check("true"), {"type": "file_absent", "path": "f"}]),
    ),
    (
        FindingKind.REMOVABLE_TESTS,
        calc(
            "loop",
            EACH,
            "tests/test_calc.sh",
            files={"calc.py": "def add(a, b): return 0\n", "tests/test_calc.sh": SHELL_TEST},
        ),
    ),
    (FindingKind.REMOVABLE_TESTS, calc("script", "python3 test_calc.py", "test_calc.py")),
    (
        FindingKind.REMOVABLE_TESTS,
        calc(
            "found", "! find . -name 'test_*.py' -exec python3 {} \\; 2>&1 | grep -q FAILED", "test_calc.py"
        ),
    ),
    (
        FindingKind.SKIP_AS_PASS,
        calc(
            "discovered",
            "python3 -m unittest discover -s tests -t .",
            files={
                "calc.py": "def add(a, b): return 0\n",
                "tests/__init__.py": "",
                "tests/test_calc.py": TEST,
            },
        ),
    ),
    (FindingKind.SKIP_AS_PASS, calc("default", "python3 -m unittest", "test_calc.py")),
    (
        FindingKind.SKIP_AS_PASS,
        calc(
            "shell",
            "sh tests/test_calc.sh",
            files={"calc.py": "def add(a, b): return 0\n", "tests/test_calc.sh": SHELL_TEST},
        ),
    ),
    (
        FindingKind.SHADOWED_TESTS,
        task(
            "shadowed",
            instruction="Mend add in calc.py.",
            files={"calc.py": "def add(a, b): return 0\n"},
            checks=[
                {
                    "type": "tests",
                    "files": {"test_calc.py": TEST},
                    "command": "cp /tests/test_calc.py . && python3 -m unittest -q test_calc",
                }
            ],
            reference=[shell(f"cat > calc.py <<'END'\n{SOLUTION}END")],
        ),
    ),
    (
        FindingKind.SHADOWED_TESTS,
        task("path", checks=[check("PYTHONPATH=. python3 -c 'import os; assert not os.path.exists(\"f\")'")]),
    ),
    (
        FindingKind.SHADOWED_TESTS,
        task("bin", checks=[check("PATH=bin:$PATH; command -v pytest >/dev/null && pytest || [ ! -e f ]")]),
    ),
    (
        FindingKind.PLANTED_REWARD,
        task("text", checks=[check("[ ! -e f ] || grep -q 1 reward.txt 2>/dev/null")]),
    ),
    (
        FindingKind.PLANTED_REWARD,
        task(
            "json",
            checks=[
                check(
                    "[ ! -e f ] || "
                    'python3 -c \'import json; assert json.load(open("result.json"))["passed"]\''
                )
            ],
        ),
    ),
    (
        FindingKind.PLANTED_REWARD,
        task(
            "copied",
            checks=[
                {
                    "type": "tests",
                    "files": {"a": ""},
                    "command": "([ ! -e f ] && echo 1 || cat score.txt) > /logs/verifier/reward.txt",
                    "reward": "/logs/verifier/reward.txt",
                }
            ],
        ),
    ),
    (
        FindingKind.LEAK,
        calc(
            "copy",
            "python3 -c 'import calc; assert calc.add(1, 2) == 3'",
            "notes.txt",
            setup=f"mkdir .cache && {LEAKED} > .cache/build.py",
        ),
    ),
    (
        FindingKind.LEAK,
        calc("history", "python3 -c 'import calc; assert calc.add(1, 2) == 3'", "notes.txt", setup=HISTORY),
    ),
    (
        FindingKind.LEAK,
        task(
            "key",
            instruction="Write the right number into out.",
            files={"f": "x", "data/answer_key": "4711\n"},
            checks=[{"type": "file_equals", "path": "out", "text": "4711"}],
            reference=[shell("echo 4711 > out")],
        ),
    ),
    (
        FindingKind.FLAKY,
        task(
            "share",
            checks=[
                {
                    "type": "tests",
                    "files": {"a": ""},
                    "command": f"[ -e f ] || {RANDOM_SHARE}",
                    "reward": "/logs/verifier/reward.txt",
                }
            ],
            scoring="weighted",
        ),
    ),
    (FindingKind.TIMEOUT_EDGE, task("slow", checks=[check("[ -e f ] || sleep 10", timeout_s=0.2)])),
    (
        FindingKind.HIDDEN_NETWORK,
        task(
            "download",
            reference=[
                shell("python3 -c 'import urllib.request as r; r.urlopen(\"http://example.com\")' && rm f")
            ],
        ),
    ),
    (
        FindingKind.HIDDEN_NETWORK,
        task("clone", reference=[shell("git clone https://example.com/a/b && rm f")]),
    ),
    (FindingKind.UNSOLVABLE, task("wrong", reference=[shell("mv f g; cp g f")])),
    (FindingKind.UNSOLVABLE, task("absent", reference=[shell("no-such-program f")])),
    (FindingKind.MISSING_FILE, task("quoted", instruction="Remove the file f. `rules.txt` says why.")),
    (
        FindingKind.MISSING_FILE,
        task("absolute", instruction="Remove the file f; see /workspace/docs/rules.md."),
    ),
]


@pytest.mark.anyio
async def test_planted_defects_are_found_and_named(node: Node) -> None:
    tasks = [planted for _, planted in PLANTED]
    results = await audit(BashEnvironment, node, tasks)
    missed = {
        result.task_id: (kind, result.findings)
        for (kind, _), result in zip(PLANTED, results, strict=True)
        if kind not in kinds(result)
    }
    assert missed == {}
    errors = {kind for kind, (severity, _) in MEANING.items() if severity is Severity.ERROR}
    assert not any(result.ok for (kind, _), result in zip(PLANTED, results, strict=True) if kind in errors)


@pytest.mark.anyio
async def test_honest_tasks_have_no_findings(node: Node) -> None:
    tests = {
        "type": "tests",
        "files": {"test_calc.py": f"import sys\n\nsys.path.append('.')\n{TEST}"},
        "command": "python3 /tests/test_calc.py",
    }
    honest = [
        task("absent"),
        calc("hidden", "true", files={"calc.py": "def add(a, b): return 0\n"}, checks=[tests]),
        task(
            "solution-named",
            instruction="Write 4711 to solution.txt.",
            checks=[{"type": "file_equals", "path": "solution.txt", "text": "4711"}],
            reference=[shell("echo 4711 > solution.txt")],
        ),
    ]
    assert [result.findings for result in await audit(BashEnvironment, node, honest)] == [()] * len(honest)


class LenientGrader(MathEnvironment):
    """Takes every answer that contains the right one."""

    async def _judge(self, task: Any, answer: str, spec: Any) -> tuple[bool, str]:
        return task.answer in answer, "contained"


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("family", "row"),
    [
        (
            LenientGrader,
            {
                "id": "a",
                "instruction": "Which is larger, 11 or 5?",
                "answer": "11",
                "reference": [{"tool": "finish", "arguments": {"answer": "11"}}],
            },
        ),
        (
            IPythonEnvironment,
            {
                "id": "a",
                "instruction": "Say something.",
                "checks": [{"type": "text", "value": "say  something.", "ignore_case": True}],
                "reference": [{"tool": "finish", "arguments": {"answer": "Say something."}}],
            },
        ),
    ],
)
async def test_an_answer_that_the_question_holds_is_no_answer(
    node: Node, family: type[Environment[Any]], row: dict[str, Any]
) -> None:
    (result,) = await audit(family, node, [family.load(row)])
    (found,) = result.findings
    assert (found.kind, found.probe) == (FindingKind.GUESSABLE, "own-text") and result.reference == (1.0, 1.0)
    (again,) = await audit(family, node, [family.load(row)], only=["own-text"])
    assert again.findings == (found,)


@pytest.mark.anyio
@pytest.mark.parametrize(("right", "solved"), [(["yes", "Yes", "YES"] * 2, 6), (["yes"] * 5, 0)])
async def test_an_answer_that_solves_most_tasks_of_a_set_is_found(
    node: Node, right: list[str], solved: int
) -> None:
    answers = [*right, *(str(number) for number in range(10 - len(right)))]
    tasks = [
        IPythonEnvironment.load(
            {
                "id": f"t{number}",
                "instruction": f"Question {number}?",
                "checks": [{"type": "text", "value": answer, "ignore_case": True}],
                "reference": [{"tool": "finish", "arguments": {"answer": answer}}],
            }
        )
        for number, answer in enumerate(answers)
    ]
    done = {task.id: TaskAudit(task_id=task.id) for task in tasks}
    found = [result.findings for result in await audit(IPythonEnvironment, node, tasks, done=done)]
    text = "'yes' solves 6 of the set's 10 questions"
    guessed = (AuditFinding(kind=FindingKind.GUESSABLE_SET, text=text),)
    assert found == [guessed] * solved + [()] * (10 - solved)


@pytest.mark.anyio
async def test_repeated_and_contradicting_tasks_are_found_in_a_set_and_between_two(node: Node) -> None:
    long = "Remove the file f. " + " ".join(f"Its line {number} is of no use." for number in range(20))
    first = task("first", instruction=long)
    same = task("same", instruction=long.upper())
    near = task("near", instruction=f"{long} Thanks!", reference=[shell("unlink f")])
    other = task(
        "other", instruction=long, checks=[check("[ -e f ] && [ -e g ]")], reference=[shell("touch g")]
    )
    unlike = task("unlike", instruction="Remove f.", files={"f": "y", "g": "z"})
    found = await audit(BashEnvironment, node, [first, same, near, other, unlike])
    said = {result.task_id: result.findings for result in found}
    assert said["first"] == said["unlike"] == ()
    assert said["same"] == (AuditFinding(kind=FindingKind.DUPLICATE, text="the same task as first"),)
    assert said["near"] == (AuditFinding(kind=FindingKind.DUPLICATE, text="nearly the same task as first"),)
    (contradiction,) = said["other"]
    assert contradiction.kind is FindingKind.CONTRADICTION and "first asks the same" in contradiction.text
    (leaked,) = await audit(BashEnvironment, node, [first], against=[same])
    assert [found.text for found in leaked.findings] == ["the same task as same of the other set"]


def test_a_reference_must_score_the_same_each_time() -> None:
    whole, other = (
        PlayedEpisode(grade=Grade(reward=1.0, components=parts), refused=(), outputs=())
        for parts in ({"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 1.0})
    )
    assert judge([whole, whole]) == []
    (found,) = judge([whole, other])
    assert found.kind is FindingKind.FLAKY
