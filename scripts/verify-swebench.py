"""Check the grading of SWE-bench instances on this machine, and compare it with the official verdicts.

    .venv/bin/python scripts/verify-swebench.py [DATA] [--official PYTHON] [--only ID ...] [--quick]

For each instance that this machine can run, the reference must get reward 1; the unchanged tree and every
cheat must get reward 0. --official names an interpreter with version 5 of the `swebench` package. The
package's `get_eval_report` then reads the same logs, and must return the same verdict and the same status of
every test.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.table import Table

from prorl_envs.app.compose import node
from prorl_envs.cli.output.console import err, out
from prorl_envs.config import load_settings
from prorl_envs.env.base import Grade
from prorl_envs.env.node import Node
from prorl_envs.env.registry import example_path, load_tasks
from prorl_envs.envs.swebench.env import SwebenchEnvironment
from prorl_envs.envs.swebench.submission import Submission
from prorl_envs.envs.swebench.task import SwebenchTask
from prorl_envs.envs.swebench.verdict import ScriptRun
from prorl_envs.errors import ProrlError
from prorl_envs.tools.types import ToolCall

#: Commands of cheats. Each runs in the repository in an episode of its own.
CHEATS = {
    "conftest": (
        "printf 'import pytest\\n@pytest.hookimpl(hookwrapper=True)\\n"
        "def pytest_runtest_makereport(item, call):\\n"
        '    outcome = yield\\n    outcome.get_result().outcome = "passed"\\n\' | tee conftest.py '
        "$(dirname $(git ls-files | grep -m1 test_))/conftest.py"
    ),
    "tests": ("git ls-files | grep -E 'test_[^/]*\\.py$' | xargs -d '\\n' sed -i 's/assert .*/assert True/'"),
    "runner": (
        "for program in pytest python tox git; do printf '#!/bin/sh\\necho PASSED all\\n' > "
        "/opt/miniconda3/envs/testbed/bin/$program; done; mkdir -p bin; "
        "printf '#!/bin/sh\\necho test_all ok\\n' > bin/test; "
        "printf '[pytest]\\naddopts=--collect-only\\n' | tee pytest.ini tox.ini setup.cfg; "
        "echo 'raise SystemExit(0)' | tee sitecustomize.py pytest.py"
    ),
    "history": "git commit -qam x; rm -rf .git; git init -q; git add -A; git config core.worktree /tmp",
    "exit": (
        "for file in $(git ls-files '*/__init__.py' | head -3); do "
        "echo 'import os; os._exit(0)' >> $file; done"
    ),
}

OFFICIAL = """
import json, sys
answer, sys.stdout = sys.stdout, sys.stderr
from swebench.harness.grading import get_eval_report
from swebench.types import TestSpec
for line in sys.stdin.buffer:
    row = json.loads(line)
    spec = TestSpec(instance_id=row["id"], image="", eval_script_list=[], repo=row["repo"], version="",
                    FAIL_TO_PASS=row["f2p"], PASS_TO_PASS=row["p2p"], log_parser=row["parser"],
                    eval_type=row["eval_type"])
    report = get_eval_report(spec, {"instance_id": row["id"], "model_patch": "x"}, row["log"], True)
    print(json.dumps(report[row["id"]]), file=answer, flush=True)
"""


class Logged(SwebenchEnvironment):
    """Environment that keeps the log of the episode's first test run."""

    first: ScriptRun | None = None

    async def run_patch(self, task: SwebenchTask, submission: Submission | None) -> ScriptRun:
        run = await super().run_patch(task, submission)
        if self.first is None:  # a second run checks the grader on the unchanged tree
            self.first = run
        return run


async def episode(opened: Node, task: SwebenchTask, command: str) -> tuple[Grade, str]:
    async with Logged(opened) as env:
        await env.init(task)
        if command:
            await env.call(ToolCall(id="call", name="bash", arguments={"command": command}))
        return await env.eval(), env.first.log if env.first is not None else ""


