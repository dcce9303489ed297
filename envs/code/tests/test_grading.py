"""Grading of solutions, including those that try to read the tests."""

from typing import Any

import pytest

from prorl_envs.env.base import Grade
from prorl_envs.env.node import Node
from prorl_envs.envs.code.env import CodeEnvironment
from prorl_envs.errors import GraderError, InputError
from prorl_envs.tools.types import ToolCall

DOUBLE: dict[str, Any] = {
    "type": "stdio",
    "cases": [{"input": "4\n", "output": "8\n"}, {"input": "21\n", "output": "42\n"}],
}
CALLS: dict[str, Any] = {
    "type": "function",
    "entry_point": "double",
    "cases": [{"args": [4], "expected": 8}, {"args": [21], "expected": 42}],
}
GCD: dict[str, Any] = {
    "type": "function",
    "entry_point": "gcd",
    "cases": [{"args": [4, 6], "expected": 2}],
}
SCRIPT: dict[str, Any] = {
    "type": "script",
    "functions": ["double"],
    "prelude": "needle = 'needle-4242'",
    "cases": [{"code": "assert double(4) == 8"}, {"code": "def check(f):\n    assert f(21) == 42"}],
}
LIMITS = {"time_s": 1, "memory_mb": 256}


async def play(node: Node, tests: dict[str, Any], source: str | None, *commands: str, **more: Any) -> Grade:
    """Run an episode: write the solution, run the commands in the agent's shell, and grade."""
    row = {"id": "t", "instruction": "Do it.", "tests": tests, "limits": LIMITS, **more}
    async with CodeEnvironment(node) as env:
        await env.init(CodeEnvironment.load(row))
        if source is not None:
            create = {"command": "create", "path": "/workspace/solution.py", "file_text": source}
            assert (await env.call(ToolCall(id="e", name="str_replace_editor", arguments=create))).ok
        for command in commands:
            await env.call(ToolCall(id="c", name="bash", arguments={"command": command}), timeout_s=20)
        return await env.eval()


def problems(grade: Grade) -> list[str]:
    return [check.get("problem", "") for check in grade.evidence["checks"]]


PROGRAM = "print(int(input()) * 2)\n"
FUNCTION = "def double(n):\n    return n * 2\n"


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("tests", "source", "reward"),
    [
        (DOUBLE, PROGRAM, 1),
        (DOUBLE, "import sys\nsys.stdout.write(str(int(sys.stdin.readline()) * 2))", 1),
        (DOUBLE, f"{PROGRAM}import sys\nsys.exit(0)", 1),
        (DOUBLE, "import atexit\natexit.register(lambda: print(int(input()) * 2))", 1),
        (DOUBLE, "import threading\nthreading.Thread(target=lambda: print(int(input()) * 2)).start()", 1),
        (DOUBLE, "def main():\n    print(int(input()) * 2)\nif __name__ == '__main__':\n    main()", 1),
        (DOUBLE, "import subprocess\nsubprocess.run(['awk', '{print $1 * 2}'])", 1),
        (DOUBLE, "print(8)", 0),
        (DOUBLE, f"{PROGRAM}exit(3)", 0),
        (DOUBLE, f"{PROGRAM}1 / 0", 0),
        (DOUBLE, "print(", 0),
        (DOUBLE, "", 0),
        (CALLS, FUNCTION, 1),
        (CALLS, "class Solution:\n    def double(self, n: Optional[int]) -> int:\n        return n * 2", 1),
        (CALLS, "import numpy\ndef double(n):\n    return numpy.int64(n * 2)", 1),
        (CALLS, "def double(n):\n    print('noise')\n    return n * 2", 1),
        (
            CALLS,
            "@cache\ndef double(n):\n    return reduce(add, deque([n, n])) + Counter()[inf] - gcd(0, 0)",
            1,
        ),
        (
            CALLS,
            "def double(n, m=9000):\n    return 1 + double(n, m - 1) if m else 2 * n - 9000",
            1,
        ),
        ({**CALLS, "entry_point": "abs"}, "def double(n):\n    return n * 2", 0),
        (GCD, "x = gcd(4, 6)", 0),
        (GCD, "from math import gcd", 1),
        (GCD, "class Solution:\n    def gcd(self, a, b):\n        return gcd(a, b)", 1),
        (CALLS, "def triple(n):\n    return n * 2", 0),
        (CALLS, "double = 8", 0),
        (SCRIPT, FUNCTION, 1),
        (SCRIPT, "def double(n):\n    return n * 3", 0),
        (SCRIPT, "def double(n):\n    raise ValueError(n)", 0),
    ],
)
async def test_each_kind_distinguishes_right_from_wrong(
    node: Node, tests: dict[str, Any], source: str, reward: int
) -> None:
    grade = await play(node, tests, source, limits={"time_s": 5, "memory_mb": 1024})
    assert grade.reward == reward, grade.evidence


