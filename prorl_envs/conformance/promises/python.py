"""Promises about the persistent Python session, with both engines: IPython and a Jupyter kernel."""

from collections.abc import Awaitable, Callable

from prorl_envs.conformance.promise import KERNEL, PYTHON, SESSION, Keep, Promises, expect, same
from prorl_envs.conformance.world import PromiseContext
from prorl_envs.tools.client.python import PythonEngine
from prorl_envs.tools.client.toolbox import Toolbox

promises = Promises("python")
kernel_promises = Promises("jupyter")

type SessionTest = Callable[[Toolbox], Awaitable[None]]

_T = 60.0


def add(number: str, text: str, test: Callable[[PromiseContext, Toolbox], Awaitable[None]]) -> None:
    """Add one promise per engine, tested with a new session. The ids of both have the same number."""

    def keep(engine: PythonEngine) -> Keep:
        async def keep(world: PromiseContext) -> None:
            async with world.session(engine) as tools:
                await test(world, tools)

        return keep

    kernels = f"In a Jupyter kernel: {text[0].lower()}{text[1:]}"
    promises.add(f"PY-{number}", text, needs=(SESSION,))(keep(PythonEngine.FORKED))
    kernel_promises.add(f"JUP-{number}", kernels, needs=(PYTHON, KERNEL))(keep(PythonEngine.KERNEL))


def session(number: str, text: str) -> Callable[[SessionTest], None]:
    """Add the decorated function, which needs only a session: see `add`."""
    return lambda test: add(number, text, lambda _, tools: test(tools))


@session("001", "Names, imports and the directory persist.")
async def persist(tools: Toolbox) -> None:
    await tools.python("import os, math\nx = 5\nos.chdir('/tmp')", timeout_s=_T)
    same((await tools.python("print(x, math.floor(2.5), os.getcwd())", timeout_s=_T)).text, "5 2 /tmp\n")


@session("006", "At its deadline a cell is interrupted; its output and the session are kept.")
async def deadline(tools: Toolbox) -> None:
    await tools.python("x = 'kept'", timeout_s=_T)
    result = await tools.python("import time\nprint('before')\ntime.sleep(600)", timeout_s=1.0)
    expect(result.data["timed_out"] and "before" in result.text, f"it gave {result.text!r}")
    same((await tools.python("x", timeout_s=_T)).text, "'kept'\n")


@session("007", "A cell that ignores the interrupt is killed with its session, and the model notified.")
async def stubborn(tools: Toolbox) -> None:
    code = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass"
    await tools.python("pass", timeout_s=_T)  # start the session before the short deadline applies
    result = await tools.python(code, timeout_s=1.0)
    expect(result.data["timed_out"] and not result.ok, f"it gave {result.text!r}")
    same((await tools.python("1 + 1", timeout_s=_T)).text, "2\n")


@session("008", "If a session exits, the model is notified and a new session starts.")
async def ends(tools: Toolbox) -> None:
    for code in ("exit()", "import os; os._exit(3)", "import os; os.kill(os.getpid(), 9)"):
        result = await tools.python(code, timeout_s=_T)
        expect(not result.ok and bool(result.text), f"{code} gave {result.text!r}")
        same((await tools.python("1 + 1", timeout_s=_T)).text, "2\n")


@session("012", "A cell that forges its session's messages damages only its own session.")
async def forged(tools: Toolbox) -> None:
    code = (
        "import os\nfor fd in range(3, 32):\n"
        "    try: os.write(fd, b'\\0\\0\\0\\x05\\x91\\xa4Done' * 9)\n    except OSError: pass"
    )
    await tools.python(code, timeout_s=_T)
    same((await tools.python("6 * 7", timeout_s=_T)).text.splitlines()[-1], "42")
    same((await tools.run(["/bin/sh", "-c", "echo on"], timeout_s=_T)).output, b"on\n")


async def _hidden(world: PromiseContext, tools: Toolbox) -> None:
    code = (
        "import importlib.util, os, sys\n"
        "[p for p in sys.path if os.path.isdir(p + '/prorl_envs') and os.listdir(p + '/prorl_envs')]"
    )
    if world.is_isolated:
        same((await tools.python(code, timeout_s=_T)).text, "[]\n")


add("015", "Packages that hold graders and reference solutions cannot be imported.", _hidden)
