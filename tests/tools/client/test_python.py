"""Promises of both engines of the Python session. Each test runs with each engine."""

import asyncio
import base64
import sys
from collections.abc import AsyncIterator

import pytest

from prorl_envs.sandbox.base import SandboxSpec
from prorl_envs.sandbox.drivers.bubblewrap import BubblewrapDriver
from prorl_envs.sandbox.filesystem.python_runtime import python_runtime
from prorl_envs.tools.client.connection import ToolLimits
from prorl_envs.tools.client.python import PythonEngine
from prorl_envs.tools.client.toolbox import Toolbox
from tests.tools.deadlines import at_deadline

pytestmark = pytest.mark.anyio
T = 90.0
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


async def opened(driver: BubblewrapDriver, engine: PythonEngine, *, grace_s: float = 1.0) -> Toolbox:
    mounts, masks, env = python_runtime()
    sandbox = await driver.start(SandboxSpec(mounts=mounts, masks=masks, env=env))
    limits = ToolLimits(grace_s=grace_s)
    return await Toolbox.open(sandbox, python=engine, limits=limits, interpreter=sys.executable)


@pytest.fixture(scope="module", params=[PythonEngine.FORKED, PythonEngine.KERNEL])
async def kept(shared_driver: BubblewrapDriver, request: pytest.FixtureRequest) -> AsyncIterator[Toolbox]:
    """One session for all tests that do not change it: a kernel takes seconds to start."""
    box = await opened(shared_driver, request.param, grace_s=30.0)  # no machine is too slow to interrupt
    await box.python("pass", timeout_s=T)  # its processes exist before a test's leak check starts
    await box.run(["true"], timeout_s=T)
    yield box
    await box.aclose()
    await box.sandbox.close()


@pytest.fixture(params=[PythonEngine.FORKED, PythonEngine.KERNEL])
async def box(shared_driver: BubblewrapDriver, request: pytest.FixtureRequest) -> AsyncIterator[Toolbox]:
    """Session for a single test, which may break it."""
    box = await opened(shared_driver, request.param)
    yield box
    await box.aclose()
    await box.sandbox.close()


async def test_state_output_and_value(kept: Toolbox) -> None:
    result = await kept.python("x = 20\nprint('out')\nx + 1", timeout_s=T)
    assert result.text == "out\n21\n"
    assert result.ok
    assert result.data == {"error": None, "timed_out": False}
    assert (await kept.python("x * _", timeout_s=T)).text == "420\n"


async def test_a_traceback_is_plain_and_names_the_line(kept: Toolbox) -> None:
    result = await kept.python("def f():\n    return {}['missing']\nf()", timeout_s=T)
    assert result.ok
    assert result.data["error"] == "KeyError"
    assert "line 2, in f()" in result.text
    assert result.text.endswith("KeyError: 'missing'\n")
    assert "\x1b" not in result.text


async def test_output_of_programs_is_in_order(kept: Toolbox) -> None:
    code = "import os\nprint('a', flush=True)\n_ = os.system('echo b; echo c >&2')\nprint('d')"
    assert (await kept.python(code, timeout_s=T)).text == "a\nb\nc\nd\n"


@pytest.mark.parametrize("own", ["os.write(1, b'{}\\n')", "subprocess.run(['echo', '{}'])"])
async def test_output_past_the_streams_belongs_to_its_cell(kept: Toolbox, own: str) -> None:
    """Of programs and C libraries, in order with the cell's own output. Many times, against luck."""
    for number in range(20):
        code = f"import os, subprocess\nprint('a')\n{own.format(number)};\nprint('b')\n{own.format('c')};"
        assert (await kept.python(code, timeout_s=T)).text == f"a\n{number}\nb\nc\n"


async def test_the_name_of_an_error_is_one_line(kept: Toolbox) -> None:
    result = await kept.python(r"raise type('A\nB\x1b[31m', (Exception,), {})('x')", timeout_s=T)
    assert result.data["error"] == r"A\nB\x1b[31m"


STOPPED = "class Own:\n    def __repr__(self):\n        import signal; signal.raise_signal(2)\nOwn()"