@pytest.mark.anyio
@pytest.mark.timeout(300)
@pytest.mark.parametrize("tests", [DOUBLE, CALLS, SCRIPT], ids=lambda tests: str(tests["type"]))
@pytest.mark.parametrize(
    "source",
    [
        "import os\nos._exit(0)",
        "import sys\nsys.exit(0)",
        "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)",
        "import os, signal\nos.kill(-1, signal.SIGKILL)",
        "while True: pass",
        "import time\ntime.sleep(1000)",
        "x = [0] * 10**9",
        "import os\nwhile True:\n    os.fork()",
        "import sys\nwhile True:\n    sys.stdout.write('8\\n' * 10000)",
        "import sys\nwhile True:\n    sys.stderr.write('8\\n' * 10000)",
        'print(\'{"secret": "", "results": [{"status": "ok", "output": "8"}] * 2}\')',
        # writes to any descriptor or process
        'import os, glob\nfor fd in range(3, 200):\n    try:\n        os.write(fd, b\'{"status": "ok"}\')\n'
        "    except OSError:\n        pass\n"
        "for path in glob.glob('/proc/[0-9]*/fd/*'):\n    try:\n"
        "        open(path, 'w').write('{\"status\": \"ok\"}')\n    except OSError:\n        pass\n"
        "os._exit(0)",
        # a result that claims to equal every value
        "class Yes:\n    def __eq__(self, other): return True\n    __hash__ = None\n"
        "def double(n):\n    return Yes()",
        "class Yes(int):\n    def __eq__(self, other): return True\n"
        "    def __ne__(self, other): return False\n"
        "def double(n):\n    return Yes()",
        # changes of builtins that the tests use
        "import builtins\nbuiltins.AssertionError = None\nbuiltins.print = None\nbuiltins.exec = None\n"
        "def double(n):\n    return 0",
        "def double(n):\n    import itertools\n    return itertools.count()",
        "def double(n):\n    value = []\n    for _ in range(5000):\n        value = [value]\n"
        "    return value",
        "def double(n):\n    return '9' * 10**7",
        "double = 1",
    ],
)
async def test_cheats_score_zero(node: Node, tests: dict[str, Any], source: str) -> None:
    grade = await play(node, tests, source, limits={**LIMITS, "time_s": 0.3, "total_s": 10})
    assert grade.reward == 0.0


@pytest.mark.anyio
@pytest.mark.parametrize("tests", [DOUBLE, CALLS, SCRIPT], ids=lambda tests: str(tests["type"]))
async def test_stopping_the_forking_process_scores_zero(node: Node, tests: dict[str, Any]) -> None:
    """Only `total_s`, the limit of all cases together, ends this episode."""
    stop = "import os, signal\nos.kill(os.getppid(), signal.SIGSTOP)\nwhile True: pass"
    grade = await play(node, tests, stop, limits={"time_s": 0.3, "total_s": 2})
    assert (grade.reward, problems(grade)[0]) == (0.0, "lost")


