"""Mathematical problems: an IPython session, and an answer that must be equivalent to the right answer."""

import importlib.util
import json
import re
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from prorl_envs.env.base import Grade
from prorl_envs.env.columns import without_nulls
from prorl_envs.env.sandboxed import SandboxedEnvironment, sandbox_session
from prorl_envs.env.words import bare, stated
from prorl_envs.envs.math.answers import MAX_CHARS, quick, unfinished
from prorl_envs.envs.math.notation import canonical, is_plain, with_log_of
from prorl_envs.envs.math.rows import convert_row
from prorl_envs.envs.math.task import MathTask
from prorl_envs.errors import EnvironmentFault, GraderError, SandboxLimit
from prorl_envs.extras import install_extras
from prorl_envs.sandbox.base import SandboxSpec
from prorl_envs.sandbox.filesystem.python_runtime import python_spec
from prorl_envs.tools.client.python import PythonEngine
from prorl_envs.tools.pool.sandbox_session import SandboxSession
from prorl_envs.tools.schemas import PYTHON
from prorl_envs.tools.types import ToolSpec

#: Wall-clock timeout of a verification in seconds, including the library's import. The limit of its processor
#: time is far lower.
VERIFY_S = 300.0
_PACKAGES = ("numpy", "sympy", "math_verify")
_EXTRAS = ("data", "math")
_EVIDENCE_CHARS = 2_000
_FORMULAS = re.compile(r"(?<!\\)\$|\\boxed")

ANSWER = ToolSpec(
    name="finish",
    description="Hand in the answer and end the task.",
    parameters={
        "type": "object",
        "properties": {
            "answer": {
                "type": "string",
                "description": "The bare answer, without explanation: a number, an expression, an interval, "
                r"a set; in LaTeX or plain: 42, \frac{3}{4}, 2*sqrt(2), (1, 5].",
            }
        },
        "required": ["answer"],
    },
)


class MathEnvironment(SandboxedEnvironment[MathTask]):
    """Mathematical problems with a Python session, graded by equivalence of the answer."""

    name = "math"
    needs_isolation = False
    repeatable = True
    task_type = MathTask
    hidden_fields = frozenset({"answer", "alternatives"})
    python = PythonEngine.FORKED
    sandbox_tools = (PYTHON,)
    finish_spec = ANSWER
    system_prompt = (
        "You solve a mathematical problem. A persistent IPython session in a Linux sandbox helps you: "
        "variables and imports stay between calls; numpy and sympy are installed; there is no network. When "
        r"you know the answer, call finish with it, or end with a message that holds it as \boxed{...}."
    )

    @classmethod
    def load(cls, row: Mapping[str, Any]) -> MathTask:
        return super().load(convert_row(without_nulls(row)))

    @classmethod
    def unavailable(cls, task: MathTask) -> str:
        missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
        return f"not installed: {', '.join(missing)} ({install_extras(*_EXTRAS)})" if missing else ""

    def sandbox_spec(self, task: MathTask) -> SandboxSpec:
        if reason := self.unavailable(task):
            raise EnvironmentFault(reason, hint=install_extras(*_EXTRAS))
        return python_spec()

    async def prepare(self, task: MathTask, session: SandboxSession) -> None:
        return

    async def grade(self, task: MathTask, session: SandboxSession) -> Grade:
        spec = session.sandbox.spec
        await self.close_agent_sandbox()
        submitted = self.answer if self.answer is not None else stated(self.last_words)
        passed, method = await self._judge(task, bare(submitted[: 2 * MAX_CHARS]), spec)
        evidence = {"answer": submitted[:_EVIDENCE_CHARS], "judged": method}
        return Grade(reward=float(passed), components={"answer": float(passed)}, evidence=evidence)

    async def _judge(self, task: MathTask, answer: str, spec: SandboxSpec) -> tuple[bool, str]:
        """Return whether the answer is right, and the method that decided it."""
        if not answer or len(answer) > MAX_CHARS:
            return False, "no answer" if not answer else f"longer than {MAX_CHARS} characters"
        right = [bare(text) for text in (task.answer, *task.alternatives)]
        verdicts = [quick(answer, text) for text in right]
        if any(verdicts) or all(verdict is False for verdict in verdicts):
            return any(verdicts), "plain"
        if _FORMULAS.search(answer):
            return False, "several expressions"
        right = [
            with_log_of(answer, text)
            for text, verdict in zip(right, verdicts, strict=True)
            if verdict is None
        ]
        if unfinished(answer, right):
            return False, "not worked out"
        return await self._verify(answer, right, spec)

    async def _verify(self, answer: str, right: list[str], spec: SandboxSpec) -> tuple[bool, str]:
        """Compare the answer by the library, in a separate sandbox; return as `_judge`.

        Raises:
            GraderError: the library does not start, or does not finish because the machine is too busy.
        """
        program = files("prorl_envs.envs.math").joinpath("verifier.py").read_text("utf-8")
        texts = [canonical(text) for text in (answer, *right)]
        parsed_answer, *parsed_right = [{"text": text, "plain": is_plain(text)} for text in texts]
        request = json.dumps({"answer": parsed_answer, "right": parsed_right}).encode()
        async with sandbox_session(self.node, spec) as verifier:
            try:
                done = await verifier.tools.run(
                    ["python3", "-s", "-P", "-c", program], stdin=request, timeout_s=VERIFY_S, apart=True
                )
            except SandboxLimit:
                return False, "math-verify: beyond the sandbox's limits"
        lines = done.output.split()
        if not lines or done.timed_out:
            raise GraderError(
                f"math-verify did not answer: {done.errors[-500:].decode(errors='replace')}",
                hint=install_extras(*_EXTRAS),
            )
        if lines[1:] in ([b"equal"], [b"other"]):
            return lines[1] == b"equal", "math-verify"
        return False, "math-verify: too expensive"  # or the library failed on the answer
