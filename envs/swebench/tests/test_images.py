"""Instances with an image: location of the image, and episodes in it."""

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.progress import Progress

from prorl_envs.cli.commands.prepare import prepare
from prorl_envs.env.audit.audit import validate
from prorl_envs.env.base import Grade
from prorl_envs.env.node import Node
from prorl_envs.env.options import Options, with_options
from prorl_envs.env.sandboxed import sandbox_session
from prorl_envs.envs.swebench.env import SwebenchEnvironment
from prorl_envs.envs.swebench.images import Images
from prorl_envs.envs.swebench.interpreters import interpreters, mounts_of
from prorl_envs.envs.swebench.options import ImageOptions
from prorl_envs.envs.swebench.schemas import script
from prorl_envs.envs.swebench.task import SwebenchTask
from prorl_envs.errors import EnvironmentFault, GraderError, InputError
from prorl_envs.sandbox.base import Mount, SandboxSpec
from prorl_envs.tools.client.python import PythonEngine
from prorl_envs.tools.types import ToolCall
from tests.sandbox.rootfs import write_python, write_rootfs

PROGRAMS = ("sh", "bash", "cat", "cp", "env", "git", "ln", "ls", "mkdir", "mv", "rm", "sleep", "tail")
GIT = ("git", "-c", "user.name=x", "-c", "user.email=x@x", "-c", "init.defaultBranch=main")

#: The image's script for the hidden tests; `test_b` also fails with the reference.
RUN_TESTS = """
. r2e_tests/test_1.sh > /tmp/summary
echo '=== short test summary info ==='
cat /tmp/summary
echo 'FAILED r2e_tests/test_1.py::test_b - never'
exit 1
"""
HIDDEN_TEST = """
if [ "$(cat value)" = 2 ]; then echo 'PASSED r2e_tests/test_1.py::test_a'
else echo 'FAILED r2e_tests/test_1.py::test_a - not 2'; fi
"""


def row(**changes: Any) -> dict[str, Any]:
    files = [
        {
            "header": {"file": {"path": "value"}},
            "old_file_content": "1\n",
            "new_file_content": "2\n",
        }
    ]
    return {
        "repo_name": "thing",
        "commit_hash": "0123456789ab",
        "docker_image": "somebody/thing_final:0123456789ab",
        "problem_statement": "It is one.",
        "expected_output_json": json.dumps({"test_a": "PASSED", "test_b": "FAILED"}),
        "parsed_commit_content": json.dumps({"file_diffs": files}),
        **changes,
    }