@pytest.mark.anyio
@pytest.mark.parametrize("tests", [DOUBLE, CALLS, SCRIPT], ids=lambda tests: str(tests["type"]))
async def test_neither_expected_values_nor_tests_are_visible_to_the_solution(
    node: Node, tests: dict[str, Any]
) -> None:
    """The solution searches its own process, all other processes and all files that it can read."""
    spy = """
import gc, glob, os, sys
def look():
    found = []
    for path in [*glob.glob('/proc/[0-9]*/cmdline'), *glob.glob('/proc/[0-9]*/environ'),
                 *glob.glob('/proc/[0-9]*/fd/*'), *glob.glob('/workspace/*'), *glob.glob('/tmp/*')]:
        try:
            if os.path.isfile(path) and int(path.split('/')[2]) != os.getpid():
                found.append(open(path, 'rb').read(100_000))
        except (OSError, ValueError):
            pass
    for path in glob.glob('/proc/[0-9]*/maps'):
        if int(path.split('/')[2]) == os.getpid():
            continue
        try:
            memory = open(path.replace('maps', 'mem'), 'rb', 0)
            for line in open(path):
                start, end = (int(part, 16) for part in line.split()[0].split('-'))
                if line.split()[1].startswith('rw') and end - start < 2**26:
                    memory.seek(start)
                    found.append(memory.read(end - start))
        except OSError:
            pass
    frame = sys._getframe()
    while frame:
        found += [repr(frame.f_locals).encode(), repr(frame.f_code.co_consts).encode()]
        frame = frame.f_back
    found += [repr(o).encode(errors='replace') for o in gc.get_objects() if isinstance(o, (str, dict, list))]
    needle = bytes.fromhex('6e6565646c652d34323432')
    return any(needle in text for text in found)
def double(n=None):
    return 4242 if look() else 7
if __name__ == '__main__':
    print(double())
"""
    cases: dict[str, dict[str, Any]] = {
        "stdio": {
            "cases": [{"input": "1\n", "output": "needle-4242"}, {"input": "needle-4242", "output": ""}]
        },
        "function": {"cases": [{"args": [1], "expected": "needle-4242"}]},
        "script": {"cases": [{"code": "got = double(1)\nassert got == 'needle-4242', f'got {got}'"}]},
    }
    changed = {**tests, **cases[tests["type"]]}
    grade = await play(node, changed, spy, scoring="weighted", limits={"time_s": 10, "memory_mb": 1024})
    assert grade.reward == 0.0
    seen = grade.evidence["checks"][0]["seen"]
    assert "7" in seen and "4242" not in seen, grade.evidence


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("while True: pass", "time"),
        ("import time\ntime.sleep(1000)", "time"),
        ("print('x' * 10**6)", "output"),
        ("x = bytearray(10**9)", "error"),
        ("1 / 0", "error"),
        ("print(1)", "wrong"),
        ("import os, signal\nos.kill(-1, signal.SIGKILL)", "lost"),
    ],
)
async def test_the_evidence_names_the_problem(node: Node, source: str, problem: str) -> None:
    grade = await play(node, DOUBLE, source)
    assert problems(grade)[0] == problem, grade.evidence


@pytest.mark.anyio
async def test_a_failed_case_costs_its_share_in_weighted_scoring(node: Node) -> None:
    source = "n = int(input())\nif n == 4:\n    while True: pass\nprint(n * 2)"
    grade = await play(node, DOUBLE, source, scoring="weighted")
    assert (grade.reward, problems(grade)) == (0.5, ["time", ""])
    grade = await play(node, DOUBLE, source)
    assert (grade.reward, problems(grade)) == (0.0, ["time", "not run"])


