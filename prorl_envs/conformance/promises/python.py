"""Promises about the persistent Python session, with both engines: IPython and a Jupyter kernel."""

import asyncio
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


def cells(number: str, text: str, *steps: tuple[str, str]) -> None:
    """Add a promise that the cells of a session, run in order, print these texts."""

    async def keep(tools: Toolbox) -> None:
        for code, printed in steps:
            same((await tools.python(code, timeout_s=_T)).text, printed)

    session(number, text)(keep)


cells(
    "001",
    "Names, imports and the directory persist.",
    ("import os, math\nx = 5\nos.chdir('/tmp')", ""),
    ("print(x, math.floor(2.5), os.getcwd())", "5 2 /tmp\n"),
)
cells(
    "002",
    "Printed output comes first, then the value of a last expression.",
    ("print('a')\n6 * 7", "a\n42\n"),
    ("6 * 7;", ""),
    ("None", ""),
)
cells("003", "Text of any language passes unchanged.", ("print('héllo ☃')\n'☃'", "héllo ☃\n'☃'\n"), ("", ""))
cells(
    "004",
    "The output of programs that a cell starts is part of its output.",
    ("import os\nprint('a', flush=True)\n_ = os.system('echo b; echo c >&2')\nprint('d')", "a\nb\nc\nd\n"),
)


@session("005", "An error is a trace-back without colours, and the session is kept.")
async def errors(tools: Toolbox) -> None:
    await tools.python("x = 1", timeout_s=_T)
    result = await tools.python("1 / 0", timeout_s=_T)
    same((result.ok, result.data["error"]), (True, "ZeroDivisionError"))
    expect("Traceback" in result.text and "\x1b" not in result.text, f"it gave {result.text!r}")
    same((await tools.python("def (", timeout_s=_T)).data["error"], "SyntaxError")
    same((await tools.python("x", timeout_s=_T)).text, "1\n")


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


@session("009", "A hundred million characters of output are bounded and counted.")
async def flood(tools: Toolbox) -> None:
    code = "import sys\nprint('first')\nfor _ in range(100): sys.stdout.write('x' * 10**6)\nprint('last')"
    result = await tools.python(code, timeout_s=_T)
    expect(result.text.startswith("first\nxx") and result.text.endswith("last\n"), "an end is missing")
    expect(
        len(result.text) < tools.limits.output_bytes + 200 and result.truncated_bytes > 9 * 10**7,
        "not bounded",
    )


@session("010", "A cell that asks for input fails at once: there is no input.")
async def asks(tools: Toolbox) -> None:
    result = await tools.python("input('name? ')", timeout_s=_T)
    expect(result.data["error"] is not None and not result.data["timed_out"], f"it gave {result.text!r}")


@session("011", "Displayed objects are returned as structured output, bounded.")
async def displays(tools: Toolbox) -> None:
    code = "from IPython.display import HTML, display\ndisplay(HTML('<b>x</b>'))"
    result = await tools.python(code, timeout_s=_T)
    same(result.data["display"], [{"text/html": "<b>x</b>"}])
    result = await tools.python("display(HTML('x' * 10**8))", timeout_s=_T)
    expect("display" not in result.data and result.ok, "a hundred million characters were passed on")


@session("012", "A cell that forges its session's messages damages only its own session.")
async def forged(tools: Toolbox) -> None:
    code = (
        "import os\nfor fd in range(3, 32):\n"
        "    try: os.write(fd, b'\\0\\0\\0\\x05\\x91\\xa4Done' * 9)\n    except OSError: pass"
    )
    await tools.python(code, timeout_s=_T)
    same((await tools.python("6 * 7", timeout_s=_T)).text.splitlines()[-1], "42")
    same((await tools.run(["/bin/sh", "-c", "echo on"], timeout_s=_T)).output, b"on\n")


@session("013", "A cancelled cell is stopped, and the session is kept.")
async def cancelled(tools: Toolbox) -> None:
    await tools.python("x = 'kept'", timeout_s=_T)
    call = asyncio.ensure_future(tools.python("import time; time.sleep(600)", timeout_s=_T))
    await asyncio.wait([call], timeout=0.3)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    same((await tools.python("x", timeout_s=_T)).text, "'kept'\n")


async def _hidden(world: PromiseContext, tools: Toolbox) -> None:
    code = (
        "import importlib.util, os, sys\n"
        "[p for p in sys.path if os.path.isdir(p + '/prorl_envs') and os.listdir(p + '/prorl_envs')]"
    )
    if world.is_isolated:
        same((await tools.python(code, timeout_s=_T)).text, "[]\n")


add("015", "Packages that hold graders and reference solutions cannot be imported.", _hidden)


@session("035", "No traceback shows a file of the package that runs the cells.")
async def own_frames(tools: Toolbox) -> None:
    stopped = "class Own:\n    def __repr__(self):\n        import signal; signal.raise_signal(2)\nOwn()"
    for code, error in (
        (stopped, "KeyboardInterrupt"),
        ("input()", "RuntimeError"),
        ("exit(", "incomplete input"),
    ):
        result = await tools.python(code, timeout_s=_T)
        expect(error in result.text, f"{code!r} gave {result.text!r}")
        expect("prorl_envs" not in result.text, f"{code!r} gave {result.text!r}")


@session("036", "An exception's name is one line, whatever its class is called.")
async def error_name(tools: Toolbox) -> None:
    result = await tools.python(r"raise type('A\nB\x1b[31m', (Exception,), {})('x')", timeout_s=_T)
    same(result.data["error"], r"A\nB\x1b[31m")


@session("037", "A cell that awaits is interrupted at its deadline, and does not continue in later cells.")
async def awaits(tools: Toolbox) -> None:
    # The interrupt nearly always arrives in the event loop, not in the cell's own code.
    code = "import asyncio\ncount = 0\nwhile True:\n    count += 1\n    await asyncio.sleep(0.05)"
    result = await tools.python(code, timeout_s=1.0)
    expect(result.data["timed_out"] and "interrupted" in result.text, f"it gave {result.text!r}")
    code = "before = count\nawait asyncio.sleep(0.2)\nprint(before > 0, count - before)"
    same((await tools.python(code, timeout_s=_T)).text, "True 0\n")
