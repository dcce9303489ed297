"""SWE-bench instances: a repository with an issue to fix, graded by the instance's own tests."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import ClassVar

from prorl_envs.env.base import Grade, Message, Prompt
from prorl_envs.env.node import Node
from prorl_envs.env.sandboxed import SandboxedEnvironment, sandbox_session
from prorl_envs.envs.swebench.build import Builder, missing
from prorl_envs.envs.swebench.grade import run_tests
from prorl_envs.envs.swebench.options import SwebenchOptions
from prorl_envs.envs.swebench.root import BuiltRoot
from prorl_envs.envs.swebench.submission import SUBMISSION, Submission, apply, apply_reference, take
from prorl_envs.envs.swebench.task import SwebenchTask
from prorl_envs.envs.swebench.verdict import (
    FAILING,
    ScriptRun,
    Status,
    Verdict,
    common_condition,
    judge,
    judge_map,
)
from prorl_envs.errors import EnvironmentFault, GraderError, SandboxError, ToolError
from prorl_envs.sandbox.base import Mount, SandboxSpec, workspace_mount
from prorl_envs.tools.pool.sandbox_session import SandboxSession
from prorl_envs.tools.schemas import BASH, EDITOR, FINISH
from prorl_envs.tools.types import JsonObject

PREPARE_TIMEOUT_S = 120.0
#: Maximum characters of the patch that a grade keeps as evidence.
MAX_EVIDENCE_CHARS = 64 * 1024
_PRISTINE = "/opt/pristine"


class SwebenchEnvironment(SandboxedEnvironment[SwebenchTask]):
    """SWE-bench instances: an issue to fix, graded by the tests of the repository.

    The first episode of an instance on a machine builds it, which needs a network.
    """

    name = "swebench"
    task_type = SwebenchTask
    hidden_fields = frozenset(
        {"patch", "test_patch", "fail_to_pass", "pass_to_pass", "expected", "eval_script"}
    )
    sandbox_tools = (BASH, EDITOR)
    finish_spec = FINISH
    call_timeout_s = 180.0
    takes_checkpoints = False
    sandbox_options = frozenset({"limits", "python"})  # with a network the agent could look up the fix
    system_prompt = (
        "You fix an issue in a repository, with a persistent bash shell and a file editor in a Linux "
        "sandbox. The repository is in the working directory and is installed in the active environment. "
        "There is no network. Hidden tests decide whether the issue is fixed and everything else still "
        "works: change the code, not the tests or their configuration. Only the files of the repository "
        "count. When you are done, call finish."
    )
    options_type = SwebenchOptions
    options: ClassVar[SwebenchOptions] = SwebenchOptions()

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        self._root: BuiltRoot | None = None

    @classmethod
    def unavailable(cls, task: SwebenchTask) -> str:
        return missing(task, cls.options)

    @classmethod
    async def provision(cls, node: Node, task: SwebenchTask, progress: Callable[[str], None]) -> None:
        await Builder(node, cls.options).build(task, progress)

    def prompt(self, task: SwebenchTask) -> Prompt:
        messages: list[Message] = [
            {"role": "system", "content": self.system_prompt},
            {
                "role": "user",
                "content": (
                    f"Fix this issue of {task.repo}, which is in {task.testbed}:\n\n{task.instruction}"
                ),
            },
        ]
        return Prompt(messages=messages, tools=self.tools)

    async def init(self, task: SwebenchTask) -> Prompt:
        if self._root is None:
            self._root = await Builder(self.node, self.options).build(task)
        return await super().init(task)

    def sandbox_spec(self, task: SwebenchTask) -> SandboxSpec:
        root = self._built()
        pristine = Mount(source=root.tree, target=_PRISTINE)
        return root.agent_spec(pristine, default_route=_default_route(task))

    async def prepare(self, task: SwebenchTask, session: SandboxSession) -> None:
        # A copy in the workspace, not an overlay: another sandbox can read the workspace, and so take the
        # submission, even if all processes of this sandbox have died.
        copy = ["cp", "--archive", "--reflink=auto", f"{_PRISTINE}/.", task.testbed]
        done = await session.tools.run(copy, cwd="/", timeout_s=PREPARE_TIMEOUT_S)
        if done.exit_code != 0:
            output = done.output.decode(errors="replace")[-500:]
            raise EnvironmentFault(f"the tree cannot be copied: {output}")

    def grader_spec(self, task: SwebenchTask, session: SandboxSession) -> SandboxSpec:
        submitted = workspace_mount(session.sandbox, SUBMISSION)
        return self._built().comparing_spec(submitted)

    async def grade(self, task: SwebenchTask, session: SandboxSession) -> Grade:
        # A process that still writes into the tree could make it grow during the comparison.
        await session.tools.end_processes()
        async with sandbox_session(self.node, self.grader_spec(task, session)) as comparer:
            submission = await take(task, comparer)
        await self.close_agent_sandbox()
        if submission.refusal:
            return self._graded(task, submission, ScriptRun({}, None, ""))
        run = await self.run_patch(task, submission)
        condition = await self._find_cause(task, submission, run) if self._judged(run).problem else ""
        return self._graded(task, submission, run, condition)

    async def run_patch(self, task: SwebenchTask, submission: Submission | None) -> ScriptRun:
        """Run the instance's tests on a patch, in a fresh sandbox.

        Args:
            task: the instance.
            submission: the submission with the patch; None for the reference patch.
        """
        root = self._built()
        spec = root.grading_spec(default_route=_default_route(task))
        async with sandbox_session(self.node, spec) as grader:
            if submission is None:
                await apply_reference(task, grader)
            else:
                await apply(submission.patch, grader, testbed=root.testbed)
            try:
                return await run_tests(task, root.base_commit, grader, timeout_s=self.options.test_timeout_s)
            except (OSError, SandboxError, ToolError) as error:
                # The tested code runs as the sandbox's user, so it can kill all processes in the sandbox.
                return ScriptRun({}, None, f"the grading sandbox was lost: {error}")

    async def _find_cause(self, task: SwebenchTask, submission: Submission, run: ScriptRun) -> str:
        """Find the cause of a run without a verdict, by a control run.

        The control run tests the reference patch, or the untouched tree.

        Returns:
            The condition that also fails the test command with the reference patch; "" if the submission is
            the cause.

        Raises:
            GraderError: the control run has no verdict either, so the submission is not the cause.
        """
        control: Submission | None = replace(submission, patch=b"")
        tree = "the untouched tree"
        # If logs name only failures, the log of a failed command does not show that the tests passed.
        complete = task.eval_type != "fail_only" and run.strict.failed_without_test
        if self.options.verdict == "strict" and complete and task.patch:
            control, tree = None, "the tree with the reference patch"
        controlled = run if control == submission else await self.run_patch(task, control)
        if control is None and controlled.strict.failed_without_test:
            return common_condition(run.strict, controlled.strict)
        if problem := self._judged(controlled).problem:
            raise GraderError(
                f"{task.id}: {problem}, on {tree}: {controlled.tail[-1000:]}",
                hint="the instance is not built as its row expects, or this machine is slow",
            )
        return ""

    def _built(self) -> BuiltRoot:
        if self._root is None:
            raise EnvironmentFault("the instance is not built", hint="call init() first")
        return self._root

    def _judged(self, run: ScriptRun) -> ScriptRun:
        """Return a run with the statuses that the option `verdict` selects."""
        return run if self.options.verdict == "official" else run.strict

    def _graded(
        self, task: SwebenchTask, submission: Submission, run: ScriptRun, condition: str = ""
    ) -> Grade:
        judged = self._judged(run)
        problem = submission.refusal or ("" if condition else judged.problem)
        verdict = _verdict(task, {} if problem else judged.statuses, self.options.verdict)
        official = _verdict(task, {} if submission.refusal or run.problem else run.statuses, "official")
        reward = float(verdict.resolved)
        if self.options.reward == "partial" and not task.expected and verdict.shares["pass_to_pass"] == 1:
            reward = verdict.shares["fail_to_pass"]
        patch = submission.patch.decode(errors="replace")
        evidence: JsonObject = {
            "resolved": verdict.resolved,
            "official_resolved": official.resolved,
            "overlooked_failures": sorted(run.failed)[:100],
            "problem": problem,
            "fail_to_pass": dict(verdict.fail_to_pass),
            "pass_to_pass": dict(verdict.pass_to_pass),
            "patch": patch[:MAX_EVIDENCE_CHARS],
            "patch_chars": len(patch),
            "dropped_paths": list(submission.dropped)[:100],
            "exit_code": run.exit_code,
            "log_tail": run.tail,
        }
        if condition:
            evidence["condition"] = condition
        return Grade(reward=reward, components=verdict.shares, evidence=evidence)


def _verdict(task: SwebenchTask, statuses: Mapping[str, Status], rule: str) -> Verdict:
    if task.expected:
        return judge_map(task.expected, statuses)
    fail_only = task.eval_type == "fail_only" and bool(statuses)
    if fail_only and rule == "strict":  # the official rule lets tests with errors pass
        statuses = {test: Status.FAILED if status in FAILING else status for test, status in statuses.items()}
    return judge(task.fail_to_pass, task.pass_to_pass, statuses, fail_only=fail_only)


def _default_route(task: SwebenchTask) -> bool:
    return task.environment is not None and task.environment.default_route