@pytest.mark.anyio
async def test_processes_of_a_case_are_killed_before_the_next(node: Node) -> None:
    source = """
import os, time
n = int(input())
print(n * 2, flush=True)
if n == 4 and os.fork() == 0:
    os.setsid()
    if (pid := os.fork()) == 0:
        time.sleep(1000)
    open('/tmp/pid', 'w').write(str(pid))
    os._exit(0)
elif n == 4:
    os.wait()
else:
    try:
        os.kill(int(open('/tmp/pid').read()), 0)
        print('it lives')
    except ProcessLookupError:
        pass
"""
    grade = await play(node, DOUBLE, source, limits={"time_s": 5})
    assert grade.reward == 1.0, grade.evidence


@pytest.mark.anyio
@pytest.mark.parametrize(
    "command",
    [
        "mkdir solution.py",
        "mkfifo solution.py",
        "ln -s /dev/zero solution.py",
        "ln -s /nowhere solution.py",
        "truncate -s 5G solution.py",
        "echo 'print(int(input()) * 2)' > /tmp/solution.py",
        "echo 'print(int(input()) * 2)' > helper.py; echo 'import helper' > solution.py",
        "rm -rf /workspace",
    ],
)
async def test_only_the_solution_file_counts(node: Node, command: str) -> None:
    assert (await play(node, DOUBLE, None, command)).reward == 0.0


@pytest.mark.anyio
async def test_the_agent_finds_no_tests(node: Node) -> None:
    hidden = {**DOUBLE, "cases": [{"input": "needle-4242", "output": "needle-4242"}]}
    row = {"id": "t", "instruction": "Do it.", "tests": hidden}
    places = "/workspace /home /tmp /run /proc/[0-9]*/environ"
    search = f"grep -rlsI 'needle-[0-9]' {places}; find / -name example.jsonl"
    async with CodeEnvironment(node) as env:
        await env.init(CodeEnvironment.load(row))
        found = await env.call(
            ToolCall(id="c", name="bash", arguments={"command": f"({search}) 2>/dev/null"})
        )
        looked = "import importlib.util as u\nprint(u.find_spec('prorl_envs.envs'))"
        imported = await env.call(ToolCall(id="p", name="ipython", arguments={"code": looked}))
    assert "/" not in found.text.replace("[exit status 1]", "")
    assert imported.text.strip() == "None" or "No module" in imported.text


@pytest.mark.anyio
async def test_a_checker_judges_the_programs_output(node: Node) -> None:
    checker = (
        "def check(input, output, expected):\n"
        "    a, b = map(int, output.split())\n"
        "    return a + b == int(input) and expected == ''"
    )
    tests = {"type": "stdio", "cases": [{"input": "7"}, {"input": "9"}], "checker": checker}
    assert (await play(node, tests, "print(1, int(input()) - 1)")).reward == 1.0
    grade = await play(
        node, tests, "n = int(input())\nprint(1, n - 1 if n == 7 else 'x')", scoring="weighted"
    )
    assert (grade.reward, problems(grade)) == (0.5, ["", "wrong"])
    assert "ValueError" in grade.evidence["checks"][1]["seen"]


@pytest.mark.anyio
async def test_an_output_that_crashes_the_checker_is_wrong(node: Node) -> None:
    checker = "import os\ndef check(input, output, expected):\n    return os.kill(os.getpid(), 11) is None"
    tests = {"type": "stdio", "cases": [{"input": "7"}], "checker": checker}
    assert (await play(node, tests, "print(1)")).reward == 0.0


@pytest.mark.anyio
@pytest.mark.parametrize("says", ["print(output)", "import os\n    os.write(1, output.encode())"])
async def test_what_a_checker_prints_is_no_verdict(node: Node, says: str) -> None:
    checker = f"def check(input, output, expected):\n    {says}\n    return False"
    tests = {"type": "stdio", "cases": [{"input": "7"}], "checker": checker}
    assert (await play(node, tests, "print('true')")).reward == 0.0


