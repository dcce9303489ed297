"""Promise about the persistent Python session, with both engines: IPython and a Jupyter kernel."""

from prorl_envs.conformance.promise import KERNEL, PYTHON, SESSION, Keep, Promises, same
from prorl_envs.conformance.world import PromiseContext
from prorl_envs.tools.client.python import PythonEngine

promises = Promises("python")
kernel_promises = Promises("jupyter")

_CODE = """
import importlib.util, os, sys
[p for p in sys.path if os.path.isdir(p + '/prorl_envs') and os.listdir(p + '/prorl_envs')]
"""


def _hidden(engine: PythonEngine) -> Keep:
    async def keep(world: PromiseContext) -> None:
        async with world.session(engine) as tools:
            if world.is_isolated:
                same((await tools.python(_CODE, timeout_s=60)).text, "[]\n")

    return keep


promises.add(
    "PY-015", "Packages that hold graders and reference solutions cannot be imported.", needs=(SESSION,)
)(_hidden(PythonEngine.FORKED))
kernel_promises.add(
    "JUP-015",
    "In a Jupyter kernel: packages that hold graders and reference solutions cannot be imported.",
    needs=(PYTHON, KERNEL),
)(_hidden(PythonEngine.KERNEL))
