"""Tasks with their own images: the agent is root of the image, and the task's own tests grade the files."""

import base64
import contextlib
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

from prorl_envs.env.base import Grade, Prompt, ReferenceCall
from prorl_envs.env.node import Node
from prorl_envs.env.sandboxed import Phase as EpisodePhase
from prorl_envs.env.sandboxed import SandboxedEnvironment, sandbox_session
from prorl_envs.env.task_files import content_of
from prorl_envs.envs.terminal.images import TaskImage, image_name, task_image
from prorl_envs.envs.terminal.machines import machine_spec, shell_command
from prorl_envs.envs.terminal.options import TerminalOptions
from prorl_envs.envs.terminal.planted import planted
from prorl_envs.envs.terminal.requirements import missing
from prorl_envs.envs.terminal.rows import task_of
from prorl_envs.envs.terminal.services import AGENT, TaskServices, service_image, wait_healthy
from prorl_envs.envs.terminal.task import Machine, Step, TerminalTask
from prorl_envs.envs.terminal.verifier import SOLUTION, Verdict, Verifier
from prorl_envs.errors import EnvironmentFault, GraderError, SandboxError, ToolError
from prorl_envs.images.scratch import make_scratch
from prorl_envs.images.threads import in_thread
from prorl_envs.sandbox.base import SandboxSpec
from prorl_envs.sandbox.filesystem.directories import remove_tree
from prorl_envs.sandbox.filesystem.layered import LAYER_LIMIT, SUFFIX
from prorl_envs.tools.pool.sandbox_session import SandboxSession
from prorl_envs.tools.schemas import BASH, EDITOR, FINISH
from prorl_envs.tools.types import JsonObject, ToolCall, ToolResult, ToolSpec

#: Directories that Harbor's containers have.
_LOGS = ("/logs/agent", "/logs/artifacts", "/logs/verifier")
_SETUP_S = 300.0
NEXT_STEP = ToolSpec(
    name="next_step",
    description=(
        "Submit the current step of the task when it is done: your processes are ended, the step is graded, "
        "and the instruction of the next step is returned."
    ),
    parameters={"type": "object", "properties": {}, "required": []},
)