@pytest.fixture(scope="module")
def task() -> SwebenchTask:
    return SwebenchEnvironment.load(row())


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with one image, whose repository has the fix as a later commit."""
    folder = tmp_path_factory.mktemp("images")
    write_image(folder / "thing_final_0123456789ab")
    return folder


def write_image(root: Path) -> Path:
    """Create an image whose repository has the fix as a later commit."""
    write_rootfs(root, PROGRAMS)
    tree = root / "testbed"
    tree.mkdir()
    (tree / "value").write_text("1\n")
    (tree / "ignored").write_text("tracked all the same\n")
    (tree / ".gitignore").write_text("ignored\n")
    (tree / ".gitattributes").write_text("*.txt text -diff\n")
    (tree / "dos.txt").write_bytes(b"one\r\n")
    (tree / "run_tests.sh").write_text(RUN_TESTS)
    (root / "r2e_tests").mkdir()
    (root / "r2e_tests/test_1.sh").write_text(HIDDEN_TEST)
    for arguments in (("init", "-q"), ("add", "-Af", "."), ("commit", "-qm", "base"), ("tag", "v1.0")):
        subprocess.run([*GIT, *arguments], cwd=tree, check=True)
    (tree / "value").write_text("2\n")
    for arguments in (("commit", "-qam", "the fix"), ("tag", "v1.1"), ("checkout", "-q", "v1.0")):
        subprocess.run([*GIT, *arguments], cwd=tree, check=True)
    return root


@pytest.fixture(scope="module")
def family(images: Path) -> type[SwebenchEnvironment]:
    return family_of(images)


def family_of(images: Path, **changes: Any) -> type[SwebenchEnvironment]:
    own = {"images": {"folder": str(images), "patterns": ["*{id}.sif", "{name}*"]}}
    made = with_options("images", SwebenchEnvironment, Options(own=own, **changes))
    assert issubclass(made, SwebenchEnvironment)
    return made


async def graded(family: type[SwebenchEnvironment], node: Node, task: SwebenchTask, command: str) -> Grade:
    async with family(node) as env:
        await env.init(task)
        await env.call(ToolCall(id="call", name="bash", arguments={"command": command}))
        return await env.eval()


@pytest.mark.anyio
async def test_the_reference_resolves_and_the_untouched_tree_does_not(
    family: type[SwebenchEnvironment], node: Node, task: SwebenchTask
) -> None:
    (verdict,) = await validate(family, node, [task])
    assert verdict.findings == ()
    assert (set(verdict.reference), verdict.untouched) == ({1.0}, 0.0)


@pytest.mark.anyio
async def test_neither_later_commits_nor_tests_are_in_the_agents_sandbox(
    family: type[SwebenchEnvironment], node: Node, task: SwebenchTask
) -> None:
    async with family(node) as env:
        await env.init(task)
        look = (
            "pwd; cat /etc/image; git status --short; git tag; git log --all --format=%s; ls -1 /r2e_tests *"
        )
        call = ToolCall(id="look", name="bash", arguments={"command": look})
        seen = (await env.call(call)).text
    assert seen == "/testbed\nfrom the image\nv1.0\nBase commit\ndos.txt\nignored\nvalue\n\n/r2e_tests:\n"


CELL = """
import sys, only_in_the_image
print(sys.prefix, only_in_the_image.NAME, "ipykernel" in sys.modules)
open("value", "w").write("2\\n");
"""


@pytest.mark.anyio
async def test_a_python_session_runs_the_images_own_interpreter(tmp_path: Path, node: Node) -> None:
    root = write_image(tmp_path / "thing_final_0123456789ab")
    write_python(root, "/opt/miniconda3/envs/testbed")
    (library,) = root.glob("opt/miniconda3/envs/testbed/lib/python3*")
    (library / "only_in_the_image.py").write_text("NAME = 'from the image'\n")
    task = SwebenchEnvironment.load(row())
    async with family_of(tmp_path, python="kernel")(node) as env:
        prompt = await env.init(task)
        assert [tool.name for tool in prompt.tools] == ["bash", "str_replace_editor", "ipython", "finish"]

        async def cell(code: str) -> str:
            return (await env.call(ToolCall(id="call", name="ipython", arguments={"code": code}))).text

        assert await cell(CELL) == "/opt/miniconda3/envs/testbed from the image True\n"
        assert await cell("!git status --short") == " M value\n"
        assert "No module named 'prorl_envs'" in await cell("import prorl_envs")
        assert (await env.eval()).reward == 1


@pytest.mark.anyio
async def test_an_image_without_ipykernel_is_a_fault_of_the_environment(
    images: Path, node: Node, task: SwebenchTask
) -> None:
    async with family_of(images, python="kernel")(node) as env:
        with pytest.raises(EnvironmentFault, match="python3 cannot be started") as caught:
            await env.init(task)
    assert "install ipykernel in the image" in caught.value.hint


@pytest.fixture
def other_python(request: pytest.FixtureRequest, tmp_path: Path) -> SandboxSpec:
    """Return the spec of a sandbox whose `python3` is of another version and has ipykernel."""
    if (found := interpreters().get(request.param)) is None:
        pytest.skip(f"this machine has no Python {request.param}")
    venv = tmp_path / "venv"
    for command in (
        [str(found.executable), "-m", "venv", str(venv)],
        [str(venv / "bin/python"), "-m", "pip", "install", "--quiet", "ipykernel"],
    ):
        if subprocess.run(command, check=False).returncode != 0:
            pytest.skip(f"ipykernel cannot be installed for Python {request.param}")
    mounts = (*mounts_of(found.prefix), Mount(source=venv, target=str(venv)))
    return SandboxSpec(mounts=mounts, env={"PATH": f"{venv}/bin:/usr/bin:/bin"})


@pytest.mark.thorough
@pytest.mark.anyio
@pytest.mark.parametrize("other_python", ["3.7", "3.8", "3.13"], indirect=True)
async def test_a_kernel_of_another_python_keeps_the_promises_of_a_session(
    other_python: SandboxSpec, node: Node
) -> None:
    async with sandbox_session(node, other_python, python=PythonEngine.KERNEL) as session:
        tools = session.tools
        code = "import asyncio, os\nasync def f(): return 7\nprint(asyncio.run(f()))\nos.system('echo 8')\n9"
        assert (await tools.python(code, timeout_s=60)).text == "7\n8\n9\n"
        refused = await tools.python("input()", timeout_s=60)
        assert "RuntimeError: input() is not available: there is no one to answer" in refused.text
        for stuck in ("await asyncio.sleep(60)", "while True: pass", "!sleep 60"):
            result = await tools.python(f"for _ in range(9):\n    {stuck}", timeout_s=2)
            assert "it was interrupted" in result.text
        assert (await tools.python("await f()", timeout_s=60)).text == "7\n"
        await tools.python("get_ipython().kernel.stop_on_error_timeout = 60.0", timeout_s=60)
        assert "ZeroDivisionError" in (await tools.python("1 / 0", timeout_s=60)).text
        assert (await tools.python("8", timeout_s=60)).text == "8\n", "a cell after one that failed"


CHEATS: Mapping[str, str] = {
    "tests of its own": "mkdir r2e_tests; echo 'echo PASSED x::test_a' > r2e_tests/test_1.sh",
    "a runner of its own": "printf 'echo short test summary info; echo PASSED x::test_a' > run_tests.sh",
    "programs of its own": "printf '#!/bin/sh\\necho 2' > /bin/cat; cp /bin/cat cat",
    "everything removed": "rm -rf * .git*",
}


@pytest.mark.anyio
@pytest.mark.parametrize("cheat", CHEATS)
async def test_no_cheat_scores(
    family: type[SwebenchEnvironment], node: Node, task: SwebenchTask, cheat: str
) -> None:
    grade = await graded(family, node, task, CHEATS[cheat])
    assert (grade.reward, grade.evidence["resolved"]) == (0, False)


@pytest.mark.anyio
async def test_a_change_of_a_tracked_file_that_git_ignores_counts(
    family: type[SwebenchEnvironment], node: Node, task: SwebenchTask
) -> None:
    grade = await graded(family, node, task, "echo 2 > value; echo more >> ignored")
    assert grade.reward == 1
    assert "+more" in grade.evidence["patch"]


@pytest.mark.anyio
async def test_preparing_again_finds_existing_images(
    images: Path, family: type[SwebenchEnvironment], node: Node
) -> None:
    ready = SwebenchEnvironment.load(row(commit_hash="another", docker_image="x/thing_final_0123456789ab"))
    absent = SwebenchEnvironment.load(row(commit_hash="absent", docker_image="x/y"))
    broken = SwebenchEnvironment.load(row(commit_hash="broken", docker_image="x/broken"))
    write_rootfs(images / "broken", PROGRAMS)
    tasks = [ready, absent, broken]
    with Progress(disable=True) as progress:
        first = await prepare(family, node, tasks, 2, progress)
        again = await prepare(family, node, tasks, 2, progress)
    assert [result.state for result in first] == ["done", "left out", "failed"]
    assert [result.state for result in again] == ["was there", "left out", "failed"]
    assert "there is no image of it here: options.images.pull: true" in first[1].why
    assert "the image has no /testbed" in first[2].why


def found(task: SwebenchTask, **options: Any) -> Path | str | None:
    return Images(ImageOptions(**options)).find(task)


def test_an_image_is_found_by_a_case_insensitive_pattern(tmp_path: Path, task: SwebenchTask) -> None:
    (tmp_path / "R2E_Thing_Final_0123.sif").touch()
    assert found(task, folder=tmp_path) == tmp_path / "R2E_Thing_Final_0123.sif"
    (tmp_path / f"{task.id}.sif").touch()
    assert found(task, folder=tmp_path) == tmp_path / f"{task.id}.sif"
    assert found(task, folder=tmp_path, patterns=("{repo}.img",)) is None
    with pytest.raises(InputError, match=r"only \{id\}, \{name\}, \{repo\}"):
        found(task, folder=tmp_path, patterns=("{secret}",))
    with pytest.raises(InputError, match="No such file"):
        found(task, folder=tmp_path / "none")


def test_an_image_is_looked_up(tmp_path: Path, task: SwebenchTask) -> None:
    table = tmp_path / "images.json"
    table.write_text(json.dumps({task.id: "docker://mirror/thing:1"}))
    assert found(task, lookup=table) == "docker://mirror/thing:1"
    table.write_text(json.dumps({task.id: "thing.sif"}))
    with pytest.raises(InputError, match=r"there is no .*/thing\.sif"):
        found(task, lookup=table)
    (tmp_path / "thing.sif").touch()
    assert found(task, lookup=table) == tmp_path / "thing.sif"
    table.write_text("[]")
    with pytest.raises(InputError, match="not a map"):
        found(task, lookup=table)


@pytest.mark.parametrize(
    ("image", "registry", "address"),
    [
        ("a/b:1", "", "docker://a/b:1"),
        ("a/b:1", "mirror:5000", "docker://mirror:5000/a/b:1"),
        ("docker.io/a/b:1", "mirror:5000/hub", "docker://mirror:5000/hub/a/b:1"),
    ],
)
def test_an_address_may_be_one_of_a_mirror(
    task: SwebenchTask, image: str, registry: str, address: str
) -> None:
    task = task.model_copy(update={"image": image})
    assert Images(ImageOptions(registry=registry)).address(task) == address


@pytest.mark.anyio
async def test_without_an_image_an_episode_names_possible_sources(node: Node, task: SwebenchTask) -> None:
    assert "there is no image" in SwebenchEnvironment.unavailable(task)
    async with SwebenchEnvironment(node) as env:
        with pytest.raises(EnvironmentFault, match="there is no image") as caught:
            await env.init(task)
    assert "options.images" in caught.value.hint


def test_a_wrong_option_is_named() -> None:
    with pytest.raises(InputError, match=r"environments\.mine\.options\.images\.foldr: "):
        with_options("mine", SwebenchEnvironment, Options(own={"images": {"foldr": "/x"}}))


def scripted(command: str, **changes: Any) -> SwebenchTask:
    """Return a task in the same image whose test command is `command`."""
    base = SwebenchEnvironment.load(row())
    fields = {
        "expected": {},
        "fail_to_pass": ("a.py::fixed",),
        "pass_to_pass": ("a.py::kept",),
        "log_parser": "parse_log_pytest",
        "eval_script": script((), command),
        "hidden_files": (),
        **changes,
    }
    return base.model_copy(update=fields)


def with_verdict(images: Path, verdict: str) -> type[SwebenchEnvironment]:
    own = {"images": {"folder": str(images), "patterns": ["{name}*"]}, "verdict": verdict}
    made = with_options("images", SwebenchEnvironment, Options(own=own))
    assert issubclass(made, SwebenchEnvironment)
    return made


SUBTEST_FAILS = """
echo 'PASSED a.py::kept'; echo 'FAILED a.py::other - x'
if [ "$(cat value)" = 1 ]; then echo 'FAILED a.py::fixed - x'; else echo 'PASSED a.py::fixed'; fi
[ "$(cat value)" != 3 ] || echo 'SUBFAILED[message] a.py::kept - x'
(exit 1)
"""


@pytest.mark.anyio
@pytest.mark.parametrize(("verdict", "reward"), [("strict", 0), ("official", 1)])
async def test_a_failed_subtest_is_not_resolved_and_the_evidence_names_it(
    images: Path, node: Node, verdict: str, reward: float
) -> None:
    family, task = with_verdict(images, verdict), scripted(SUBTEST_FAILS)
    spoiled = await graded(family, node, task, "echo 3 > value")
    assert (spoiled.reward, spoiled.evidence["official_resolved"]) == (reward, True)
    assert spoiled.evidence["overlooked_failures"] == ["a.py::kept"]
    fixed = await graded(family, node, task, "echo 2 > value")
    assert (fixed.reward, fixed.evidence["overlooked_failures"]) == (1, [])


@pytest.mark.anyio
@pytest.mark.parametrize(("verdict", "reward"), [("strict", 0), ("official", 1)])
async def test_a_test_with_an_error_fails_if_the_log_names_only_failures(
    images: Path, node: Node, verdict: str, reward: float
) -> None:
    task = scripted("echo 'ERROR a.py::fixed - x'; (exit 1)", eval_type="fail_only")
    grade = await graded(with_verdict(images, verdict), node, task, "echo 2 > value")
    assert (grade.reward, grade.evidence["official_resolved"]) == (reward, True)


RAW_BYTES = """
if [ "$(cat -v dos.txt)" = "$(cat expected)" ] && [ ! -e .git/info/attributes ]; then
    echo 'PASSED a.py::fixed'