@pytest.mark.parametrize(
    ("code", "error"),
    [(STOPPED, "KeyboardInterrupt"), ("input()", "RuntimeError"), ("exit(", "incomplete input")],
)
async def test_no_traceback_shows_a_file_of_this_package(kept: Toolbox, code: str, error: str) -> None:
    result = await kept.python(code, timeout_s=T)
    assert error in result.text and "prorl_envs" not in result.text


async def test_images_and_html_are_handed_on_beside_the_text(kept: Toolbox) -> None:
    code = (
        "from IPython.display import HTML, Image, display\n"
        f"display(Image(data={PNG!r}))\ndisplay(HTML('<b>1</b>'))\nHTML('<b>2</b>')"
    )
    result = await kept.python(code, timeout_s=T)
    assert [sorted(bundle) for bundle in result.data["display"]] == [
        ["image/png"],
        ["text/html"],
        ["text/html"],
    ]
    assert base64.b64decode(result.data["display"][0]["image/png"]) == PNG
    assert result.data["display"][2] == {"text/html": "<b>2</b>"}
    assert result.text.count("<IPython.core.display.") == 3


@pytest.mark.parametrize("code", ["input('name? ')", "import getpass\ngetpass.getpass()"])
async def test_input_is_refused_at_once_with_a_reason(kept: Toolbox, code: str) -> None:
    result = await kept.python(f"{code}\nprint('after')", timeout_s=T)
    assert result.ok
    assert result.data["error"]
    assert "input" in result.text
    assert "after" not in result.text.splitlines()
    assert "not" in result.text.splitlines()[-1]


#: A usual first line of programs. A kernel's streams have no buffer.
HEADER = (
    "if hasattr(sys.stdout, 'buffer'): sys.stdout = io.TextIOWrapper(sys.stdout.buffer, encoding='utf-8')"
)


@pytest.mark.parametrize(
    "broken",
    [
        f"{HEADER}\n{HEADER}\n{HEADER}",
        "with open('/tmp/f', 'w') as f:\n    sys.stdout = sys.stderr = f\n    print('in the file')",
        "sys.stdout.close(); sys.stderr.close(); sys.stdin.close()",
        "sys.__stdout__.close(); sys.__stdout__ = None; sys.stdout = sys.__stdout__",
        "getattr(sys.stdout, 'buffer', sys.stdout).close()",
        "sys.stdout = io.StringIO(); sys.stdout.close()",
        "sys.stdout = io.TextIOWrapper(io.BytesIO()); sys.stdout.detach()",
        "sys.stdout = sys.stderr = sys.stdin = None",
        "sys.stdout, sys.stderr = 3, open('/tmp/f', 'wb')",
        "sys.stdout = open('/dev/full', 'w'); print('lost')",
        "r, w = os.pipe(); os.close(r); sys.stdout = os.fdopen(w, 'w'); print('lost')",
        "sys.stdout = sys.stderr = type('Bad', (), {'write': lambda *_: 1 / 0, 'flush': lambda _: exit()})()",
        "os.closerange(0, 3)",
        "f = open('/tmp/f', 'w'); os.dup2(f.fileno(), 1); os.dup2(f.fileno(), 2)",
        "sys.displayhook = sys.excepthook = sys.unraisablehook = lambda *_: 1 / 0",
    ],
)
async def test_no_cell_breaks_the_output_of_later_ones(kept: Toolbox, broken: str) -> None:
    result = await kept.python(f"import io, os, sys\nkept = 5\n{broken}\n6 * 7", timeout_s=T)
    if "hook" not in broken:
        assert result.text.endswith("42\n"), result.text
    code = "print('o')\nprint('e', file=sys.stderr)\nos.system('echo child')\nkept"
    text = "".join((await kept.python(code, timeout_s=T)).text.split())
    # A kernel sends each stream every 0.2 s, so a line of one may stand within a line of the other.
    assert sorted(text) == sorted("5childeo")
    assert "division by zero" in (await kept.python("1 / 0", timeout_s=T)).text


