"""SWE-bench instances: a repository with an issue to fix, graded by the instance's own tests."""

from dataclasses import replace

from prorl_envs.env.base import Grade, Message, Prompt
from prorl_envs.env.node import Node
from prorl_envs.env.sandboxed import SandboxedEnvironment, workplace
from prorl_envs.envs.swebench.build import TESTBED, Builder, BuiltRoot, missing
from prorl_envs.envs.swebench.grade import run_tests
from prorl_envs.envs.swebench.logs import ScriptRun, judge
from prorl_envs.envs.swebench.submission import SUBMISSION, Submission, apply, take
from prorl_envs.envs.swebench.task import SwebenchTask
from prorl_envs.errors import EnvironmentFault, GraderError, SandboxError, ToolError
from prorl_envs.sandbox.base import Mount, SandboxSpec
from prorl_envs.tools.schemas import BASH, EDITOR, FINISH
from prorl_envs.tools.types import JsonObject
from prorl_envs.tools.workplace import Workplace

PREPARE_TIMEOUT_S = 120.0
#: Most characters of the patch that a grade keeps as evidence.
MAX_EVIDENCE_CHARS = 64 * 1024
_PRISTINE = "/opt/pristine"


class SwebenchEnvironment(SandboxedEnvironment[SwebenchTask]):
    """One instance. The first episode on a machine builds it, which needs a network; later ones find it."""

    name = "swebench"
    task_type = SwebenchTask
    sandbox_tools = (BASH, EDITOR)
    finish_spec = FINISH
    call_timeout_s = 180.0
    sandbox_options = frozenset({"limits"})  # with a network the agent would look the fix up
    system_prompt = (
        "You fix an issue in a Python repository, with a persistent bash shell and a file editor in a Linux "
        "sandbox. The repository is at /testbed and is installed in the active environment. There is no "
        "network. Hidden tests decide whether the issue is fixed and everything else still works: change the "
        "code, not the tests or their configuration. Only the files under /testbed count. When you are done, "
        "call finish."
    )

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        self._root: BuiltRoot | None = None

    @classmethod
    def unavailable(cls, task: SwebenchTask) -> str:
        return missing(task)

    def prompt(self, task: SwebenchTask) -> Prompt:
        messages: list[Message] = [
            {"role": "system", "content": self.system_prompt},
            {"role": "user", "content": f"Fix this issue of {task.repo}:\n\n{task.instruction}"},
        ]
        return Prompt(messages=messages, tools=self.tools)

    async def init(self, task: SwebenchTask) -> Prompt:
        if self._root is None:
            self._root = await Builder(self.node).build(task)
        return await super().init(task)

    def sandbox_spec(self, task: SwebenchTask) -> SandboxSpec:
        root = self._built()
        pristine = Mount(source=root.tree, target=_PRISTINE)
        return root.sandbox_spec(pristine, workdir=TESTBED, default_route=task.environment.default_route)

    async def prepare(self, task: SwebenchTask, place: Workplace) -> None:
        # A copy, and not a view, because a workspace can be read from outside whatever becomes of the
        # sandbox's own processes: that is how the submission is taken.
        copy = ["cp", "--archive", "--reflink=auto", f"{_PRISTINE}/.", TESTBED]
        done = await place.tools.run(copy, cwd="/", timeout_s=PREPARE_TIMEOUT_S)
        if done.exit_code != 0:
            why = done.output.decode(errors="replace")[-500:]
            raise EnvironmentFault(f"the tree cannot be copied: {why}")

    def grader_spec(self, task: SwebenchTask, place: Workplace) -> SandboxSpec:
        submitted = Mount(source=place.sandbox.workspace, target=SUBMISSION)
        return self._grading_spec(task, submitted)

    async def grade(self, task: SwebenchTask, place: Workplace) -> Grade:
        # What still writes into the tree could make it grow while it is read.
        await place.tools.end_processes()
        async with workplace(self.node, self.grader_spec(task, place)) as comparer:
            submission = await take(task, comparer)
        await self.leave()
        if submission.refusal:
            return _grade(task, submission, ScriptRun({}, None, ""))
        run = await self._test(task, submission)
        if run.problem:
            await self._check_grader(task, submission, run)
        return _grade(task, submission, run)

    async def _test(self, task: SwebenchTask, submission: Submission) -> ScriptRun:
        """Test the patch in a sandbox that has seen nothing else of the agent's."""
        root = self._built()
        async with workplace(self.node, self._grading_spec(task)) as grader:
            await apply(submission.patch, grader)
            try:
                return await run_tests(task, root.base_commit, grader)
            except (OSError, SandboxError, ToolError) as error:
                # Tested code has the rights of the sandbox's user and can end what runs in it.
                return ScriptRun({}, None, f"the grading sandbox was lost: {error}")

    async def _check_grader(self, task: SwebenchTask, submission: Submission, run: ScriptRun) -> None:
        """Find out whose fault a run without a verdict is: test the untouched tree.

        Raises:
            GraderError: that gives no verdict either, so it is not the submission's fault.
        """
        control = await self._test(task, replace(submission, patch=b"")) if submission.patch else run
        if control.problem:
            raise GraderError(
                f"{task.id}: {control.problem}, on the untouched tree: {control.tail[-1000:]}",
                hint="the instance was built differently from what its row expects, or this machine is slow",
            )

    def _grading_spec(self, task: SwebenchTask, *further: Mount) -> SandboxSpec:
        root = self._built()
        tree = Mount(source=root.tree, target=TESTBED, overlay=True)
        return root.sandbox_spec(
            tree, *further, workdir="/workspace", default_route=task.environment.default_route
        )

    def _built(self) -> BuiltRoot:
        if self._root is None:
            raise EnvironmentFault("the instance is not built", hint="init first")
        return self._root


def _grade(task: SwebenchTask, submission: Submission, run: ScriptRun) -> Grade:
    problem = submission.refusal or run.problem
    verdict = judge(task.fail_to_pass, task.pass_to_pass, {} if problem else run.statuses)
    patch = submission.patch.decode(errors="replace")
    evidence: JsonObject = {
        "resolved": verdict.resolved,
        "problem": problem,
        "fail_to_pass": dict(verdict.fail_to_pass),
        "pass_to_pass": dict(verdict.pass_to_pass),
        "patch": patch[:MAX_EVIDENCE_CHARS],
        "patch_chars": len(patch),
        "dropped_paths": list(submission.dropped)[:100],
        "exit_code": run.exit_code,
        "log_tail": run.tail,
    }
    components = {
        "fail_to_pass": verdict.fixed / len(verdict.fail_to_pass),
        "pass_to_pass": verdict.kept / len(verdict.pass_to_pass) if verdict.pass_to_pass else 1.0,
    }
    return Grade(reward=float(verdict.resolved), components=components, evidence=evidence)
