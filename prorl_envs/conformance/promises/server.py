"""Promises about the tool server: sandboxes cannot reach it, and its failures give clear errors."""

import secrets
import sysconfig

from prorl_envs.conformance.host import marked
from prorl_envs.conformance.promise import NOT_LOCAL, Promises, expect, same
from prorl_envs.conformance.state import PLANTED
from prorl_envs.conformance.ways import tool_server
from prorl_envs.conformance.world import PromiseContext
from prorl_envs.errors import SandboxError, ToolError
from prorl_envs.sandbox.base import Mount

promises = Promises("tool server")


@promises.add(
    "SRV-005",
    "`end_processes` kills every process of the sandbox; files and tools remain.",
    exempt={"local": "has no pid namespace; it refuses"},
    needs=("sleep",),
    harmful=True,
)
async def end_processes(world: PromiseContext) -> None:
    async with world.fresh() as box, world.lingering(box, "sleep 600 & sleep 600; :", count=3) as mark:
        await box.sh("echo kept > file")
        await box.tools.end_processes()
        expect(not marked(mark), "some live on")
        same(await box.sh("read -r x < file; echo $x"), "kept")


@promises.add("SRV-007", "No descriptor of a shell's commands leads to the tool server.", needs=("bash",))
async def shell_descriptors(world: PromiseContext) -> None:
    # The descriptors of a terminal are devices. bash lists the descriptors through the directory.
    script = "for f in /proc/self/fd/*; do [ -c $f ] || [ -d $f ] || [ ! -e $f ] || echo $f; done"
    async with world.shell() as box:
        same((await box.bash(f"bash -c '{script}'")).text, "")
        same((await box.bash(f"bash -c '{script}' 5< /etc/passwd")).text, "/proc/self/fd/5\n")


@promises.add("SRV-009", "A tool server imports nothing from the sandbox's files.", exempt=NOT_LOCAL)
async def imports(world: PromiseContext) -> None:
    library = sysconfig.get_path("stdlib")
    source = world.path / secrets.token_hex(4)
    source.mkdir()
    (source / f"{PLANTED}.py").touch()
    async with world.fresh(mounts=(Mount(source=source, target=library),)) as box:
        same(await box.sh(f"[ -e {library}/{PLANTED}.py ] && echo there"), "there")
        found = await tool_server(box)
    expect(not found["imports"], f"it imported a module of the sandbox's by {found['finders']}")


@promises.add("SRV-012", "If the image has no bash, the bash tool gives an answer or a typed error.")
async def bash_or_error(world: PromiseContext) -> None:
    async with world.shell() as box:
        try:
            result = await box.bash("echo $((6 * 7))")
        except (ToolError, SandboxError) as error:
            expect("bash" in str(error), f"it says {error}")
        else:
            expect(result.text.startswith("42\n"), f"it answered {result.text!r}")