async def test_values_and_tracebacks_are_shown_when_print_goes_elsewhere(kept: Toolbox) -> None:
    result = await kept.python("import io, sys\nsys.stdout = sys.stderr = io.StringIO()\n41 + 1", timeout_s=T)
    assert result.text.startswith("42\n[sys.stdout was replaced")
    assert (await kept.python("print('hidden')\n'value'", timeout_s=T)).text == "'value'\n"
    assert "division by zero" in (await kept.python("1 / 0", timeout_s=T)).text
    assert "invalid syntax" in (await kept.python("for", timeout_s=T)).text
    assert "UsageError" in (await kept.python("%nosuch", timeout_s=T)).text
    code = (
        "kept = sys.stdout.getvalue()\nsys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__\nprint(kept)"
    )
    assert (await kept.python(code, timeout_s=T)).text == "hidden\n\n"


async def test_input_reads_the_stream_that_a_cell_set(kept: Toolbox) -> None:
    code = "import io, getpass, sys\nsys.stdin = io.StringIO('a\\nb\\nc')\ninput('? '), getpass.getpass()"
    assert (await kept.python(code, timeout_s=T)).text.endswith("('a', 'b')\n")
    assert (await kept.python("input()", timeout_s=T)).text == "'c'\n"
    assert (await kept.python("input()", timeout_s=T)).data["error"] == "EOFError"
    await kept.python("open('/tmp/i', 'w').write('x')", timeout_s=T)
    code = "with open('/tmp/i') as sys.stdin:\n    print(input())"
    assert (await kept.python(code, timeout_s=T)).text == "x\n"
    assert (await kept.python("input()", timeout_s=T)).data["error"] == "RuntimeError"  # its file is closed


LOOP = "for _ in range(100):\n    "


@pytest.mark.parametrize(
    "commands",
    [
        "!sleep 60\n!sleep 60\n!sleep 60",
        f"{LOOP}!sleep 60; true",
        f"import os\n{LOOP}os.system('sleep 60; true')",
        f"{LOOP}x = !sleep 60",
        "!!sleep 60\n!!sleep 60\n!!sleep 60",
        f"{LOOP}get_ipython().run_cell_magic('bash', '', 'sleep 60')",
        f"{LOOP}get_ipython().run_line_magic('time', '__import__(\"time\").sleep(60)')",
    ],
)
async def test_the_deadline_ends_a_cell_of_several_commands(kept: Toolbox, commands: str) -> None:
    await kept.python("kept = 1", timeout_s=T)
    code = f"print('before', flush=True)\n{commands}\nprint('after')"
    result = await at_deadline(lambda limit_s: kept.python(code, timeout_s=limit_s))
    assert "s: it was interrupted]" in result.text
    assert result.data["error"] == "KeyboardInterrupt"
    assert "after" not in result.text.splitlines()
    assert (await kept.python("kept", timeout_s=T)).text == "1\n"


async def test_commands_see_the_names_of_the_cell_and_give_their_status(kept: Toolbox) -> None:
    code = (
        "import os\ncmd, line, cell, depth = 'C', 'L', 'E', 'D'\n"
        "!echo {cmd} $line {cell}; exit 3\n"
        "print(_exit_code, os.waitstatus_to_exitcode(os.system('exit 4')))\n"
        "x = !echo {cmd} $line {depth}\nprint(x)\n"
        "def f(local):\n    y = !echo {local}\n    !echo {local}\n    return y\nprint(f('here'))\n"
        "%sx echo {line} $cell\nget_ipython().run_cell_magic('bash', '-s {line}', 'echo $1')\n"
        "os.system('kill -9 $$')"
    )
    result = await kept.python(code, timeout_s=T)
    assert result.text == "C L E\n3 4\n['C L D']\nhere\n['here']\nL\n9\n"


async def test_an_interrupt_that_a_cell_handles_does_not_end_its_later_commands(kept: Toolbox) -> None:
    code = (
        "import time\nprint('before', flush=True)\ntry:\n    time.sleep(60)\nexcept KeyboardInterrupt:\n"
        "    !echo handled\n    x = !echo too\n    print(x)"
    )
    result = await at_deadline(lambda limit_s: kept.python(code, timeout_s=limit_s))
    assert "handled\n['too']\n" in result.text
    assert result.data["error"] is None


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
async def test_processes_of_multiprocessing_start(kept: Toolbox, method: str) -> None:
    code = (
        "import concurrent.futures, multiprocessing\n"
        f"context = multiprocessing.get_context({method!r})\n"
        "with context.Pool(1) as pool:\n    print(pool.map(abs, [-1, -2]))\n"
        "with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:\n"
        "    print(list(pool.map(abs, [-3])))\n"
        "process = context.Process(target=print, args=('in the process',))\n"
        "process.start()\nprocess.join()\nprint(process.exitcode)"
    )
    result = await kept.python(code, timeout_s=T)
    assert result.data["error"] is None, result.text
    # A kernel may put the output of another process within a line.
    assert result.text.startswith("[1, 2]\n[3]\n") and "0" in result.text.removeprefix("[1, 2]\n[3]\n")
    # These helpers of `multiprocessing` live as long as the session; the leak check would find them.
    await kept.python(
        "from multiprocessing import forkserver, resource_tracker\n"
        "forkserver._forkserver._stop()\nresource_tracker._resource_tracker._stop()",
        timeout_s=T,
    )


