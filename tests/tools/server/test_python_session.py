"""The promises of the Python session, on real sandboxes."""

import asyncio
import textwrap
import tracemalloc

import pytest

from prorl_envs.errors import InputError
from prorl_envs.tools.client.toolbox import Toolbox
from prorl_envs.tools.protocol.messages import ERROR_NAME_LIMIT
from tests.tools.conftest import HASTY
from tests.tools.deadlines import at_deadline

pytestmark = pytest.mark.anyio
T = 60.0


async def test_output_value_and_state(python_box: Toolbox) -> None:
    result = await python_box.python("x = 20\nprint('out')\nx + 1", timeout_s=T)
    assert result.text == "out\n21\n"
    assert result.ok
    assert result.data == {"error": None, "timed_out": False}
    assert (await python_box.python("x * _", timeout_s=T)).text == "420\n"
    await python_box.python("import os\nos.chdir('/tmp')", timeout_s=T)
    assert (await python_box.python("os.getcwd()", timeout_s=T)).text == "'/tmp'\n"


@pytest.mark.parametrize("code", ["x = 1", "None", "1;", "", "# nothing"])
async def test_no_value_shows_nothing(python_box: Toolbox, code: str) -> None:
    assert (await python_box.python(code, timeout_s=T)).text == ""


async def test_both_streams_and_children_keep_their_order(python_box: Toolbox) -> None:
    code = (
        "import os, sys\nprint(1)\nprint(2, file=sys.stderr)\nos.system('echo 3')\n!echo 4\nprint(5, end='')"
    )
    assert (await python_box.python(code, timeout_s=T)).text == "1\n2\n3\n4\n5"


async def test_a_traceback_is_plain_and_names_the_line(python_box: Toolbox) -> None:
    result = await python_box.python("def f():\n    return {}['missing']\nf()", timeout_s=T)
    assert result.ok
    assert result.data["error"] == "KeyError"
    assert "line 2, in f()" in result.text
    assert result.text.rstrip().endswith("KeyError: 'missing'")
    assert "\x1b" not in result.text


async def test_a_syntax_error_is_an_answer(python_box: Toolbox) -> None:
    result = await python_box.python("for", timeout_s=T)
    assert result.data["error"] == "SyntaxError"
    assert "invalid syntax" in result.text


async def test_magics_and_await_work(python_box: Toolbox) -> None:
    assert (await python_box.python("%pwd", timeout_s=T)).text == "'/workspace'\n"
    code = "import asyncio\nawait asyncio.sleep(0, 'awaited')"
    assert (await python_box.python(code, timeout_s=T)).text == "'awaited'\n"


async def test_a_cell_can_make_callbacks_of_ctypes(python_box: Toolbox) -> None:
    """libffi 3.5 and later maps its own file for them, by a descriptor that it opened in the template."""
    code = """
        import ctypes
        callbacks = [ctypes.CFUNCTYPE(ctypes.c_int)(lambda n=n: n) for n in range(2000)]
        sum(callback() for callback in callbacks)"""
    assert (await python_box.python(textwrap.dedent(code), timeout_s=T)).text == "1999000\n"


async def test_modules_of_the_workspace_and_of_the_interpreter_can_be_imported(python_box: Toolbox) -> None:
    await python_box.write("/workspace/mine.py", b"value = 7\n")
    code = "import mine, csv, sqlite3, xml.dom.minidom\nmine.value"
    assert (await python_box.python(code, timeout_s=T)).text == "7\n"


async def test_the_package_itself_is_hidden(python_box: Toolbox) -> None:
    code = "import os, sys\n[p for p in sys.path if os.path.exists(p + '/prorl_envs/envs')]"
    assert (await python_box.python(code, timeout_s=T)).text == "[]\n"


@pytest.mark.parametrize(
    "register",
    ["for_type(int, show)", "for_type(object, show)", "for_type_by_name('builtins', 'int', show)"],
)
async def test_a_built_in_type_is_shown_by_its_registered_formatter(
    python_box: Toolbox, register: str
) -> None:
    formatter = "get_ipython().display_formatter.formatters['text/html']"
    code = f"show = '<i>{{}}</i>'.format\nold = {formatter}.{register}\n41 + 1"
    result = await python_box.python(code, timeout_s=T)
    assert (result.text, result.data["display"]) == ("42\n", [{"text/html": "<i>42</i>"}])
    await python_box.python("exit()", timeout_s=T)
    result = await python_box.python("41 + 1", timeout_s=T)
    assert (result.text, result.data.get("display", [])) == ("42\n", [])