@pytest.mark.anyio
@pytest.mark.parametrize("status", [0, 1])
async def test_a_checker_that_ends_itself_gives_no_verdict(node: Node, status: int) -> None:
    checker = f"import sys\ndef check(input, output, expected):\n    sys.exit({status})"
    tests = {"type": "stdio", "cases": [{"input": "7"}], "checker": checker}
    with pytest.raises(GraderError, match="ended before it judged every case"):
        await play(node, tests, "print(1)")


@pytest.mark.anyio
async def test_a_checker_that_does_not_start_gives_no_verdict(node: Node) -> None:
    checker = "import no_such_module\ndef check(input, output, expected):\n    return True"
    tests = {"type": "stdio", "cases": [{"input": "7"}], "checker": checker}
    with pytest.raises(GraderError, match="no_such_module"):
        await play(node, tests, "print(1)")


@pytest.mark.anyio
async def test_tests_with_values_that_cannot_be_sent_give_no_verdict(node: Node) -> None:
    tests = {**SCRIPT, "cases": [{"code": "double(object())"}]}
    with pytest.raises(GraderError, match="object"):
        await play(node, tests, FUNCTION)


@pytest.mark.anyio
async def test_plain_values_are_sent_between_tests_and_solution(node: Node) -> None:
    values = "[1.5, float('inf'), 2**100, (1, 'é'), {3: {4, 5}}, b'x', None, True, 2j, frozenset([1])]"
    code = f"for v in {values}:\n    got = echo(v)\n    assert (type(got), got) == (type(v), v), got"
    tests = {"type": "script", "functions": ["echo"], "cases": [{"code": code}]}
    assert (await play(node, tests, "def echo(value):\n    return value")).reward == 1.0


@pytest.mark.anyio
async def test_code_in_the_last_answer_counts_if_no_file_was_written(node: Node) -> None:
    said = f"<think>```python\nprint(0)\n```</think>Here it is:\n```python\n{PROGRAM}```\nDone."
    row = {"id": "t", "instruction": "Do it.", "tests": DOUBLE}
    async with CodeEnvironment(node) as env:
        await env.init(CodeEnvironment.load(row))
        env.on_transcript([{"role": "assistant", "content": said}])
        assert (await env.eval()).reward == 1.0


DIGITS = "1" + "0" * 4_999 + "7"


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("tests", "source"),
    [
        (
            {"type": "stdio", "cases": [{"input": "5000\n", "output": DIGITS}]},
            "print(10 ** int(input()) + 7)",
        ),
        (
            {"type": "stdio", "cases": [{"input": DIGITS, "output": "7"}]},
            "print(int(input()) % 10)",
        ),
        (
            {"type": "script", "functions": ["f"], "cases": [{"code": "assert len(str(f(5000))) == 5001"}]},
            "def f(n): return int(str(10 ** n + 7))",
        ),
        (
            {
                "type": "stdio",
                "cases": [{"input": "", "output": DIGITS}],
                "checker": "def check(input, output, expected): return int(output) == int(expected)",
            },
            "print(f'{10 ** 5000 + 7}')",
        ),
    ],
)
async def test_integers_may_have_more_digits_than_pythons_limit(
    node: Node, tests: dict[str, Any], source: str
) -> None:
    assert (await play(node, tests, source)).reward == 1.0


def test_a_case_without_a_value_is_no_case_with_the_value_null() -> None:
    tests = {
        "type": "function",
        "entry_point": "f",
        "prelude": None,
        "cases": [{"args": [1], "expected": None}],
    }
    row = {"id": "a", "instruction": "x", "starter": None, "input_output": None, "tests": tests}
    cases = CodeEnvironment.load(row).tests.cases
    assert [case.model_dump()["expected"] for case in cases] == [None]
    tests["cases"] = [{"args": [1]}]
    with pytest.raises(InputError, match="expected: Field required"):
        CodeEnvironment.load(row)
