"""A service to be killed: `python -m prorl_envs.conformance.victim`. Started by promises about its end.

Reads one line of JSON (driver, image, root, look, linger, mark), prints the output of the script `look` as
one line of JSON, starts the script `linger` in the sandbox, and waits to be killed.
"""

import asyncio
import json
import sys
import warnings
from pathlib import Path

from prorl_envs.conformance.box import Box
from prorl_envs.conformance.host import MARK
from prorl_envs.conformance.subject import DRIVERS
from prorl_envs.sandbox.base import SandboxSpec
from prorl_envs.sandbox.local import NoIsolationWarning
from prorl_envs.tools.client import Toolbox


async def main() -> None:
    """Do as told, and wait."""
    told = json.loads(sys.stdin.readline())
    warnings.simplefilter("ignore", NoIsolationWarning)
    driver = DRIVERS[told["driver"]](Path(told["root"]))
    image = Path(told["image"]) if told["image"] else None
    sandbox = await driver.start(SandboxSpec(image=image))
    tools = await Toolbox.open(sandbox)
    done = await Box(sandbox, tools).run(told["look"])
    sys.stdout.write(json.dumps(done.output.decode(errors="replace")) + "\n")
    sys.stdout.flush()
    await tools.run(["/bin/sh", "-c", told["linger"]], env={MARK: told["mark"]}, timeout_s=600)


if __name__ == "__main__":
    asyncio.run(main())