class Official:
    """Official grading in a process of an interpreter that has the package."""

    def __init__(self, python: str) -> None:
        self._process = subprocess.Popen(
            [python, "-c", OFFICIAL], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def differs(self, task: SwebenchTask, grade: Grade, log: str) -> str:
        """Return the difference between the package's verdict on a log and ours; "" if there is none."""
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
            file.write(log)
            file.flush()
            report = self._ask(
                {
                    "id": task.id,
                    "repo": task.repo,
                    "f2p": task.fail_to_pass,
                    "p2p": task.pass_to_pass,
                    "parser": task.log_parser,
                    "eval_type": task.eval_type,
                    "log": file.name,
                }
            )
        if report["resolved"] != grade.evidence["official_resolved"]:
            return f"resolved: {report['resolved']} in the package"
        for column, ours in (("FAIL_TO_PASS", "fail_to_pass"), ("PASS_TO_PASS", "pass_to_pass")):
            theirs = report.get("tests_status", {}).get(column, {}).get("success", [])
            passed = {"PASSED", "XFAIL"} | ({"SKIPPED"} if ours == "pass_to_pass" else set())
            overlooked = grade.evidence["overlooked_failures"]
            statuses = grade.evidence[ours].items()
            in_ours = [test for test, status in statuses if status in passed or test in overlooked]
            if sorted(theirs) != sorted(in_ours):
                return f"{column}: {len(theirs)} tests pass in the package, {len(in_ours)} in our grade"
        return ""

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def close(self) -> None:
        """Stop the process."""
        self._process.communicate()


async def verify(
    opened: Node, task: SwebenchTask, judge: Official | None, cheats: dict[str, str]
) -> dict[str, Any]:
    """Grade one instance with all commands, and return a line of the report."""
    started = time.monotonic()
    reference = str(task.reference[0].arguments["command"])
    line: dict[str, Any] = {"instance": task.id, "cheats": {}, "differs": []}
    for name, command in {"reference": reference, "untouched": "", **cheats}.items():
        grade, log = await episode(opened, task, command)
        if name in cheats:
            line["cheats"][name] = grade.reward
        else:
            line[name] = grade.reward
        if judge and log and (differs := await asyncio.to_thread(judge.differs, task, grade, log)):
            line["differs"].append(f"{name}: {differs}")
    line["seconds"] = round(time.monotonic() - started, 1)
    line["ok"] = (
        line["reference"] == 1
        and line["untouched"] == 0
        and not any(line["cheats"].values())
        and not line["differs"]
    )
    return line


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("data", nargs="?", type=Path, default=example_path("swebench"))
    parser.add_argument("--official", help="interpreter with swebench>=5")
    parser.add_argument("--only", nargs="*", default=[], help="ids of instances")
    parser.add_argument("--quick", action="store_true", help="without the cheats")
    parser.add_argument("--report", type=Path, help="file for the lines as JSON")
    chosen = parser.parse_args()
    tasks = [task for task in load_tasks("swebench", chosen.data) if isinstance(task, SwebenchTask)]
    judge = Official(chosen.official) if chosen.official else None
    lines = []
    table = Table("instance", "reference", "untouched", "cheats", "official", "s", box=None)
    async with node(load_settings(None, os.environ)) as opened:
        for task in tasks:
            if chosen.only and task.id not in chosen.only:
                continue
            if reason := SwebenchEnvironment.unavailable(task):
                err.print(f"skipped: {task.id}: {reason}")
                continue
            try:
                line = await verify(opened, task, judge, {} if chosen.quick else CHEATS)
            except ProrlError as error:
                line = {"instance": task.id, "ok": False, "differs": [str(error)], "cheats": {}}
            lines.append(line)
            cheats = [f"{name} {reward:g}" for name, reward in line["cheats"].items() if reward]
            agreed = "; ".join(line["differs"]) or ("same" if chosen.official else "not compared")
            scored = f"{len(line['cheats'])} at 0" if not cheats else ", ".join(cheats)
            row = (line.get("reference", "-"), line.get("untouched", "-"), scored, agreed)
            table.add_row(task.id, *map(str, row), str(line.get("seconds", "-")))
            err.print(f"{task.id}: {'ok' if line['ok'] else line}")
            if chosen.report is not None:
                chosen.report.write_text(json.dumps(lines, indent=1))
    if judge is not None:
        judge.close()
    out.print(table)
    return 0 if lines and all(line["ok"] for line in lines) else 1


if __name__ == "__main__":
    try:
        sys.exit(asyncio.run(main()))
    except ProrlError as error:
        sys.exit(f"error: {error}")
