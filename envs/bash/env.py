"""Shell tasks: a workspace, a persistent bash, and checks of the final state."""

import shutil
from dataclasses import replace

from prorl_envs.env.base import Grade, Prompt
from prorl_envs.env.sandboxed import SandboxedEnvironment, sandbox_session
from prorl_envs.env.scoring import CheckResult, score
from prorl_envs.envs.bash.checks import TEST_DIRECTORIES, run_check
from prorl_envs.envs.bash.snapshot import copy_workspace, grading_spec
from prorl_envs.envs.bash.task import BashTask, TestsCheck
from prorl_envs.errors import EnvironmentFault
from prorl_envs.sandbox.base import Mount, SandboxSpec
from prorl_envs.tools.pool.sandbox_session import SandboxSession
from prorl_envs.tools.schemas import BASH, EDITOR, FINISH

SETUP_TIMEOUT_S = 300.0
_WORKSPACE = "/workspace"
#: PATH of sandboxes: programs installed elsewhere on the host are not visible in them.
_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_REQUIRE = 'for p in "$@"; do command -v "$p" >/dev/null || { echo "no $p here"; exit 1; }; done'


class BashEnvironment(SandboxedEnvironment[BashTask]):
    """Shell tasks: a persistent shell, graded by checks of the workspace."""

    name = "bash"
    task_type = BashTask
    hidden_fields = frozenset({"checks"})
    sandbox_tools = (BASH, EDITOR)
    finish_spec = FINISH
    system_prompt = (
        "You solve a task in a Linux sandbox, with a persistent bash shell and a file editor. The shell "
        "keeps its working directory and variables between calls. Work in /workspace: only what lies there "
        "when you finish is graded, in a copy where nothing you started runs any more. There is no network. "
        "When you are done, call finish."
    )

    @classmethod
    def unavailable(cls, task: BashTask) -> str:
        missing = [name for name in task.requires if shutil.which(name, path=_SYSTEM_PATH) is None]
        return f"not installed below /usr: {', '.join(missing)}" if missing else ""

    def prompt(self, task: BashTask) -> Prompt:
        prompt = super().prompt(task)
        if task.workdir == _WORKSPACE:
            return prompt
        system, *others = prompt.messages
        system = {**system, "content": str(system["content"]).replace(_WORKSPACE, task.workdir)}
        return Prompt(messages=[system, *others], tools=prompt.tools)

    def sandbox_spec(self, task: BashTask) -> SandboxSpec:
        return SandboxSpec(workdir=task.workdir)

    async def prepare(self, task: BashTask, session: SandboxSession) -> None:
        for path, content, executable in task.contents():
            target = f"{session.sandbox.spec.workdir}/{path}"
            try:
                await session.tools.write(target, content, mode=0o755 if executable else 0o644)
            except OSError as error:
                raise EnvironmentFault(f"{path} cannot be written: {error.strerror}") from error
        if task.requires:
            await self._run(session, _REQUIRE, "requires", *task.requires)
        if task.setup:
            await self._run(session, task.setup, "setup")

    def grader_spec(self, task: BashTask, session: SandboxSession) -> SandboxSpec:
        spec = grading_spec(session.sandbox)
        if not any(isinstance(check, TestsCheck) for check in task.checks):
            return spec
        # All grading sandboxes share one empty directory; each writes its own files to an overlay.
        empty = self.node.cache_dir / "empty"
        empty.mkdir(parents=True, exist_ok=True)
        mounts = tuple(Mount(source=empty, target=path, overlay=True) for path in TEST_DIRECTORIES)
        return replace(spec, mounts=(*spec.mounts, *mounts))

    async def grade(self, task: BashTask, session: SandboxSession) -> Grade:
        async with sandbox_session(self.node, self.grader_spec(task, session)) as grader:
            # A process that still writes into the workspace could make the copy fail: an error, not a 0.
            await session.tools.end_processes()
            refusal = await copy_workspace(grader)
            await self.close_agent_sandbox()
            checks = task.named_checks()
            if refusal:
                failed = [CheckResult(name=name, passed=False, weight=check.weight) for name, check in checks]
                grade = score(failed, task.scoring)
                return replace(grade, evidence={**grade.evidence, "workspace": refusal})
            results = [await run_check(name, check, grader) for name, check in checks]
        return score(results, task.scoring)

    async def _run(self, session: SandboxSession, script: str, *arguments: str) -> None:
        shell = ["/bin/bash", "--noprofile", "--norc", "-c", script, *arguments]
        done = await session.tools.run(shell, timeout_s=SETUP_TIMEOUT_S)
        if done.exit_code != 0:
            reason = f"exit status {done.exit_code}" if not done.timed_out else f"over {SETUP_TIMEOUT_S} s"
            raise EnvironmentFault(
                f"{arguments[0]} failed ({reason}): {done.output.decode(errors='replace')[-1000:]}",
                hint="install the missing programs below the host's /usr, or correct the row's setup",
            )