class TerminalEnvironment(SandboxedEnvironment[TerminalTask]):
    """Terminal tasks with their own images, in the formats of Harbor and Terminal-Bench.

    The first episode of a task on a machine builds its image, which usually needs a network.
    """

    name = "terminal"
    task_type = TerminalTask
    sandbox_tools = (BASH, EDITOR)
    finish_spec = FINISH
    call_timeout_s = 180.0
    takes_checkpoints = False
    # A task defines its own network and image; a Jupyter kernel cannot be reached in an emulated root.
    sandbox_options = frozenset({"limits"})
    system_prompt = (
        "You solve a task in a Linux container, as root, with a persistent bash shell and a file editor. The "
        "shell keeps its working directory and variables between calls. When you finish, your processes are "
        "ended, and tests check the files that you leave. When you are done, call finish."
    )
    options_type = TerminalOptions
    options: ClassVar[TerminalOptions] = TerminalOptions()

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        self._image: TaskImage | None = None
        #: The image with the changes of the finished steps.
        self._with_changes: TaskImage | None = None
        self._scratch: Path | None = None
        self._services: TaskServices | None = None
        #: Changes and verdicts of the finished steps.
        self._layers: list[Path] = []
        self._verdicts: list[Verdict] = []
        self._planted: list[str] = []
        self._deadline: float | None = None

    @classmethod
    def load(cls, row: Mapping[str, Any]) -> TerminalTask:
        task = task_of(row, cls.options.variables)
        return task.model_copy(update={"reference": tuple(_reference(task))})

    @classmethod
    def unavailable(cls, task: TerminalTask) -> str:
        return "; ".join(cls._obstacles(task))

    @classmethod
    def _obstacles(cls, task: TerminalTask) -> list[str]:
        reasons = [*missing(task, cls.options.variables)]
        if task.machine.services and cls.options.public_network == "open":
            reasons.append("public_network is open: in the host's network, services cannot be connected")
        return reasons

    @classmethod
    def parts(cls, task: TerminalTask) -> tuple[JsonObject, JsonObject]:
        shown, hidden = super().parts(task)
        folders = [files for step in task.steps for files in (step.tests, step.solution)]
        secret = {source for files in folders for source in files.values()}
        hidden["files"] = {path: shown["files"].pop(path) for path in sorted(secret)}
        return shown, hidden

    @classmethod
    def image_name(cls, task: TerminalTask, bases: Mapping[str, Path]) -> str:
        machines = (*_machines(task), *task.machine.services)
        return " ".join(image_name(task.files, machine, bases) for machine in machines)

    @classmethod
    async def provision(cls, node: Node, task: TerminalTask, progress: Callable[[str], None]) -> None:
        factor = cls.options.timeout_factor
        for machine in _machines(task):
            await task_image(node, task.files, machine, timeout_factor=factor, progress=progress)
        for service in task.machine.services:
            await service_image(node, cls.options, task.files, service, progress)

    async def init(self, task: TerminalTask) -> Prompt:
        if reasons := self._obstacles(task):
            raise EnvironmentFault(f"{task.id} cannot run here: {'; '.join(reasons)}")
        if self._image is None:
            factor = self.options.timeout_factor
            self._image = await task_image(self.node, task.files, task.machine, timeout_factor=factor)
            if len(self._image.image.layers) + len(task.steps) > LAYER_LIMIT:
                raise EnvironmentFault(
                    f"the image has {len(self._image.image.layers)} layers; {LAYER_LIMIT} are possible, "
                    f"and the agent's files need {len(task.steps)}",
                    hint="join RUN instructions of its Dockerfile with &&",
                )
            self._scratch = await in_thread(make_scratch, self.node.dockerfiles().scratch)
            self._services = TaskServices(self.node, self.options, task)
        prompt = await super().init(task)
        self._start_clock(task.steps[0])
        return prompt

    @property
    def tools(self) -> Sequence[ToolSpec]:
        return self._tools(self._task)

    def prompt(self, task: TerminalTask) -> Prompt:
        prompt = super().prompt(task)
        if len(task.steps) == 1:
            return prompt
        system, user = prompt.messages
        ends = "Call next_step when one is done; finish ends the task."
        text = f"The task has {len(task.steps)} steps. {ends}\n\n{task.instruction}"
        user = {**user, "content": text}
        return Prompt(messages=[system, user], tools=self._tools(task))

    def sandbox_spec(self, task: TerminalTask) -> SandboxSpec:
        agent = task.steps[len(self._verdicts)].agent
        image = self._with_changes or self._built()
        hosts = self._connected().hosts(AGENT)
        return machine_spec(image, task.machine, agent, self.options, self.node.limits, hosts)

    async def prepare(self, task: TerminalTask, session: SandboxSession) -> None:
        folders = [*_LOGS, *task.machine.folders]
        await self._run(session, ["/bin/mkdir", "-p", "--", *folders], "preparing /logs", _SETUP_S)
        await self._connected().join(session)
        await self._connected().start()
        if task.machine.health is not None:
            await wait_healthy(session, task.machine.health)
        await self._prepare_step(task, task.steps[0], session)

    async def call(self, call: ToolCall, *, timeout_s: float | None = None) -> ToolResult:
        if self._deadline is not None and self._phase is EpisodePhase.READY:
            remaining_s = self._deadline - time.monotonic()
            if remaining_s <= 0:
                self._phase = EpisodePhase.FINISHED
                return ToolResult(text="The time for this task is over. The episode is finished.", ok=False)
            timeout_s = min(self.call_timeout_s if timeout_s is None else timeout_s, remaining_s)
        if call.name == NEXT_STEP.name and self._phase is EpisodePhase.READY and self._task is not None:
            return await self._next_step(self._task)
        return await super().call(call, timeout_s=timeout_s)

    async def grade(self, task: TerminalTask, session: SandboxSession) -> Grade:
        await self._finish_step(task, task.steps[len(self._verdicts)])
        return self._graded(task)

    async def eval(self) -> Grade:
        if self._session is None and self._verdicts and self._task is not None:  # the task ended after a step
            self._expect("eval", EpisodePhase.FINISHED)
            self._phase = EpisodePhase.GRADED
            return self._graded(self._task)
        return await super().eval()

    async def close(self) -> None:
        try:
            await super().close()
        finally:
            if self._services is not None:
                await self._services.aclose()
        scratch, self._scratch = self._scratch, None
        if scratch is not None:
            await in_thread(remove_tree, scratch)

    # Steps.

    async def _next_step(self, task: TerminalTask) -> ToolResult:
        number = len(self._verdicts)
        if number == len(task.steps) - 1:
            return ToolResult(
                text="This is the last step of the task. Call finish when it is done.", ok=False
            )
        step = task.steps[number]
        verdict = await self._finish_step(task, step)
        if not verdict.reaches(step.min_reward):
            self._phase = EpisodePhase.FINISHED
            return ToolResult(text="The step is not solved, and the next ones need it: the task is over.")
        try:
            return ToolResult(text=await self._start_step(task, task.steps[number + 1]))
        except (OSError, EnvironmentFault) as error:  # the agent's files may be the cause
            await self.close_agent_sandbox()
            self._phase = EpisodePhase.FINISHED
            return ToolResult(text=f"The next step cannot start, so the task is over: {error}")

    async def _prepare_step(self, task: TerminalTask, step: Step, session: SandboxSession) -> None:
        workdir = session.sandbox.spec.workdir
        for path, source in step.workdir_files.items():
            data, executable = content_of(task.files[source])
            await session.tools.write(
                f"{workdir.rstrip('/')}/{path}", data, mode=0o755 if executable else 0o644
            )
        if "setup.sh" in step.workdir_files:
            await self._run(session, shell_command("setup.sh"), "setup.sh", _SETUP_S)
        if step.health is not None:
            await wait_healthy(session, step.health)

    async def _finish_step(self, task: TerminalTask, step: Step) -> Verdict:
        """Close the agent's sandbox, take its changed files as a layer, and run the step's tests on them."""
        session = self._here("finish")
        for hook in task.collects:
            limit_s = hook.timeout_s * self.options.timeout_factor
            place = self._connected().session(hook.service) if hook.service else session
            with contextlib.suppress(OSError):  # the agent may have removed the shell
                await place.tools.run(shell_command("-c", hook.command), timeout_s=limit_s)
        layer = self._folder() / f"layer{len(self._layers)}"
        await session.sandbox.take_layer(layer)
        await self.close_agent_sandbox()
        self._layers.append(layer)
        self._planted += await in_thread(planted, layer, self._built().image.layers)
        verifier = self._verifier(task, step)
        verdict = await self._verified(verifier)
        if verdict.problem:
            await self._check_tests(verifier)
        self._verdicts.append(verdict)
        return verdict

    async def _start_step(self, task: TerminalTask, step: Step) -> str:
        """Start a sandbox with the files of the finished steps, and return the step's instruction."""
        path = self._folder() / f"step{len(self._layers)}{SUFFIX}"
        self._with_changes = await in_thread(self._built().with_layers, self._layers, path)
        opening = sandbox_session(self.node, self.sandbox_spec(task))
        self._session = await self._exits.enter_async_context(opening)
        await self._connected().join(self._session)
        await self._prepare_step(task, step, self._session)
        self._start_clock(step)
        return step.instruction

    async def _verified(self, verifier: Verifier) -> Verdict:
        try:
            return await verifier.verify(self._layers)
        except (SandboxError, ToolError, OSError):
            # This machine may lack a resource, so try again; or the agent's files make an image that cannot
            # start.
            try:
                return await verifier.verify(self._layers)
            except (SandboxError, ToolError, OSError) as error:
                return Verdict(problem=f"the verifier's sandbox cannot start: {error}")

    async def _check_tests(self, verifier: Verifier) -> None:
        """Find the cause of tests without a result, by a run on the files from before the step.

        Raises:
            GraderError: the tests have no result there either, so the agent is not the cause.
        """
        control = await verifier.verify(self._layers[:-1])
        if control.problem:
            raise GraderError(
                f"{verifier.task.id}: {control.problem}, also before the agent started: "
                f"{control.output[-1000:]}",
                hint="the tests need something that the image, or the network of the task, does not have",
            )

    def _graded(self, task: TerminalTask) -> Grade:
        # Steps that were not reached count as 0, because an agent can end its task early, unlike in Harbor.
        rewards = [verdict.reward for verdict in self._verdicts]
        rewards += [0.0] * (len(task.steps) - len(rewards))
        reward = rewards[-1] if task.scoring == "final" else sum(rewards) / len(rewards)
        steps = dict(zip((step.name or "tests" for step in task.steps), self._verdicts, strict=False))
        single = len(task.steps) == 1
        components = {
            (name if single else f"{step}.{name}"): value
            for step, verdict in steps.items()
            for name, value in verdict.rewards.items()
        }
        evidence: JsonObject = {
            "steps": {
                step: {
                    "rewards": dict(verdict.rewards),
                    "problem": verdict.problem,
                    "exit_code": verdict.exit_code,
                    "output": verdict.output,
                }
                for step, verdict in steps.items()
            },
            "planted": self._planted,
        }
        return Grade(reward=reward, components=components, evidence=evidence)

    # Parts.

    def _tools(self, task: TerminalTask | None) -> Sequence[ToolSpec]:
        steps = (NEXT_STEP,) if task is not None and len(task.steps) > 1 else ()
        return (*self.sandbox_tools, *steps, self.finish_spec)

    def _verifier(self, task: TerminalTask, step: Step) -> Verifier:
        return Verifier(
            node=self.node,
            options=self.options,
            task=task,
            step=step,
            image=self._built(),
            scratch=self._folder(),
            services=self._connected(),
        )

    def _start_clock(self, step: Step) -> None:
        limit_s = step.agent.timeout_s
        self._deadline = None if limit_s is None else time.monotonic() + limit_s * self.options.timeout_factor

    async def _run(self, session: SandboxSession, argv: list[str], action: str, timeout_s: float) -> None:
        try:
            done = await session.tools.run(argv, timeout_s=timeout_s, background=True)
        except OSError as error:
            raise EnvironmentFault(f"{action} failed: {argv[0]}: {error.strerror}") from error
        if done.exit_code != 0:
            text = done.output.decode(errors="replace")[-1000:]
            reason = f"over {timeout_s:g} s" if done.timed_out else f"exit status {done.exit_code}"
            raise EnvironmentFault(f"{action} failed ({reason}): {text}")

    def _built(self) -> TaskImage:
        if self._image is None:
            raise EnvironmentFault("the image is not built", hint="call init() first")
        return self._image

    def _connected(self) -> TaskServices:
        if self._services is None:
            raise EnvironmentFault("the episode has no services", hint="call init() first")
        return self._services

    def _folder(self) -> Path:
        if self._scratch is None:
            raise EnvironmentFault("the episode has no directory", hint="call init() first")
        return self._scratch


