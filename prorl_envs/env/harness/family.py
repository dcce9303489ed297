"""Families whose tasks are solved by a harness, in the family's own sandbox and with its own grader."""

import platform
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from prorl_envs.env.base import Environment, Message, Prompt, ReferenceCall, Task
from prorl_envs.env.harness.install import install, installed
from prorl_envs.env.harness.recipe import ENDPOINT, INSTALLED, MODEL, Endpoint, Recipe, Spelling, filled
from prorl_envs.env.node import Node
from prorl_envs.env.sandboxed import SandboxedEnvironment
from prorl_envs.errors import EnvironmentFault, InputError
from prorl_envs.sandbox.base import SandboxSpec
from prorl_envs.sandbox.filesystem.mount_plan import DEFAULT_ENV
from prorl_envs.tools.types import Completed, ToolSpec

#: Bytes of a harness's output that are kept to diagnose failures.
_OUTPUT_BYTES = 64 * 1024
_SETUP_TIMEOUT_S = 60.0
#: Kernel limit for one argument of a command, in bytes.
_ARGUMENT_BYTES = 128 * 1024 - 1
_ARCHITECTURES = {"x86_64": "x64", "aarch64": "arm64"}


class HarnessedEnvironment[TaskT: Task](SandboxedEnvironment[TaskT]):
    """Subclass of a one-sandbox family that runs a harness; created by `with_harness`."""

    harness: ClassVar[Recipe]
    #: The original family.
    unharnessed: ClassVar[type[Environment[Any]]]

    @property
    def tools(self) -> Sequence[ToolSpec]:
        """Empty: the harness has its own tools."""
        return ()

    def prompt(self, task: TaskT) -> Prompt:
        """Return the instruction for the harness, as a user message."""
        instructions = [m["content"] for m in super().prompt(task).messages if m["role"] == "user"]
        text = filled(self.harness.instruction, {"task": "\n\n".join(instructions)})
        messages: list[Message] = [{"role": "user", "content": text}]
        return Prompt(messages=messages, tools=())

    def sandbox_spec(self, task: TaskT) -> SandboxSpec:
        spec = super().sandbox_spec(task)
        harness = installed(self.harness, self.node.cache_dir)
        mounts = [mount for mount in harness.mounts if mount not in spec.mounts]
        env = dict(spec.env)
        if harness.path:
            env["PATH"] = ":".join([*harness.path, env.get("PATH", DEFAULT_ENV["PATH"])])
        masks = [mask for mask in harness.masks if mask not in spec.masks]
        return replace(spec, mounts=(*spec.mounts, *mounts), masks=(*spec.masks, *masks), env=env)

    @classmethod
    async def provision(cls, node: Node, task: TaskT, progress: Callable[[str], None]) -> None:
        await super().provision(node, task, progress)
        await install(cls.harness, node.cache_dir, progress)

    @classmethod
    def load(cls, row: Mapping[str, Any]) -> TaskT:
        task = super().load(row)
        if cls.harness.spelling is None:
            return task
        return task.model_copy(update=_spelled(task, cls.harness.spelling))

    async def listen_inside(self) -> socket.socket:
        """Return a listening socket on the sandbox's loopback, for the model's endpoint. The caller closes
        it.

        Raises:
            SandboxError: the sandbox is closed.
        """
        return await self._here("run").sandbox.listen_loopback()

    async def run_harness(self, prompt: Prompt, endpoint: Endpoint, *, timeout_s: float) -> Completed:
        """Run the harness until it exits. Cancellation kills it.

        Args:
            prompt: result of `init`.
            endpoint: model endpoint that the harness calls.
            timeout_s: seconds after which the harness is killed.

        Raises:
            EnvironmentFault: the task is too long, a file cannot be written, or the program is missing.
            SandboxError, ToolError: our infrastructure failed.
        """
        session, recipe = self._here("run"), self.harness
        paths = await session.tools.run(["/bin/sh", "-c", "pwd; echo $HOME"], timeout_s=_SETUP_TIMEOUT_S)
        workdir, home, *_ = [*paths.output.decode("utf-8", "replace").split("\n"), "", ""]
        values = {
            "instruction": str(prompt.messages[0]["content"]),
            "url": endpoint.url,
            "key": endpoint.key,
            "model": MODEL,
            "installed": INSTALLED,
            "home": home,
            "workdir": workdir,
            "arch": _ARCHITECTURES.get(platform.machine(), platform.machine()),
        }
        command = [filled(part, values) for part in recipe.command]
        if any(len(part.encode("utf-8", "replace")) > _ARGUMENT_BYTES for part in command):
            raise EnvironmentFault(
                f"the task is too long for the command line of {recipe.name}",
                hint="let the recipe pass it on standard input: stdin: '{instruction}'",
            )
        try:
            for path, text in recipe.files.items():
                await session.tools.write(filled(path, values), filled(text, values).encode())
            return await session.tools.run(
                command,
                env={name: filled(text, values) for name, text in {**ENDPOINT, **recipe.env}.items()},
                stdin=filled(recipe.stdin, values).encode(),
                timeout_s=timeout_s,
                output_limit=_OUTPUT_BYTES,
            )
        except OSError as error:
            raise EnvironmentFault(f"the harness {recipe.name} cannot be started: {error}") from error


def with_harness(base: type[Environment[Any]], recipe: Recipe, where: str) -> type[Environment[Any]]:
    """Return a subclass of `base` whose tasks are solved by the harness of `recipe`.

    Args:
        base: the family.
        recipe: recipe of the harness.
        where: prefix of error messages, such as `agents.mini`.

    Raises:
        InputError: the family has no sandbox in which a harness could run.
    """
    if not issubclass(base, SandboxedEnvironment):
        raise InputError(f"{where}: {base.name} has no sandbox of its own in which a harness could run")
    fields = {
        "__module__": base.__module__,
        "__doc__": base.__doc__,
        "harness": recipe,
        "unharnessed": base,
        "finish_tool": "",
    }
    return type(base.__name__, (HarnessedEnvironment, base), fields)


def harness_of(family: type[Environment[Any]]) -> Recipe | None:
    """Return the harness that solves a family's tasks; None if the service's own agent loop does."""
    return family.harness if issubclass(family, HarnessedEnvironment) else None


def without_harness(family: type[Environment[Any]]) -> type[Environment[Any]]:
    """Return the original family, with its own tools, prompt and references."""
    return family.unharnessed if issubclass(family, HarnessedEnvironment) else family


def _spelled(task: Task, spelling: Spelling) -> dict[str, Any]:
    """Return the reference fields as calls of the harness's shell tool; {} if they use other tools."""
    calls, answer = [], task.reference_answer
    for call in task.reference:
        if call.tool == "bash":
            arguments = spelling.arguments(str(call.arguments.get("command", "")))
            calls.append(ReferenceCall(tool=spelling.tool, arguments=arguments))
        elif call.tool == "finish":
            answer = str(call.arguments.get("answer", "")) or answer
        else:
            return {}
    if spelling.finish:
        arguments = spelling.arguments(spelling.finish)
        calls.append(ReferenceCall(tool=spelling.tool, arguments=arguments))
    return {"reference": tuple(calls), "reference_answer": answer or "Done."}
