"""The verifier reads all forms of rewards, and files of the agent cannot forge a reward."""

import re
from typing import Any

import pytest

from prorl_envs.env.node import Node
from prorl_envs.envs.terminal.verifier import NoReward, summary_reward
from prorl_envs.errors import GraderError

from .conftest import TEST, MakeRow
from .test_env import episode, graded

pytestmark = pytest.mark.anyio

FORGE = "for f in reward.txt reward.json; do echo 1 > /logs/verifier/$f; done"


@pytest.mark.parametrize(
    "command",
    [
        FORGE,
        f"mkdir -p /tests && echo '{FORGE}' > /tests/test.sh && chmod 755 /tests/test.sh",
        f"rm -r /logs && mkdir /opt/logs && ln -s /opt/logs /logs && mkdir /logs/verifier && {FORGE}",
        f"rm -r /logs/verifier && mkdir /opt/v && ln -s /opt/v /logs/verifier && {FORGE}",
        "ln -s /opt /tests",
        "echo x > /tests",
        "rm -r /logs && echo x > /logs",
        "mkfifo /tests",
        "chmod 000 /logs/verifier",
        f"export PATH=/opt:$PATH; (while true; do {FORGE}; done) & disown",
        "for f in /root/.bashrc /root/.profile /etc/profile; do echo 'echo hello > /app/out.txt' > $f; done",
        "setsid sh -c 'while true; do mkdir -p /tests; echo echo > /tests/test.sh; done' &",
    ],
)
async def test_files_that_the_agent_plants_have_no_effect(
    node: Node, make_row: MakeRow, command: str
) -> None:
    grade = await graded(node, make_row(), command)
    assert grade.reward == 0
    assert grade.evidence["steps"]["tests"] == {
        "rewards": {"reward": 0.0},
        "problem": "",
        "exit_code": 0,
        "output": "cat: /app/out.txt: No such file or directory\n",
    }


async def test_variables_and_functions_of_the_agents_shell_are_gone(node: Node, make_row: MakeRow) -> None:
    command = f"export BASH_ENV=/app/hook LD_PRELOAD=/x; echo '{FORGE}' > /app/hook"
    assert (await graded(node, make_row(), command)).reward == 0


@pytest.mark.parametrize(
    ("command", "path"),
    [
        (
            "mv /bin/cat /bin/kitty; printf '#!/bin/sh\\necho hello\\n' > /bin/cat; chmod 755 /bin/cat",
            "/bin/cat",
        ),
        ("mkdir -p /usr/local/bin; printf '#!/bin/sh\\n' > /usr/local/bin/cat", "/usr/local/bin/cat"),
        ("echo /x.so > /etc/ld.so.preload", "/etc/ld.so.preload"),
        (
            "mkdir -p /usr/lib/python3/dist-packages; touch /usr/lib/python3/dist-packages/a.pth",
            "/usr/lib/python3/dist-packages/a.pth",
        ),
        ("mkdir -p /opt/lib; touch /opt/lib/sitecustomize.py", "/opt/lib/sitecustomize.py"),
        ("touch /app/conftest.py", "/app/conftest.py"),
    ],
)
async def test_changes_that_can_run_instead_of_the_tests_are_listed(
    node: Node, make_row: MakeRow, command: str, path: str
) -> None:
    grade = await graded(node, make_row(), "echo hello > out.txt", command)
    assert grade.evidence["planted"] == [path]


async def test_an_honest_solution_plants_nothing(node: Node, make_row: MakeRow) -> None:
    row = make_row({"tests/test.sh": "#!/bin/bash\necho 1 > /logs/verifier/reward.txt\n"})
    grade = await graded(
        node, row, "echo hello > out.txt; mkdir -p /usr/local/bin; echo > /usr/local/bin/tool; rm /bin/cat"
    )
    assert grade.reward == 1 and grade.evidence["planted"] == []