async def test_a_cell_has_no_program_arguments(kept: Toolbox) -> None:
    code = (
        "import argparse, sys\nprint(sys.argv, sys.orig_argv)\n"
        "print(argparse.ArgumentParser().parse_args())\n"
        "parser = argparse.ArgumentParser()\nparser.add_argument('file')\nparser.parse_args()"
    )
    result = await kept.python(code, timeout_s=T)
    assert result.text.startswith("[''] ['python3']\nNamespace()\n")
    assert result.data["error"] == "SystemExit"
    assert "following arguments are required: file" in result.text


async def test_the_deadline_keeps_the_output_and_the_session(kept: Toolbox) -> None:
    await kept.python("kept = 1", timeout_s=T)
    code = "import time\nprint('before')\ntime.sleep(100)"
    result = await at_deadline(lambda limit_s: kept.python(code, timeout_s=limit_s))
    assert not result.ok
    assert "s: it was interrupted]" in result.text
    assert (await kept.python("kept", timeout_s=T)).text == "1\n"


async def test_commands_of_the_shell(kept: Toolbox) -> None:
    assert (
        await kept.python("!echo hi; echo err >&2; false\n_exit_code", timeout_s=T)
    ).text == "hi\nerr\n1\n"
    assert (await kept.python("x = !echo captured\nx[0]", timeout_s=T)).text == "'captured'\n"
    assert (await kept.python("%%bash\necho one\necho two", timeout_s=T)).text == "one\ntwo\n"
    result = await kept.python("%%bash\nexit 3", timeout_s=T)
    assert result.data["error"] == "CalledProcessError"


async def test_magics(kept: Toolbox) -> None:
    assert (await kept.python("%pwd", timeout_s=T)).text == "'/workspace'\n"
    assert (await kept.python("%nonsense", timeout_s=T)).text.startswith(
        "UsageError: Line magic function `%n"
    )
    code = "%%writefile made.txt\nline\n"
    assert "Writing made.txt" in (await kept.python(code, timeout_s=T)).text
    assert "per loop" in (await kept.python("%timeit -n 1 -r 1 pass", timeout_s=T)).text


async def test_pip_without_a_network_fails_with_a_reason(kept: Toolbox) -> None:
    result = await kept.python("%pip install --retries 0 --timeout 5 no-such-package", timeout_s=T)
    assert not result.data["timed_out"]
    assert "No matching distribution found" in result.text or "No module named pip" in result.text


@pytest.mark.parametrize(
    "code", ["import sys\nsys.exit()", "raise SystemExit(3)", "import sys\nsys.exit('bye')"]
)
async def test_sys_exit_stops_the_cell_and_keeps_the_session(kept: Toolbox, code: str) -> None:
    await kept.python("kept = 2", timeout_s=T)
    result = await kept.python(f"print('before')\n{code}", timeout_s=T)
    assert result.text.startswith("before\n")
    assert result.data["error"] == "SystemExit"
    assert (await kept.python("kept", timeout_s=T)).text == "2\n"


async def test_late_output_of_a_thread_does_no_harm(kept: Toolbox) -> None:
    code = (
        "import threading\ngo, done = threading.Event(), threading.Event()\n"
        "def late():\n    go.wait()\n    print('late')\n    done.set()\n"
        "threading.Thread(target=late, daemon=True).start()\nprint('cell')"
    )
    assert (await kept.python(code, timeout_s=T)).text == "cell\n"
    result = await kept.python("go.set()\n_ = done.wait()\nprint('next')", timeout_s=T)
    assert result.text in ("late\nnext\n", "next\n")  # a kernel attributes it to the thread's cell
    assert (await kept.python("1 + 1", timeout_s=T)).text == "2\n"


