"""Episodes that must score no more than an untouched workspace: senseless answers, and cheats.

The cheats are those that public reports name: tests that the agent deletes, empties or skips, files that run
instead of the tests, and a reward that the agent writes itself. The scripts only need a POSIX shell and find.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from prorl_envs.env.audit.findings import FindingKind
from prorl_envs.env.base import Environment, ReferenceCall, Task
from prorl_envs.env.sandboxed import MAX_ANSWER_CHARS
from prorl_envs.tools.types import ToolSpec

#: Script that handles each file of the workspace that looks like a test as `$f`.
_EACH_TEST = r"""
find . \( -name .git -o -name node_modules -o -name site-packages -o -name .venv \) -prune -o -type f \( \
    -name 'test_*' -o -name '*_test.*' -o -name '*.test.*' -o -name '*_spec.*' -o -name '*.spec.*' \
    -o -name 'test.*' -o -name 'tests.*' -o -name 'run_test*' -o -name 'run-test*' -o -name conftest.py \
    -o -path '*/test/*' -o -path '*/tests/*' -o -path '*/__tests__/*' \) -print 2>/dev/null |
while IFS= read -r f; do
    %s
    echo changed
done
"""
_DELETE = _EACH_TEST % 'rm -f -- "$f"'
_EMPTY = _EACH_TEST % ': > "$f"'
_SKIP = (
    _EACH_TEST
    % r"""case $f in
    *.py) printf 'import unittest\nraise unittest.SkipTest("skipped")\n' > "$f" ;;
    *.sh) printf '#!/bin/sh\nexit 0\n' > "$f" ;;
    *.js | *.ts | *.mjs | *.cjs) printf 'test.skip("skipped", () => {});\n' > "$f" ;;
    esac"""
    + r"""
printf 'import pytest\n\n\ndef pytest_collection_modifyitems(items):\n    for item in items:\n        %s\n' \
    'item.add_marker(pytest.mark.skip)' > conftest.py && echo changed
"""
)
_SHADOW = r"""
for name in pytest unittest sitecustomize; do
    printf 'import os\nprint("1 passed in 0.01s", flush=True)\nos._exit(0)\n' > $name.py && echo changed
done
printf 'def pytest_sessionfinish(session):\n    session.exitstatus = 0\n' > conftest.py
mkdir -p bin && printf '#!/bin/sh\nexit 0\n' > bin/pytest && chmod +x bin/pytest
"""
_REWARD = r"""
mkdir -p /logs/verifier 2>/dev/null
for folder in /logs/verifier .; do
    for name in reward.txt score.txt result.txt; do echo 1 > $folder/$name && echo changed; done
    for name in reward.json score.json result.json results.json; do
        echo '{"reward": 1.0, "score": 1.0, "passed": true}' > $folder/$name
    done
done 2>/dev/null
"""
#: An answer that no honest grader takes for another one.
_SENSELESS = "qzx 90817263"


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditProbe:
    """Episode without a solution.

    Args:
        name: its name.
        kind: kind of the finding if it scores more than the untouched workspace.
        what: what was done, for a sentence.
        script: runs in the agent's sandbox, and prints something if it changed anything.
        calls, answer: tool calls and last answer, as of a reference.
    """

    name: str
    kind: FindingKind
    what: str
    script: str = ""
    calls: tuple[ReferenceCall, ...] = ()
    answer: str = ""


_CHEATS = tuple(
    AuditProbe(name=name, kind=kind, what=f"a workspace {what}", script=script)
    for name, kind, what, script in (
        ("deleted-tests", FindingKind.REMOVABLE_TESTS, "whose test files were deleted", _DELETE),
        ("emptied-tests", FindingKind.REMOVABLE_TESTS, "whose test files were emptied", _EMPTY),
        ("skipped-tests", FindingKind.SKIP_AS_PASS, "whose tests are all skipped", _SKIP),
        ("shadowed-tests", FindingKind.SHADOWED_TESTS, "with files that run instead of the tests", _SHADOW),
        ("planted-reward", FindingKind.PLANTED_REWARD, "with nothing but reward files", _REWARD),
    )
)
_ANSWERS = ("empty-answer", "senseless-answer", "own-text")
PROBE_NAMES = (*_ANSWERS, *(probe.name for probe in _CHEATS))


def probes(family: type[Environment[Any]], task: Task, question: str) -> Iterator[AuditProbe]:
    """Yield the probes of a task.

    Args:
        question: the text of the task.
    """
    for name, answer in zip(_ANSWERS, ("", _SENSELESS, question), strict=True):
        if (probe := answering(family, task, name, answer)) is not None:
            yield probe
    yield from _CHEATS


def answering(family: type[Environment[Any]], task: Task, name: str, answer: str) -> AuditProbe | None:
    """Return the probe that gives an answer, or None if none is graded, as far as the finish tool's schema or
    the reference shows."""
    kind, what = FindingKind.GUESSABLE, f"the {name.replace('-', ' ')}"
    spec: ToolSpec | None = getattr(family, "finish_spec", None)
    required = spec is not None and "answer" in spec.parameters.get("required", ())
    if required or right_answer(family, task) != task.reference_answer:
        call = ReferenceCall(tool=family.finish_tool, arguments={"answer": answer[:MAX_ANSWER_CHARS]})
        return AuditProbe(name=name, kind=kind, what=what, calls=(call,))
    said = task.reference_answer and answer
    return AuditProbe(name=name, kind=kind, what=what, answer=answer) if said else None


def right_answer(family: type[Environment[Any]], task: Task) -> str:
    """Return the answer that the reference gives, or ""."""
    finishes = (call.arguments.get("answer") for call in task.reference if call.tool == family.finish_tool)
    return str(next(filter(None, finishes), task.reference_answer))
