"""Service that promises about crashes start and kill: `python -m prorl_envs.conformance.victim`.

Reads one line of JSON (driver, image, root, look, linger, mark), prints the output of the script `look` as
one line of JSON, starts the script `linger` in the sandbox, and waits to be killed.
"""

import asyncio
import json
import sys
import warnings
from pathlib import Path

from prorl_envs.conformance.box import Probe
from prorl_envs.conformance.host import MARK
from prorl_envs.conformance.subject import DRIVERS, Subject
from prorl_envs.sandbox.base import SandboxSpec
from prorl_envs.sandbox.drivers.local import NoIsolationWarning
from prorl_envs.tools.client.toolbox import Toolbox


async def main() -> None:
    """Start the sandbox, run the scripts of the request, and wait."""
    request = json.loads(sys.stdin.readline())
    warnings.simplefilter("ignore", NoIsolationWarning)
    driver = Subject(driver=request["driver"], make_driver=DRIVERS[request["driver"]]).make(
        Path(request["root"])
    )
    image = Path(request["image"]) if request["image"] else None
    sandbox = await driver.start(SandboxSpec(image=image))
    tools = await Toolbox.open(sandbox)
    done = await Probe(sandbox, tools).run(request["look"])
    sys.stdout.write(json.dumps(done.output.decode(errors="replace")) + "\n")
    sys.stdout.flush()
    await tools.run(["/bin/sh", "-c", request["linger"]], env={MARK: request["mark"]}, timeout_s=600)


if __name__ == "__main__":
    asyncio.run(main())