@pytest.mark.parametrize(
    "code",
    [
        "print('x' * 30_000_000)",
        "'x' * 30_000_000",
        "list(range(5_000_000))",
        "import subprocess; subprocess.run('yes | head -c 30000000', shell=True);",
    ],
)
async def test_output_and_values_of_any_size_are_bounded(kept: Toolbox, code: str) -> None:
    result = await kept.python(f"{code}\n", timeout_s=T)
    assert result.ok, result.text[-500:]
    assert len(result.text) < kept.limits.output_bytes + 200
    assert "left out" in result.text or "..." in result.text
    assert (await kept.python("1 + 1", timeout_s=T)).text == "2\n"


async def test_a_repr_that_fails_is_a_traceback(kept: Toolbox) -> None:
    code = "class Bad:\n    def __repr__(self):\n        raise ValueError('no repr')\nBad()"
    result = await kept.python(code, timeout_s=T)
    assert "ValueError: no repr" in result.text
    assert "\x1b" not in result.text


async def test_a_missing_library_is_named(kept: Toolbox) -> None:
    result = await kept.python("import matplotlib.no_such", timeout_s=T)
    assert result.data["error"] == "ModuleNotFoundError"
    assert result.text.endswith("ModuleNotFoundError: No module named 'matplotlib'\n")
    assert "No module named 'matplotlib'" in (await kept.python("%matplotlib inline", timeout_s=T)).text


async def test_invalid_unicode_is_shown(kept: Toolbox) -> None:
    assert (await kept.python("print('\\x00\\x1b[31m', 'é', '\\r')", timeout_s=T)).text.endswith(" é \r\n")
    assert (await kept.python("'\\ud800'", timeout_s=T)).text == "'\\ud800'\n"


async def test_await_works_at_the_top_level(kept: Toolbox) -> None:
    code = "import asyncio\nawait asyncio.sleep(0, 'awaited')"
    assert (await kept.python(code, timeout_s=T)).text == "'awaited'\n"


@pytest.mark.parametrize(
    ("code", "said"),
    [("import os\nos._exit(3)", "status 3"), ("import os\nos.kill(os.getpid(), 9)", "was killed|status -9")],
)
async def test_a_session_that_exits_is_reported_and_replaced(box: Toolbox, code: str, said: str) -> None:
    await box.python("lost = 1", timeout_s=T)
    result = await box.python(f"print('before', flush=True)\n{code}", timeout_s=T)
    assert not result.ok
    assert any(part in result.text for part in said.split("|")), result.text
    assert "the next cell gets a new one" in result.text
    assert (await box.python("lost", timeout_s=T)).data["error"] == "NameError"


@pytest.mark.parametrize("code", ["time.sleep(100)", "await asyncio.sleep(100)"])
async def test_a_cancelled_cell_is_interrupted_and_the_session_kept(kept: Toolbox, code: str) -> None:
    await kept.run(["rm", "-f", "started"], timeout_s=T)
    await kept.python("kept = 1", timeout_s=T)
    begin = "import asyncio, time\nopen('started', 'w').close()\n"
    call = asyncio.create_task(kept.python(begin + code, timeout_s=T))
    await kept.run(["sh", "-c", "until [ -e started ]; do sleep 0.01; done"], timeout_s=T)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert (await kept.python("kept", timeout_s=T)).text == "1\n"


async def test_a_cell_that_is_cancelled_at_once_is_stopped(kept: Toolbox) -> None:
    await kept.python("kept, ran_on = 1, False", timeout_s=T)
    call = asyncio.create_task(kept.python("import time\ntime.sleep(100)\nran_on = True", timeout_s=T))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert (await kept.python("kept, ran_on", timeout_s=T)).text == "(1, False)\n"


async def test_exit_stops_the_session(box: Toolbox) -> None:
    await box.python("lost = 1", timeout_s=T)
    result = await box.python("exit()", timeout_s=T)
    assert "the next cell gets a new one" in result.text
    assert (await box.python("lost", timeout_s=T)).data["error"] == "NameError"