else
    echo 'FAILED a.py::fixed - x'
fi
echo 'PASSED a.py::kept'
"""


@pytest.mark.anyio
async def test_line_ends_that_git_would_convert_are_graded_as_they_are(
    family: type[SwebenchEnvironment], node: Node
) -> None:
    untouched = await graded(family, node, scripted(RAW_BYTES), "echo 'one^M' > expected")
    assert (untouched.reward, "dos.txt" in untouched.evidence["patch"]) == (1, False)
    change = "printf 'two\\r\\n' >> dos.txt; printf 'one^M\\ntwo^M\\n' > expected"
    changed = await graded(family, node, scripted(RAW_BYTES), change)
    assert (changed.reward, "+two\r\n" in changed.evidence["patch"]) == (1, True)


COVERAGE = "FAIL Required test coverage of 90% not reached. Total coverage: 80.00%"
WITH_CONDITION = f"""
if [ "$(cat value)" = 1 ]; then echo 'FAILED a.py::fixed - x'; else echo 'PASSED a.py::fixed'; fi
echo 'PASSED a.py::kept'
echo '{COVERAGE}'
(exit 1)
"""


async def validated(family: type[SwebenchEnvironment], node: Node, task: SwebenchTask) -> tuple[Any, ...]:
    """Return the rewards of the reference and of the untouched tree."""
    (verdict,) = await validate(family, node, [task])
    return (*set(verdict.reference), verdict.untouched)


@pytest.mark.anyio
async def test_a_condition_that_fails_the_reference_too_leaves_the_verdict_to_the_tests(
    images: Path, family: type[SwebenchEnvironment], node: Node
) -> None:
    task = scripted(WITH_CONDITION)
    assert await validated(family, node, task) == (1, 0)
    fixed = await graded(family, node, task, "echo 3 > value")
    assert (fixed.reward, fixed.evidence["problem"], fixed.evidence["condition"]) == (1, "", COVERAGE)
    assert not fixed.evidence["official_resolved"]
    broken = await graded(family, node, task, "echo 1 > value; echo x > other")
    assert (broken.reward, broken.evidence["problem"], "condition" in broken.evidence) == (0, "", False)
    official = await graded(with_verdict(images, "official"), node, task, "echo 3 > value")
    assert (official.reward, "condition" in official.evidence) == (0, False)
    assert official.evidence["problem"].endswith(f"no test of the log failed: {COVERAGE}")


@pytest.mark.anyio
async def test_a_condition_of_any_kind_is_known_by_its_exit_status(
    family: type[SwebenchEnvironment], node: Node
) -> None:
    task = scripted(WITH_CONDITION.replace(COVERAGE, "x").replace("exit 1", "exit 9"))
    assert await validated(family, node, task) == (1, 0)
    fixed = await graded(family, node, task, "echo 3 > value")
    assert fixed.evidence["condition"] == "status 9 without a failed test, as with the reference patch"


@pytest.mark.anyio
async def test_the_reference_of_a_bug_is_its_reverse(family: type[SwebenchEnvironment], node: Node) -> None:
    task = scripted(WITH_CONDITION)
    patch = task.patch.replace("-1", "-2").replace("+2", "+1")
    task = task.model_copy(update={"patch": patch, "bug": True})
    # The build applies the bug to the image's tree, whose value is 1.
    fixed = await graded(family, node, task, "echo 2 > value")
    assert (fixed.reward, fixed.evidence["condition"]) == (1, COVERAGE)


#: Ends of the test command, by the content of `value`; the reference's content is 2.
ENDS = f"""
value=$(cat value)
case $value in 1) echo 'FAILED a.py::fixed - x' ;; missing) ;; *) echo 'PASSED a.py::fixed' ;; esac
echo 'PASSED a.py::kept'
[ "$value" = forged ] || echo '{COVERAGE}'
case $value in status) exit=9 ;; *) exit=1 ;; esac
(exit $exit)
"""


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("value", "problem", "condition"),
    [
        ("missing", "", COVERAGE),
        ("forged", "the test command ended with status 1, but no test of the log failed", None),
        ("status", f"the test command ended with status 9, but no test of the log failed: {COVERAGE}", None),
    ],
)
async def test_a_condition_gives_no_reward_for_missing_tests_or_another_end(
    family: type[SwebenchEnvironment], node: Node, value: str, problem: str, condition: str | None
) -> None:
    grade = await graded(family, node, scripted(ENDS), f"echo {value} > value")
    assert (grade.reward, grade.evidence["problem"], grade.evidence.get("condition")) == (
        0,
        problem,
        condition,
    )


@pytest.mark.anyio
async def test_a_condition_that_only_the_submission_fails_is_its_fault(
    family: type[SwebenchEnvironment], node: Node
) -> None:
    task = scripted(WITH_CONDITION.replace("(exit 1)", '[ "$(cat value)" = 2 ]'))
    grade = await graded(family, node, task, "echo 3 > value")
    assert (grade.reward, "condition" in grade.evidence) == (0, False)
    assert grade.evidence["problem"].endswith(COVERAGE)


@pytest.mark.anyio
@pytest.mark.parametrize("changes", [{"eval_type": "fail_only"}, {"patch": ""}])
async def test_no_condition_is_found_without_a_reference_or_if_logs_name_only_failures(
    family: type[SwebenchEnvironment], node: Node, changes: Mapping[str, Any]
) -> None:
    grade = await graded(family, node, scripted(WITH_CONDITION, **changes), "echo 2 > value")
    assert (grade.reward, "condition" in grade.evidence) == (0, False)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("script", "patch", "error"),
    [
        (
            "[ $(cat value) != 2 ] || exit 0",
            None,
            "did not finish, on the tree with the reference patch",
        ),
        ("true", "diff --git a/no b/no\n--- a/no\n+++ b/no\n@@ -1 +1 @@\n-1\n+2\n", "does not apply"),
    ],
)
async def test_a_reference_without_a_verdict_is_an_error_without_a_reward(
    family: type[SwebenchEnvironment], node: Node, script: str, patch: str | None, error: str
) -> None:
    task = scripted(f"{script}\n{WITH_CONDITION}", **({"patch": patch} if patch else {}))
    with pytest.raises(GraderError, match=error):
        await graded(family, node, task, "echo 3 > value")
