"""Data and computation tasks: the agent finds an answer in a session with numpy, pandas, scipy and sympy."""

import importlib.util
from typing import ClassVar

from prorl_envs.env.base import Grade
from prorl_envs.env.sandboxed import SandboxedEnvironment
from prorl_envs.env.scoring import score
from prorl_envs.envs.ipython.grading import fetch_answer, judge
from prorl_envs.envs.ipython.task import IPythonTask
from prorl_envs.errors import EnvironmentFault
from prorl_envs.extras import install_extras
from prorl_envs.sandbox.base import SandboxSpec
from prorl_envs.sandbox.filesystem.python_runtime import python_spec
from prorl_envs.tools.client.python import PythonEngine
from prorl_envs.tools.pool.sandbox_session import SandboxSession
from prorl_envs.tools.schemas import PYTHON
from prorl_envs.tools.types import ToolSpec

SETUP_TIMEOUT_S = 120.0
#: Packages that the system prompt names as installed.
_PACKAGES = ("numpy", "pandas", "scipy", "sympy")

#: Finish tool, which takes the answer.
ANSWER = ToolSpec(
    name="finish",
    description="Hand in the answer and end the task.",
    parameters={
        "type": "object",
        "properties": {
            "answer": {
                "type": "string",
                "description": "The bare answer: a number, numbers separated by commas, an expression such "
                "as x**2 + sin(x), or words, without units or explanation. Empty where the task asks for a "
                "variable or a file instead.",
            }
        },
        "required": ["answer"],
    },
)


class IPythonEnvironment(SandboxedEnvironment[IPythonTask]):
    """Data and computation tasks in a Python session, graded by the answer."""

    name = "ipython"
    task_type = IPythonTask
    hidden_fields = frozenset({"checks"})
    python: ClassVar[PythonEngine] = PythonEngine.FORKED
    sandbox_options = SandboxedEnvironment.sandbox_options | {"image"}
    sandbox_tools = (PYTHON,)
    finish_spec = ANSWER
    system_prompt = (
        "You solve a task with a persistent IPython session in a Linux sandbox. Variables, imports and files "
        "stay between calls; numpy, pandas, scipy and sympy are installed. Your working directory is "
        "/workspace. There is no network. When you know the answer, call finish with it."
    )

    def sandbox_spec(self, task: IPythonTask) -> SandboxSpec:
        has_interpreter = self.python is PythonEngine.KERNEL and self.image is not None
        return SandboxSpec() if has_interpreter else python_spec()

    @classmethod
    def unavailable(cls, task: IPythonTask) -> str:
        missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
        return f"not installed: {', '.join(missing)} ({install_extras('data')})" if missing else ""

    async def prepare(self, task: IPythonTask, session: SandboxSession) -> None:
        for name, text in task.files.items():
            await session.tools.write(f"{session.sandbox.spec.workdir}/{name}", text.encode(errors="replace"))
        if task.setup:
            done = await session.tools.python(task.setup, timeout_s=SETUP_TIMEOUT_S)
            if not done.ok or done.data.get("error"):
                raise EnvironmentFault(
                    f"setup failed: {done.text[-1000:]}",
                    hint=install_extras("data"),
                )

    async def grade(self, task: IPythonTask, session: SandboxSession) -> Grade:
        results = []
        for name, check in task.named_checks():
            answer = await fetch_answer(check.source, finish=self.answer, session=session)
            results.append(judge(name, check, answer))
        return score(results, task.scoring)
