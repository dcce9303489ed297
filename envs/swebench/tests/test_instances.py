"""Real instances are built from their source releases, solved, and graded in real sandboxes.

The default is two instances; with `SWEBENCH_ALL=1`, every example that this machine can build is tested.
"""

import asyncio
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from prorl_envs.env.audit.audit import validate
from prorl_envs.env.base import Grade
from prorl_envs.env.node import Node
from prorl_envs.env.registry import example_path, load_tasks
from prorl_envs.envs.swebench.build import Builder
from prorl_envs.envs.swebench.env import SwebenchEnvironment
from prorl_envs.envs.swebench.task import SwebenchTask
from prorl_envs.errors import EnvironmentFault, GraderError
from prorl_envs.tools.types import ToolCall

pytestmark = [pytest.mark.anyio, pytest.mark.thorough, pytest.mark.timeout(600)]

REQUESTS = "psf__requests-6028"
MARSHMALLOW = "marshmallow-code__marshmallow-1252"
PINS = ("pip==24.2", "setuptools==75.1.0", "wheel==0.44.0")


#: Cases below that `make test` runs.
QUICK = {
    REQUESTS,
    "tests, configuration and runner tampered with",
    "code ends the sandbox",
    "code leaves early",
    "repository hostile, processes killed",
}


def with_thorough_marks(names: Iterable[str]) -> list[Any]:
    """Mark all cases but those in QUICK as thorough, because each takes some seconds."""
    return [pytest.param(name, marks=[pytest.mark.thorough] * (name not in QUICK)) for name in names]


def chosen() -> Sequence[str]:
    if os.environ.get("SWEBENCH_ALL") != "1":
        return (REQUESTS, MARSHMALLOW)
    loaded = load_tasks("swebench", example_path("swebench"))
    tasks = [task for task in loaded if isinstance(task, SwebenchTask)]
    return [task.id for task in tasks if not SwebenchEnvironment.unavailable(task)]


async def shell(env: SwebenchEnvironment, command: str) -> str:
    result = await env.call(ToolCall(id="call", name="bash", arguments={"command": command}))
    return result.text


async def graded(node: Node, task: SwebenchTask, *commands: str, solved: bool = False) -> Grade:
    """Run an episode: apply the reference if `solved`, run `commands`, and grade."""
    async with SwebenchEnvironment(node) as env:
        await env.init(task)
        if solved:
            call = task.reference[0]
            await env.call(ToolCall(id="reference", name=call.tool, arguments=dict(call.arguments)))
        for command in commands:
            await shell(env, command)
        return await env.eval()


@pytest.fixture
def task(tasks: Mapping[str, SwebenchTask]) -> SwebenchTask:
    return tasks[REQUESTS]


async def test_concurrent_jobs_build_once(node: Node, task: SwebenchTask) -> None:
    first, second = await asyncio.gather(Builder(node).build(task), Builder(node).build(task))
    assert first == second
    assert len(list((node.cache_dir / "swebench").glob("requests-*/built.json"))) == 1
    assert not list((node.cache_dir / "swebench").glob("*.building"))


@pytest.mark.parametrize("instance", with_thorough_marks(chosen()))
async def test_the_reference_resolves_and_the_untouched_tree_does_not(
    node: Node, tasks: Mapping[str, SwebenchTask], instance: str
) -> None:
    (verdict,) = await validate(SwebenchEnvironment, node, [tasks[instance]])
    assert verdict.findings == ()
    assert (set(verdict.reference), verdict.untouched) == ({1.0}, 0.0)


async def test_the_agent_finds_one_commit_and_no_later_ones(node: Node, task: SwebenchTask) -> None:
    async with SwebenchEnvironment(node) as env:
        await env.init(task)
        assert await shell(
            env, "pwd; git status --short; git tag; git reflog; git log --oneline --all | wc -l"
        ) == ("/testbed\n1\n")
        assert "/testbed/requests/" in await shell(
            env, "python -c 'import requests; print(requests.__file__)'"
        )
        assert "pass" not in await shell(env, "touch /opt/pristine/x && echo pass")


async def test_the_evidence_names_every_test_and_the_patch(node: Node, task: SwebenchTask) -> None:
    grade = await graded(node, task, "echo '# note' >> requests/utils.py")
    assert grade.reward == 0
    assert set(grade.evidence["fail_to_pass"]) == set(task.fail_to_pass)
    assert set(grade.evidence["pass_to_pass"]) == set(task.pass_to_pass)
    assert set(grade.evidence["fail_to_pass"].values()) == {"FAILED"}
    assert "+# note" in grade.evidence["patch"]
    assert grade.components == {"fail_to_pass": 0.0, "pass_to_pass": 1.0}