async def test_rich_displays_are_handed_on_beside_the_text(python_box: Toolbox) -> None:
    code = "from IPython.display import HTML, display\ndisplay(HTML('<b>1</b>'))\nHTML('<b>2</b>')"
    result = await python_box.python(code, timeout_s=T)
    assert result.text.count("<IPython.core.display.HTML object>") == 2
    assert result.data["display"] == [{"text/html": "<b>1</b>"}, {"text/html": "<b>2</b>"}]


async def test_too_many_displays_are_omitted_with_a_note(python_box: Toolbox) -> None:
    code = "from IPython.display import HTML, display\nfor i in range(20): display(HTML('x' * 100_000))"
    result = await python_box.python(code, timeout_s=T)
    assert len(result.data["display"]) == 10
    assert result.text.count("display data of 100000 characters left out: text/html") == 10


async def test_input_is_refused_with_a_reason(python_box: Toolbox) -> None:
    result = await python_box.python("input('name? ')", timeout_s=T)
    assert result.data["error"] == "RuntimeError"
    assert "input() is not available" in result.text


@pytest.mark.parametrize("code", ["while True: pass", "import time\ntime.sleep(100)", "!sleep 100"])
async def test_at_the_deadline_the_cell_is_interrupted_and_the_session_kept(
    python_box: Toolbox, code: str
) -> None:
    await python_box.python("kept = 1", timeout_s=T)
    code = f"print('before')\n{code}"
    result = await at_deadline(lambda limit_s: python_box.python(code, timeout_s=limit_s))
    assert not result.ok
    assert "s: it was interrupted]" in result.text
    assert (await python_box.python("kept", timeout_s=T)).text == "1\n"


@pytest.mark.parametrize("python_box", [HASTY], indirect=True)
async def test_a_cell_that_ignores_the_interrupt_is_killed_with_the_session(python_box: Toolbox) -> None:
    ignore = "import signal\nlost = 1\nsignal.signal(signal.SIGINT, signal.SIG_IGN)"
    code = f"{ignore}\nprint('before')\nwhile True: pass"
    result = await at_deadline(lambda limit_s: python_box.python(code, timeout_s=limit_s))
    assert result.text.startswith("before\n[timed out after ")
    assert " s: it ignored the interrupt and was killed]\n" in result.text
    assert (await python_box.python("lost", timeout_s=T)).data["error"] == "NameError"


@pytest.mark.parametrize(
    ("code", "ended"),
    [
        ("exit()", "exited with status 0"),
        ("import os\nos._exit(3)", "exited with status 3"),
        ("import os\nos.kill(os.getpid(), 9)", "was killed by signal 9"),
    ],
)
async def test_a_session_that_exits_is_reported_and_replaced(
    python_box: Toolbox, code: str, ended: str
) -> None:
    await python_box.python("lost = 1", timeout_s=T)
    result = await python_box.python(code, timeout_s=T)
    assert not result.ok
    assert f"{ended}; the next cell gets a new one" in result.text
    assert (await python_box.python("lost", timeout_s=T)).data["error"] == "NameError"


async def test_garbage_on_the_control_channel_stops_only_the_session(python_box: Toolbox) -> None:
    result = await python_box.python("import os\nos.write(3, b'\\xff' * 100)\nwhile True: pass", timeout_s=T)
    assert "wrote to the session's own channel" in result.text
    assert (await python_box.python("1", timeout_s=T)).text == "1\n"


async def test_a_forged_end_of_a_cell_with_endless_displays_is_refused_unread(python_box: Toolbox) -> None:
    # One byte each on the wire, but 72 in memory.
    code = """
import os, struct, sys
def forge(shell, cell):
    count = 4_000_000
    body = b"\\x93%c\\xa0\\xdd" % cell.id + struct.pack(">I", count) + b"\\x80" * count
    rest = struct.pack(">I", len(body)) + body
    while rest:
        rest = rest[os.write(3, rest):]
    while True: pass
sys.modules["prorl_envs.tools.server.python_kernel"]._run = forge
"""
    assert (await python_box.python(code, timeout_s=T)).ok
    tracemalloc.start()
    result = await python_box.python("1", timeout_s=T)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert "wrote to the session's own channel" in result.text
    assert peak < 1 << 20


