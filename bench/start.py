"""A sandbox, the answer of `echo hi` in it, its end: by each driver, and `apptainer exec` for one command.

python -m bench.start DIRECTORY SIF   # two forms of one image, which has bash
"""

import argparse
import asyncio
import tempfile
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

from bench.bash_action import TIMEOUT_S, Action, measure, show
from prorl_envs.sandbox.apptainer import ApptainerDriver
from prorl_envs.sandbox.apptainer_probe import find_apptainer
from prorl_envs.sandbox.base import SandboxSpec
from prorl_envs.sandbox.bubblewrap import BubblewrapDriver
from prorl_envs.tools.client import Toolbox


async def through_driver(driver: BubblewrapDriver, spec: SandboxSpec) -> None:
    sandbox = await driver.start(spec)
    toolbox = await Toolbox.open(sandbox)
    result = await toolbox.bash("echo hi", timeout_s=TIMEOUT_S)
    assert result.text == "hi\n", result.text
    await toolbox.aclose()
    await sandbox.close()


async def apptainer_exec(program: Path, image: Path, scratch: str) -> None:
    child = await asyncio.create_subprocess_exec(
        *(program, "--silent", "exec", "--userns", "--containall", "--no-home", image, "sh", "-c", "echo hi"),
        stdout=asyncio.subprocess.PIPE,
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": scratch, "APPTAINER_CONFIGDIR": scratch},
    )
    output, _ = await child.communicate()
    assert output == b"hi\n", output


async def bench(images: dict[str, Path | None], rounds: int) -> None:
    """Measure and print. Sandboxes are closed within the time, as a command of its own is."""
    program = find_apptainer()
    async with AsyncExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory())
        drivers: list[BubblewrapDriver] = []
        for make in (BubblewrapDriver, ApptainerDriver):
            drivers.append(make())
            stack.push_async_callback(drivers[-1].aclose)
            await drivers[-1].warm("base")
        actions: dict[str, Action] = {}
        for name, image in images.items():
            for driver in drivers:
                actions[f"{name}: {driver.name}"] = partial(through_driver, driver, SandboxSpec(image=image))
            if image is not None:
                actions[f"{name}: apptainer exec"] = partial(apptainer_exec, program, image, scratch)
        show(await measure(actions, rounds, 1))


def main() -> None:
    parser = argparse.ArgumentParser(description="Start, `echo hi`, end: by driver and kind of image.")
    parser.add_argument("directory", type=Path, help="an image as a directory")
    parser.add_argument("sif", type=Path, help="the same as a SIF")
    parser.add_argument("--rounds", type=int, default=30, help="turns each row has")
    options = parser.parse_args()
    images = {"host": None, "directory": options.directory, "SIF": options.sif}
    asyncio.run(bench(images, options.rounds))


if __name__ == "__main__":
    main()
