"""Promises about checkpoints, and the sandboxes that start from them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from prorl_envs.conformance.box import TIMEOUT_S, Probe
from prorl_envs.conformance.promise import SESSION, Promises, expect, same
from prorl_envs.conformance.world import PromiseContext
from prorl_envs.tools.client.python import PythonEngine
from prorl_envs.tools.client.toolbox import Toolbox

_NONE = "takes no checkpoints"
promises = Promises("checkpoints", exempt={"local": _NONE, "apptainer-instance": _NONE})

#: Looks at a file until its program counts as stopped: the machine may be busy.
_MOST_LOOKS = 100
#: Programs that change a file all the time, in different ways.
_WRITERS = {
    "an open file": "exec 8>>log; while :; do echo x >&8; done",
    "its directory": "while :; do echo x >> log; done",
    "forks": "while :; do (echo x >> log) & (echo y >> log); done",
    "new files": "n=0; while :; do n=$((n + 1)); echo $n > log; mv log log2; cp log2 log; done",
}


@asynccontextmanager
async def _branch(world: PromiseContext, tools: Toolbox, **options: PythonEngine) -> AsyncIterator[Probe]:
    """Take a checkpoint, and start a sandbox from it."""
    checkpoint = await tools.checkpoint()
    try:
        spec = replace(tools.sandbox.spec, checkpoint=checkpoint)
        sandbox = await world.driver.start(spec)
        try:
            async with world.tools(sandbox, **options) as branch:
                yield Probe(sandbox, branch)
        finally:
            await sandbox.close()
    finally:
        await checkpoint.close()


@promises.add(
    "CHK-001", "A sandbox that starts from a checkpoint goes on with its files and shells.", needs=("bash",)
)
async def goes_on(world: PromiseContext) -> None:
    async with world.fresh() as box:
        await box.bash("mkdir d; cd d; echo kept > file; a=(1 '2 3'); f() { echo \"$1 ${a[1]}\"; }; (exit 3)")
        async with _branch(world, box.tools) as branch:
            same((await branch.bash("echo $?; cat file; f x")).text, "3\nkept\nx 2 3\n")


@promises.add("CHK-002", "It goes on with the memory of the forked Python session.", needs=(SESSION,))
async def memory(world: PromiseContext) -> None:
    async with world.fresh(python=True) as box, world.tools(box.sandbox, python=PythonEngine.FORKED) as tools:
        await tools.python("numbers = iter(range(9)); next(numbers); d = {}", timeout_s=TIMEOUT_S)
        async with _branch(world, tools, python=PythonEngine.FORKED) as branch:
            code = "d[1] = 2; print(next(numbers), d)"
            same((await branch.tools.python(code, timeout_s=TIMEOUT_S)).text, "1 {1: 2}\n")
        same((await tools.python("print(next(numbers), d)", timeout_s=TIMEOUT_S)).text, "1 {}\n")


@promises.add(
    "CHK-003", "A sandbox and those that start from its checkpoints see none of each other's changes."
)
async def apart(world: PromiseContext) -> None:
    async with world.fresh() as box:
        await box.run("echo old > file; mkdir d")
        async with _branch(world, box.tools) as first, _branch(world, box.tools) as second:
            for name, each in {"parent": box, "first": first, "second": second}.items():
                await each.run(f"echo {name} > file; echo {name} > d/new; echo {name} > /tmp/new")
            for name, each in {"parent": box, "first": first, "second": second}.items():
                found = await each.run("cat file d/new /tmp/new")
                same(found.output.decode().split(), [name] * 3)


@promises.add(
    "CHK-004",
    "A program that writes while a checkpoint is taken, and afterwards, does not change it.",
    needs=("ls", "cat", "wc", "tail", "mv", "cp", "sleep"),
)
async def unchanged(world: PromiseContext) -> None:
    for way, script in _WRITERS.items():
        async with world.fresh() as box, world.lingering(box, script):
            for _ in range(2):
                async with _branch(world, box.tools) as branch:
                    read = "ls; cat log* | wc -c; cat log* | tail -c 20"
                    before, running = [(await each.run(read)).output for each in (branch, box)]
                    looks = [(await box.run(f"sleep 0.1; {read}")).output]
                    while looks[-1] == running and len(looks) < _MOST_LOOKS:
                        looks.append((await box.run(f"sleep 0.1; {read}")).output)
                    expect(looks[-1] != running, f"the program with {way} stopped")
                    expect((await branch.run(read)).output == before, f"changed by a program with {way}")