async def test_the_end_of_another_cell_does_not_end_a_cell(python_box: Toolbox) -> None:
    code = """
import msgspec, os, struct, threading
def forge(*words):
    os.write(3, b"".join(struct.pack(">I", len(body)) + body for body in map(msgspec.msgpack.encode, words)))
"""
    await python_box.python(code, timeout_s=T)
    forged = await python_box.python("forge([7_000_000, 'Forged', []]); print('true')", timeout_s=T)
    assert forged.ok and forged.text == "true\n"
    later = "later = threading.Timer(0.2, forge, ([7_000_001, 'Forged', []],)); later.start()"
    await python_box.python(later, timeout_s=T)
    assert (await python_box.python("later.join(); print('true')", timeout_s=T)).text == "true\n"


async def test_names_and_displays_are_bounded(python_box: Toolbox) -> None:
    code = "class Loud(Exception): pass\nLoud.__name__ = 'x' * 1_000_000\nraise Loud"
    assert (await python_box.python(code, timeout_s=T)).data["error"] == "x" * ERROR_NAME_LIMIT
    code = "from IPython.display import display\ndisplay({f'a/{n}': '' for n in range(10_000)}, raw=True)"
    result = await python_box.python(code, timeout_s=T)
    assert "display" not in result.data
    assert "left out" in result.text


async def test_a_closed_control_channel_stops_only_the_session(python_box: Toolbox) -> None:
    assert not (await python_box.python("import os\nos.close(3)\nwhile True: pass", timeout_s=T)).ok
    assert (await python_box.python("1", timeout_s=T)).text == "1\n"


async def test_a_forked_child_of_a_cell_cannot_answer_for_it(python_box: Toolbox) -> None:
    await python_box.python("import os\npid = os.fork()", timeout_s=T)
    assert (await python_box.python("pid > 0", timeout_s=T)).text == "True\n"


async def test_endless_output_is_bounded(python_box: Toolbox) -> None:
    result = await python_box.python("print('x' * 10_000_000)\n'end'", timeout_s=T)
    assert result.text.endswith("x\n'end'\n")
    assert len(result.text) < python_box.limits.output_bytes + 200
    assert result.truncated_bytes > 9_900_000


async def test_threads_run_and_their_output_is_shown(python_box: Toolbox) -> None:
    code = "import threading\nt = threading.Thread(target=print, args=('threaded',))\nt.start()\nt.join()"
    assert (await python_box.python(code, timeout_s=T)).text == "threaded\n"


async def test_the_session_holds_no_object_of_the_server(python_box: Toolbox) -> None:
    code = "import os\nsorted(map(int, os.listdir('/proc/self/fd')))[:5], os.getppid()"
    assert (await python_box.python(code, timeout_s=T)).text == "([0, 1, 2, 3, 4], 0)\n"  # 4 lists


async def test_a_cancelled_cell_is_interrupted_and_the_session_survives(python_box: Toolbox) -> None:
    await python_box.python("kept = 1", timeout_s=T)
    code = "import time\nopen('begun', 'w').close()\ntime.sleep(100)"
    call = asyncio.create_task(python_box.python(code, timeout_s=T))
    await python_box.run(["sh", "-c", "until [ -e begun ]; do sleep 0.01; done"], timeout_s=T)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert (await python_box.python("kept", timeout_s=T)).text == "1\n"


async def test_without_a_session_the_call_is_refused(box: Toolbox) -> None:
    with pytest.raises(InputError, match="no Python session"):
        await box.python("1", timeout_s=T)


async def test_surrogates_are_shown_and_never_break_the_wire(python_box: Toolbox) -> None:
    assert (await python_box.python(r"print('\ud800')", timeout_s=T)).text == "\\ud800\n"
    assert not (await python_box.python("'\ud800'", timeout_s=T)).ok


@pytest.mark.parametrize(
    "code", ["raise SystemExit(3)", "import argparse\nargparse.ArgumentParser().error('x')"]
)
async def test_a_cell_that_exits_shows_no_path_of_the_host(python_box: Toolbox, code: str) -> None:
    result = await python_box.python(code, timeout_s=T)
    assert result.data["error"] == "SystemExit"
    assert "/" not in result.text


async def test_multiprocessing_remembers_no_directory_of_the_host(python_box: Toolbox) -> None:
    code = "import multiprocessing.process as p, multiprocessing.spawn as s\nprint(p.ORIGINAL_DIR)"
    assert (await python_box.python(code, timeout_s=T)).text == "None\n"
