"""Programming problems: a file to write, and hidden tests."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from prorl_envs.env.base import Grade
from prorl_envs.env.columns import without_nulls
from prorl_envs.env.sandboxed import SandboxedEnvironment
from prorl_envs.env.scoring import CheckResult, score
from prorl_envs.envs.code.code_block import last_code
from prorl_envs.envs.code.grading import run_cases
from prorl_envs.envs.code.rows import convert_row
from prorl_envs.envs.code.task import MAX_SOLUTION_BYTES, SOLUTION, CodeTask
from prorl_envs.sandbox.base import SandboxSpec
from prorl_envs.sandbox.filesystem.python_runtime import python_spec
from prorl_envs.tools.client.python import PythonEngine
from prorl_envs.tools.pool.sandbox_session import SandboxSession
from prorl_envs.tools.schemas import BASH, EDITOR, FINISH, PYTHON


class CodeEnvironment(SandboxedEnvironment[CodeTask]):
    """Programming problems: a file to write, graded by hidden tests."""

    name = "code"
    repeatable = True
    task_type = CodeTask
    hidden_fields = frozenset({"tests"})
    python = PythonEngine.FORKED
    sandbox_tools = (BASH, EDITOR, PYTHON)
    finish_spec = FINISH
    system_prompt = (
        "You solve a programming problem in Python, in a Linux sandbox with a persistent bash shell, a file "
        "editor and a persistent IPython session. Write your solution to /workspace/solution.py and try it "
        "out. It is graded by hidden tests, with limits of time and memory, in a fresh sandbox into which "
        "only that file goes. There is no network. When you are done, call finish."
    )

    @classmethod
    def load(cls, row: Mapping[str, Any]) -> CodeTask:
        return super().load(convert_row(without_nulls(row)))

    def sandbox_spec(self, task: CodeTask) -> SandboxSpec:
        return python_spec()

    async def prepare(self, task: CodeTask, session: SandboxSession) -> None:
        if task.starter:
            await session.tools.write(SOLUTION, task.starter.encode("utf-8", "replace"))

    async def grade(self, task: CodeTask, session: SandboxSession) -> Grade:
        spec = session.sandbox.spec
        source, problem = await self._solution(session)
        await self.close_agent_sandbox()
        if problem:
            failed = [CheckResult(name=f"case-{n}", passed=False) for n, _ in enumerate(task.tests.cases, 1)]
            grade = score(failed, task.scoring)
            return replace(grade, evidence={**grade.evidence, "solution": problem})
        return score(await run_cases(task, source, self.node, spec), task.scoring)

    async def _solution(self, session: SandboxSession) -> tuple[str, str]:
        """Return the solution, and the reason why there is none or "". If the file does not exist, the
        solution is the code in the last message."""
        try:
            content = await session.tools.read(SOLUTION, limit=MAX_SOLUTION_BYTES + 1)
        except OSError as error:
            code = last_code(self.last_words)
            return code, "" if code else f"{SOLUTION}: {error.strerror}"
        if len(content) > MAX_SOLUTION_BYTES:
            return "", f"{SOLUTION} is longer than {MAX_SOLUTION_BYTES} bytes"
        return content.decode("utf-8", "replace"), "" if content.strip() else f"{SOLUTION} is empty"