@pytest.mark.parametrize(
    ("writes", "reward", "components"),
    [
        ("echo 0.25 > /logs/verifier/reward.txt", 0.25, {"reward": 0.25}),
        ("printf '\\357\\273\\2770.25' > /logs/verifier/reward.txt", 0.25, {"reward": 0.25}),
        ("printf '\\357\\273\\277{\"reward\": 1}' > /logs/verifier/reward.json", 1, {"reward": 1}),
        ('echo \'{"reward": 1, "speed": 0.5}\' > /logs/verifier/reward.json', 1, {"reward": 1, "speed": 0.5}),
        ('echo \'{"a": 1, "b": 0.5}\' > /logs/verifier/reward.json', 0.75, {"a": 1, "b": 0.5}),
        ("echo 0.5 > /logs/verifier/reward.json; echo 1 > /logs/verifier/reward.txt", 0.5, {"reward": 0.5}),
        ("echo true > /logs/verifier/reward.json; exit 3", 1, {"reward": 1}),
        (
            'echo \'{"reward": 1, "passed": true, "tests": [], "why": null}\' > /logs/verifier/reward.json',
            1,
            {"reward": 1, "passed": 1},
        ),
        (
            'echo \'{"tests": true, "lint": false}\' > /logs/verifier/reward.json',
            0.5,
            {"tests": 1, "lint": 0},
        ),
        (
            "echo '{\"speed\": 0.5}' > /logs/verifier/reward.json; echo 1 > /logs/verifier/reward.txt",
            1,
            {"speed": 0.5, "reward": 1},
        ),
        (
            "echo '{\"speed\": 0.5}' > /logs/verifier/reward.json; echo > /logs/verifier/reward.txt",
            0.5,
            {"speed": 0.5},
        ),
        (
            'echo \'{"why": "all passed"}\' > /logs/verifier/reward.json; echo 1 > /logs/verifier/reward.txt',
            1,
            {"reward": 1},
        ),
    ],
)
async def test_rewards_are_read(
    node: Node, make_row: MakeRow, writes: str, reward: float, components: dict[str, float]
) -> None:
    grade = await graded(node, make_row({"tests/test.sh": f"#!/bin/bash\n{writes}\n"}))
    assert grade.reward == reward and grade.components == components


@pytest.mark.parametrize(
    ("writes", "problem"),
    [
        ("echo nan > /logs/verifier/reward.txt", "contains no reward: 'nan' is not a finite number"),
        ("echo 1e999 > /logs/verifier/reward.json", "contains no reward"),
        ('echo \'{"reward": "1"}\' > /logs/verifier/reward.json', "'1' is not a finite number"),
        ("echo '{}' > /logs/verifier/reward.json", "0 numbers, not 1 to 100"),
        ("echo '{\"tests\": [1]}' > /logs/verifier/reward.json", "neither"),
        ("echo 1.5 > /logs/verifier/reward.txt", "the reward 1.5 is not from 0 to 1"),
        ("echo -1 > /logs/verifier/reward.txt", "the reward -1 is not from 0 to 1"),
        (r"""printf '{"a":%0400d}' 1 | tr 0 1 > /logs/verifier/reward.json""", "is not a finite number"),
        (r"""printf '{"\\ud800": 1}' > /logs/verifier/reward.json""", "a name is not printable"),
        (": > /logs/verifier/reward.txt", "contains no reward"),
        ("mkfifo /logs/verifier/reward.txt", "cannot be read"),
        ("mkdir /logs/verifier/reward.txt", "cannot be read"),
        ("ln -s reward.txt /logs/verifier/reward.txt", "cannot be read"),
        ("head -c 100000 /dev/zero > /logs/verifier/reward.txt", "more than 65536 bytes"),
        ("sleep 60", "did not finish in 1 s"),
    ],
)
async def test_tests_without_a_usable_reward_give_no_grade(
    node: Node, make_row: MakeRow, writes: str, problem: str
) -> None:
    row = make_row({"tests/test.sh": f"#!/bin/bash\n{writes}\n"}, config="[verifier]\ntimeout_sec = 1\n")
    with pytest.raises(GraderError, match=problem):
        await graded(node, row)


async def test_the_verifier_has_its_own_variables_files_and_network(node: Node, make_row: MakeRow) -> None:
    config = (
        '[environment]\nnetwork_mode = "no-network"\n'
        '[verifier]\nnetwork_mode = "allowlist"\nallowed_hosts = ["a.org"]\n[verifier.env]\nKEY = "x"\n'
    )
    test = (
        "#!/bin/bash\n"
        "[ $KEY = x -a $http_proxy = http://127.0.0.1:3128 -a $PWD = /app -a -f /tests/sub/more ]\n"
        "echo $((1 - $?)) > /logs/verifier/reward.txt\n"
    )
    row = make_row({"tests/test.sh": test, "tests/sub/more": "x"}, config=config)
    async with episode(node, row) as one:
        assert (await one.bash("echo [$KEY$http_proxy]")).text == "[]\n"
        assert (await one.env.eval()).reward == 1