async def test_a_cell_that_ignores_the_interrupt_is_killed_and_its_output_kept(box: Toolbox) -> None:
    code = (
        "import signal\nlost = 1\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "print('before', flush=True)\nwhile True: pass"
    )
    result = await at_deadline(lambda limit_s: box.python(code, timeout_s=limit_s))
    assert result.text.startswith("before\n[timed out after ")
    assert " s: it ignored the interrupt and was killed]\n" in result.text
    assert (await box.python("lost", timeout_s=T)).data["error"] == "NameError"


AWAIT = "import asyncio\nasync def f():\n    while True: pass\nprint('before', flush=True)\n"


@pytest.mark.parametrize(
    "awaits",
    [
        f"{LOOP}await asyncio.sleep(60)",
        "while True: await asyncio.sleep(0)",
        "await asyncio.gather(*(asyncio.sleep(60) for _ in range(3)))",
        "await f()",
        "await asyncio.create_task(f())",
        "asyncio.run(asyncio.sleep(60))",
    ],
)
async def test_the_deadline_interrupts_a_cell_that_awaits(kept: Toolbox, awaits: str) -> None:
    await kept.python("kept = 1", timeout_s=T)
    code = f"{AWAIT}{awaits}\nprint('after')"
    result = await at_deadline(lambda limit_s: kept.python(code, timeout_s=limit_s))
    assert "s: it was interrupted]" in result.text
    assert result.data["error"] in ("KeyboardInterrupt", "CancelledError")
    assert "after" not in result.text.splitlines()
    assert (await kept.python("kept", timeout_s=T)).text == "1\n"


async def test_an_interrupted_cell_does_not_continue_when_a_later_one_awaits(kept: Toolbox) -> None:
    code = f"{AWAIT}count = 0\nwhile True:\n    count += 1\n    await asyncio.sleep(0)"
    await at_deadline(lambda limit_s: kept.python(code, timeout_s=limit_s))
    later = "before = count\nfor _ in range(100): await asyncio.sleep(0)\ncount - before"
    assert (await kept.python(later, timeout_s=T)).text == "0\n"


async def test_a_cell_may_run_event_loops_and_keeps_tasks_for_later_cells(kept: Toolbox) -> None:
    code = (
        "import asyncio\nasync def f():\n    return 7\n"
        "print(asyncio.run(f()), asyncio.new_event_loop().run_until_complete(f()))"
    )
    assert (await kept.python(code, timeout_s=T)).text == "7 7\n"
    await kept.python("task = asyncio.create_task(f())\nawait asyncio.sleep(0)", timeout_s=T)
    assert (await kept.python("await task", timeout_s=T)).text == "7\n"


INTERRUPTED = """
import asyncio, collections, signal, sys
from prorl_envs.tools.server.interrupts import no_running_loop, run_coroutine

class Ready(collections.deque):
    interrupts = True

    def popleft(self):
        handle = super().popleft()
        if self.interrupts:
            self.interrupts = False
            signal.raise_signal(signal.SIGINT)
        return handle

def interrupt_call_soon(loop):
    ordinary = loop.call_soon

    def call_soon(*args, **options):
        loop.call_soon = ordinary
        signal.raise_signal(signal.SIGINT)
        return ordinary(*args, **options)

    loop.call_soon = call_soon

async def cell():
    loop = asyncio.get_running_loop()
    if sys.argv[1] == "schedules":
        interrupt_call_soon(loop)
    else:
        loop._ready = Ready(loop._ready)
    while True:
        await asyncio.sleep(0)

def run():
    try:
        run_coroutine(cell())
    except asyncio.CancelledError:
        print("ended")

async def kernel():
    with no_running_loop():
        run()

asyncio.new_event_loop().run_until_complete(kernel()) if sys.argv[2] == "kernel" else run()
"""


@pytest.mark.parametrize("engine", [PythonEngine.FORKED, PythonEngine.KERNEL])
@pytest.mark.parametrize("work", ["schedules", "takes"])
async def test_an_interrupt_while_the_loop_schedules_or_takes_a_task_does_not_lose_the_task(
    work: str, engine: PythonEngine
) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", INTERRUPTED, work, engine, stdout=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(T):
            shown, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert shown == b"ended\n"