def _machines(task: TerminalTask) -> list[Machine]:
    """Return the machines of the agent and of the verifiers."""
    return [task.machine, *(step.verifier_machine for step in task.steps if step.verifier_machine)]


def _reference(task: TerminalTask) -> list[ReferenceCall]:
    """Return the calls that solve each step with its own solution; empty if a step has no solution."""
    calls = []
    for number, step in enumerate(task.steps, start=1):
        if not step.solution:
            return []
        lines = ["set -e"]
        for path, source in step.solution.items():
            data, _ = content_of(task.files[source])
            target = PurePosixPath(SOLUTION, path)
            text = base64.b64encode(data).decode()
            lines.append(f"mkdir -p {shlex.quote(str(target.parent))}")
            lines.append(f"echo {text} | base64 -d > {shlex.quote(str(target))}")
        lines += [f"export {shlex.quote(f'{name}={value}')}" for name, value in step.solution_env.items()]
        path = shlex.quote(f"{SOLUTION}/{step.solution_script}")
        # Terminal-Bench runs the script with bash, Harbor directly; an image may lack chmod.
        direct = f"if chmod +x {path} 2>/dev/null; then {path}; else bash {path}; fi"
        lines.append(f"bash {path}" if step.result == "pytest" else direct)
        script = f"({'; '.join(lines)})"
        calls.append(ReferenceCall(tool=BASH.name, arguments={"command": script}))
        end = FINISH if number == len(task.steps) else NEXT_STEP
        calls.append(ReferenceCall(tool=end.name, arguments={}))
    return calls