SEPARATE: dict[str, Any] = {
    "tests/Dockerfile": "FROM base\nCOPY . /tests/\nRUN echo own > /etc/verifier\nWORKDIR /app\n",
    "tests/test.sh": (
        "#!/bin/bash\n[ -f /etc/verifier -a ! -e /app/data.txt -a ! -e /etc/planted -a ! -e /app/no.pyc ] && "
        + "bash /tests/real.sh\n"
    ),
    "tests/real.sh": TEST,
}


async def test_a_separate_verifier_sees_only_the_artifacts(node: Node, make_row: MakeRow) -> None:
    config = (
        'artifacts = ["/app/out.txt", "/missing", {source = "/app", exclude = ["*.pyc", "data.txt"]}]\n'
        '[verifier]\nenvironment_mode = "separate"\n'
    )
    row = make_row(SEPARATE, config=config)
    row["directory"]["tests/test.sh"] = {"text": row["directory"]["tests/test.sh"], "executable": True}
    grade = await graded(
        node, row, "echo hello > out.txt; touch no.pyc; touch /etc/planted; rm /bin/cat /bin/bash"
    )
    assert grade.reward == 1, grade.evidence


async def test_a_link_among_the_artifacts_leads_nowhere(node: Node, make_row: MakeRow) -> None:
    config = 'artifacts = ["/app/out.txt"]\n[verifier]\nenvironment_mode = "separate"\n'
    row = make_row(SEPARATE, config=config)
    row["directory"]["tests/test.sh"] = {"text": row["directory"]["tests/test.sh"], "executable": True}
    grade = await graded(node, row, "ln -s /etc/passwd out.txt; ln -s / /logs/artifacts/root")
    assert grade.reward == 0, grade.evidence


async def test_collect_hooks_run_before_the_processes_end(node: Node, make_row: MakeRow) -> None:
    hook = "[[verifier.collect]]\ncommand = 'cat /tmp/state > /app/out.txt'\n"
    command = "mkfifo /tmp/state; (echo hello > /tmp/state) & disown"
    assert (await graded(node, make_row(config=hook), command)).reward == 1


@pytest.mark.parametrize(
    ("command", "path"),
    [
        ("mv /bin /programs; /programs/ln -s programs /bin", "/bin"),
        ("echo x >> /lib/x86_64-linux-gnu/libc.so.6 || ls /lib", "/lib/x86_64-linux-gnu/libc.so.6"),
        ("mkdir -p /usr/bin; echo > /usr/bin/ls", "/usr/bin/ls"),
        ("mkdir -p /root/.local/bin; echo > /root/.local/bin/uvx", "/root/.local/bin/uvx"),
        ("echo > pytest.py", "/app/pytest.py"),
        (
            "d=/opt/site-packages/x.dist-info; mkdir -p $d; echo [pytest11] > $d/entry_points.txt",
            "/opt/site-packages/x.dist-info/entry_points.txt",
        ),
        ("mkdir $'\\xff'; echo > $'\\xff/conftest.py'", "/app/\ufffd/conftest.py"),
        ("mkdir -p secret; echo > secret/conftest.py; chmod 000 secret", "/app/secret/conftest.py"),
    ],
)
async def test_disguised_changes_are_listed_too(
    node: Node, make_row: MakeRow, command: str, path: str
) -> None:
    row = make_row({"tests/test.sh": "#!/bin/sh\necho 0 > /logs/verifier/reward.txt\n"})
    grade = await graded(node, row, command)
    assert path in grade.evidence["planted"], grade.evidence


async def test_listing_changes_leaves_the_modes_of_directories(node: Node, make_row: MakeRow) -> None:
    test = '#!/bin/bash\ncase "$(ls -ld /app/closed)" in d---------*) echo 1 ;; *) echo 0 ;; esac > $1\n'
    row = make_row({"tests/test.sh": test.replace("$1", "/logs/verifier/reward.txt")})
    assert (await graded(node, row, "mkdir -p closed/in/ner; chmod 000 closed/in closed")).reward == 1


@pytest.mark.parametrize(
    "command",
    [
        "rm /bin/sh",
        "/bin/mv /bin /gone",
        "rm -r /app",
        "rm -r /proc /dev /tmp 2> /dev/null; echo > /tmp",
        "rm -r /lib64; rm -r /lib",
        "printf -v d 'x%.0s' {1..200}; for i in {1..30}; do mkdir $d && cd $d; done",
    ],
)
async def test_an_agent_that_destroys_the_system_scores_0(
    node: Node, make_row: MakeRow, command: str
) -> None:
    assert (await graded(node, make_row(), command)).reward == 0


async def test_conflicting_paths_of_test_files_are_a_grader_failure(node: Node, make_row: MakeRow) -> None:
    row = make_row({"tests/a": "file", "tests/a/b": "file"})
    with pytest.raises(GraderError, match="the tests cannot be written"):
        await graded(node, row)