TAMPER = """
echo 'def test_x(): pass' > tests/test_utils.py
cat > conftest.py <<'END'
import pytest
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    outcome.get_result().outcome = 'passed'
END
cp conftest.py tests/conftest.py
printf '[pytest]\\naddopts = --collect-only\\n' > pytest.ini
printf '#!/bin/sh\\necho PASSED x\\n' > /opt/miniconda3/envs/testbed/bin/pytest
echo 'print(1)' > pip.py
echo 'raise SystemExit' > sitecustomize.py
rm -rf /opt/miniconda3/wheels
"""
COMPILED_PIP = r"""
cat > payload.py <<'END'
open("/testbed/conftest.py", "w").write(
    "import pytest\n@pytest.hookimpl(hookwrapper=True)\ndef pytest_runtest_makereport(item, call):\n"
    "    outcome = yield\n    outcome.get_result().outcome = 'passed'\n"
)
END
python -c 'import py_compile; py_compile.compile("payload.py", "pip.pyc")'
echo '!*.pyc' > .gitignore
"""
CHEATS = {
    "a compiled pip": COMPILED_PIP,
    "tests, configuration and runner tampered with": TAMPER,
    "tests made a link": "rm -r tests && ln -s /tmp tests",
    "everything removed": "rm -rf /testbed/* /testbed/.[a-z]*",
    "code ends the sandbox": "echo 'import os; os.kill(-1, 9)' >> requests/__init__.py",
    "code leaves early": "echo 'import os; os._exit(0)' >> requests/utils.py",
    "code does not parse": "echo ')' >> requests/utils.py",
    "code locks us out": "echo 'import os; os.chmod(\"/workspace\", 0); os._exit(1)' >> requests/api.py",
    "a giant file": "truncate --size=1T giant",
    "a giant tree": "for n in $(seq 40); do truncate --size=60M sparse$n; done",
    "a locked tree": "chmod 000 /testbed",
}


@pytest.mark.parametrize("cheat", with_thorough_marks(CHEATS))
async def test_no_cheat_scores(node: Node, task: SwebenchTask, cheat: str) -> None:
    grade = await graded(node, task, CHEATS[cheat])
    assert grade.reward == 0
    assert grade.components["fail_to_pass"] == 0


COMMIT = "git add -A && git -c user.name=x -c user.email=x@x commit -qm x"
HOSTILE_REPOSITORY = """
printf '* filter=evil diff=evil\\n' > .gitattributes
echo '*' > .git/info/exclude
git config filter.evil.clean 'echo evil'
git config diff.evil.textconv 'echo evil'
git config core.fsmonitor 'echo evil'
git config core.worktree /tmp
git config alias.add '!false'
mkdir -p .git/hooks
printf '#!/bin/sh\\nexit 1\\n' > .git/hooks/pre-commit
chmod +x .git/hooks/*
"""
ODD_FILES = """
mkfifo pipe; touch secret; mkdir shut; touch shut/x; chmod 0 secret shut; ln -s / root
touch $'new\\nline' $'\\xff' -- --help ':(glob)*'
"""
SPOILED = {
    "tests, configuration and runner tampered with": TAMPER,
    "odd files": ODD_FILES,
    "repository removed": "rm -rf .git",
    "repository replaced": f"rm -rf .git && git init -q && {COMMIT}",
    "repository hostile, processes killed": f"{COMMIT}\n{HOSTILE_REPOSITORY}\nkill -9 -1",
}


@pytest.mark.parametrize("spoil", with_thorough_marks(SPOILED))
async def test_a_right_fix_scores_despite_other_changes(node: Node, task: SwebenchTask, spoil: str) -> None:
    grade = await graded(node, task, SPOILED[spoil], solved=True)
    assert grade.reward == 1, grade.evidence
    assert "evil" not in grade.evidence["patch"].replace("filter=evil diff=evil", "")


async def test_a_failing_grader_is_an_error_without_a_reward(node: Node, task: SwebenchTask) -> None:
    broken = task.model_copy(
        update={"eval_script": task.eval_script.replace("pytest -rA", "no-such-command")}
    )
    with pytest.raises(GraderError, match="on the untouched tree"):
        await graded(node, broken, solved=True)


async def test_an_unreachable_index_is_an_error_with_a_remedy(
    tmp_path: Path, node: Node, task: SwebenchTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(EnvironmentFault, match="no package index can be reached") as caught:
        await Builder(Node(node.driver, tmp_path)).build(task)
    assert "PIP_INDEX_URL" in caught.value.hint
    assert not list((tmp_path / "swebench").glob("*.building"))


async def test_a_failed_build_step_is_named_and_leaves_nothing(
    tmp_path: Path, node: Node, task: SwebenchTask
) -> None:
    assert task.environment is not None
    spec = task.environment.model_copy(update={"install": "echo no such luck; exit 3", "pip": PINS})
    broken = task.model_copy(update={"environment": spec})
    with pytest.raises(EnvironmentFault, match=r"install failed \(exit status 3\): no such luck"):
        await Builder(Node(node.driver, tmp_path)).build(broken)
    assert not list((tmp_path / "swebench").iterdir())


def fetching(cache: Path) -> bool:
    """Return whether a build in `cache` has started to create its virtual environment."""
    return any(cache.glob("swebench/*.building/miniconda3/envs"))


async def test_a_cancelled_build_leaves_nothing(tmp_path: Path, node: Node, task: SwebenchTask) -> None:
    building = asyncio.create_task(Builder(Node(node.driver, tmp_path)).build(task))
    async with asyncio.timeout(60):
        while not fetching(tmp_path):
            assert not building.done()
            await asyncio.sleep(0.01)
    building.cancel()
    with pytest.raises(asyncio.CancelledError):
        await building
    assert not list((tmp_path / "swebench").iterdir())
