"""What a sandbox cannot use up."""

from prorl_envs.conformance.promise import NOT_LOCAL, Promises, expect, same
from prorl_envs.conformance.world import World

promises = Promises("limits")


@promises.add(
    "LIM-001",
    "/run ends, and its end harms nothing else.",
    needs=("head", "rm"),
    exempt=NOT_LOCAL,
    harmful=True,
)
async def run_directory(world: World) -> None:
    async with world.fresh() as box:
        await box.nothing("head -c 400000000 /dev/zero > /run/much && echo 'no end at 400 MB'")
        same(await box.sh("rm /run/much; echo x > file && echo on"), "on")


@promises.add("LIM-002", "Open files end, and their end harms neither tools nor sandbox.", needs=("bash",))
async def open_files(world: World) -> None:
    async with world.fresh() as box:
        script = "i=0; while [ $i -lt 5000 ]; do exec {f}< /dev/null || break; i=$((i+1)); done; echo $i"
        count = (await box.sh(f"bash -c '{script}' 2>/dev/null")).split()
        expect(bool(count) and int(count[-1]) < 5000, f"{count} files could be opened")
        same(await box.sh("echo on"), "on")


@promises.add("LIM-003", "Shell sessions end at a number, and those there are go on.", needs=("bash",))
async def sessions(world: World) -> None:
    async with world.shell() as box:
        results = [await box.bash(f"x={number}", session=str(number)) for number in range(20)]
        expect(not results[-1].ok and bool(results[-1].text), "twenty sessions could be opened")
        same((await box.bash("echo $x", session="0")).text, "0\n")