HEADING = "=========================== short test summary info ============================\n"


@pytest.mark.parametrize(
    ("lines", "reward"),
    [
        ("PASSED a.py::b\n=== 1 passed in 0.1s ===\n", 1),
        ("PASSED a.py::b\nFAILED a.py::c - assert 0\n", 0),
        ("PASSED a.py::b\nERROR a.py::b - teardown\n", 0),
        ("PASSED a.py::b\nSKIPPED [1] a.py:7: no network\nXFAIL a.py::c - known\n", 1),
        ("PASSED a.py::b\nXPASS a.py::c\n", 0),
        ("SKIPPED [1] a.py:7: no network\n", 0),
        ("XFAIL a.py::c - known\n", 0),
        ("PASSED a.py::b\nSUBFAILED[one] (i=1) a.py::b - assert 0\n", 0),
        ("PASSED a.py::b\nSUBFAILED(<subtest>) a.py::b\n", 0),
        ("PASSED a.py::b\nSUBFAIL a.py::b - assert 0\n", 0),
        ("[one] (i=1) SUBFAIL a.py::b - assert 0\nPASSED a.py::b\n", 0),
        ("PASSED a.py::b\n=== 1 failed, 1 passed in 0.1s ===\n", 0),
        ("PASSED a.py::b\n=== 1 passed, 2 errors in 0.1s ===\n", 0),
        ("PASSED a.py::b\n[one] SUBPASS a.py::b\nSUBPASSED[SUBFAIL] a.py::b\n", 1),
        ("PASSED a.py::b[x SUBFAIL y]\n=== 1 passed, 1 skipped, 1 xfailed in 0.1s ===\n", 1),
        ("PASSED a.py::b\nIt printed: FAILED, 1 failed\n", 1),
        (f"FAILED a.py::inner\n{HEADING}PASSED a.py::b\n", 1),
        (f"PASSED a.py::inner\n{HEADING}FAILED a.py::b\n", 0),
    ],
)
def test_the_summary_of_pytest_is_read(lines: str, reward: float) -> None:
    assert summary_reward(f"PASSED early\nFAILED early\n{HEADING}{lines}") == {"reward": reward}
    coloured = re.sub(r"(?m)^([A-Z]+|=.*=$)", "\x1b[1m\x1b[31m\\1\x1b[0m", f"{HEADING}{lines}")
    assert summary_reward(coloured.replace("\n", "\r\n")) == {"reward": reward}


START = "============================= test session starts ==============================\n"
END = "============================== 1 {} in 0.12s ===============================\n"
PASSING = f"{HEADING}PASSED a.py::b\n{END.format('passed')}"
FAILING = f"{HEADING}FAILED a.py::c\n{END.format('failed')}"


@pytest.mark.parametrize(
    ("output", "reward"),
    [
        (f"{START}{PASSING}{START}{PASSING}", 1),
        (f"{START}{FAILING}{START}{PASSING}", 0),
        (f"{START}{PASSING}{START}{FAILING}", 0),
        (f"{START}{END.format('passed')}{START}{PASSING}", 1),
        # A test printed the output of another session.
        (f"{START}{START}{FAILING}{START}{PASSING}{PASSING}", 1),
        (f"{START}{START}{PASSING}{FAILING}", 0),
        (f"{START}{FAILING}{PASSING}", 1),
        (f"{START}{PASSING}{FAILING}", 0),
        (f"{START}{PASSING}{FAILING}{START}{PASSING}", 0),
        (f"{START}{START}{FAILING}{PASSING}{START}{FAILING}", 0),
        (f"{START}{START}{PASSING}", 1),
        (f"{START}{START}{FAILING}{START}{PASSING}", 0),
    ],
)
def test_each_session_of_pytest_counts(output: str, reward: float) -> None:
    assert summary_reward(output) == {"reward": reward}


def test_the_summaries_are_found_in_linear_time() -> None:
    for text in ("=" * 1_000_000, "= " + " in 1.1s" * 200_000, "=" + " in 1s (" * 200_000, START * 20_000):
        assert summary_reward(f"{text}\n{PASSING}")["reward"] in (0, 1)


@pytest.mark.parametrize(
    "output", ["", "PASSED a.py::b\n", HEADING, f"PASSED a.py::b\n{HEADING}=== 1 passed ===\n"]
)
def test_an_output_without_a_summary_gives_no_reward(output: str) -> None:
    with pytest.raises(NoReward, match="no summary of pytest"):
        summary_reward(output)
