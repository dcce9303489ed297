"""The Jupyter engine keeps the promises of the forked one."""

import asyncio
import stat
import sys
import venv
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jupyter_client.asynchronous.client import AsyncKernelClient

from prorl_envs.errors import EnvironmentFault, InputError, RolloutFailure, ToolError
from prorl_envs.sandbox.base import Mount, SandboxSpec
from prorl_envs.sandbox.drivers.bubblewrap import BubblewrapDriver
from prorl_envs.sandbox.filesystem.python_runtime import python_runtime
from prorl_envs.tools.client.connection import ToolLimits
from prorl_envs.tools.client.jupyter_output import CellOutput
from prorl_envs.tools.client.python import PythonEngine
from prorl_envs.tools.client.toolbox import Toolbox
from tests.conformance.images import write_image
from tests.tools.deadlines import at_deadline

T = 60.0


@pytest.fixture
async def kernel_box(shared_driver: BubblewrapDriver) -> AsyncIterator[Toolbox]:
    """Toolbox whose cells run in a Jupyter kernel."""
    mounts, masks, _ = python_runtime()
    spec = SandboxSpec(mounts=mounts, masks=masks)
    sandbox = await shared_driver.start(spec)
    toolbox = await Toolbox.open(
        sandbox,
        python=PythonEngine.KERNEL,
        limits=ToolLimits(grace_s=1.0),
        interpreter=sys.executable,
    )
    yield toolbox
    await toolbox.aclose()
    await sandbox.close()


@pytest.mark.anyio
async def test_output_value_state_and_traceback(kernel_box: Toolbox) -> None:
    result = await kernel_box.python("x = 20\nprint('out')\nx + 1", timeout_s=T)
    assert result.text == "out\n21\n"
    assert result.data == {"error": None, "timed_out": False}
    await kernel_box.python("import os\nos.chdir('/tmp')", timeout_s=T)
    assert (await kernel_box.python("os.getcwd()", timeout_s=T)).text == "'/tmp'\n"
    result = await kernel_box.python("x / 0", timeout_s=T)
    assert result.ok
    assert result.data["error"] == "ZeroDivisionError"
    assert result.text.endswith("ZeroDivisionError: division by zero\n")
    assert "\x1b" not in result.text
    assert (await kernel_box.bash("ls -A", timeout_s=T)).text == ""


@pytest.mark.anyio
async def test_rich_displays_and_refused_input(kernel_box: Toolbox) -> None:
    result = await kernel_box.python("from IPython.display import HTML\nHTML('<b>1</b>')", timeout_s=T)
    assert result.data["display"] == [{"text/html": "<b>1</b>"}]
    assert (await kernel_box.python("input()", timeout_s=T)).data["error"] == "RuntimeError"


@pytest.mark.anyio
async def test_no_history_is_written(kernel_box: Toolbox) -> None:
    code = "get_ipython().history_manager.enabled, get_ipython().history_manager.hist_file"
    assert (await kernel_box.python(code, timeout_s=T)).text == "(False, ':memory:')\n"


@pytest.mark.anyio
async def test_the_deadline_interrupts_the_cell_and_keeps_the_session(kernel_box: Toolbox) -> None:
    await kernel_box.python("kept = 1", timeout_s=T)
    code = "print('before')\nwhile True: pass"
    result = await at_deadline(lambda limit_s: kernel_box.python(code, timeout_s=limit_s))
    assert "it was interrupted" in result.text
    assert (await kernel_box.python("kept", timeout_s=T)).text == "1\n"


@pytest.mark.anyio
async def test_a_kernel_that_ignores_the_interrupt_is_replaced(kernel_box: Toolbox) -> None:
    ignore = "import signal\nlost = 1\nsignal.signal(signal.SIGINT, signal.SIG_IGN)"
    code = f"{ignore}\nprint('before', flush=True)\nwhile True: pass"
    result = await at_deadline(lambda limit_s: kernel_box.python(code, timeout_s=limit_s))
    assert "it ignored the interrupt and was killed" in result.text
    assert (await kernel_box.python("lost", timeout_s=T)).data["error"] == "NameError"


@pytest.mark.anyio
async def test_a_kernel_that_exits_is_reported_and_replaced(kernel_box: Toolbox) -> None:
    result = await kernel_box.python("import os\nos._exit(3)", timeout_s=T)
    assert not result.ok
    assert result.text.endswith(
        "[the Python session exited with status 3; the next cell gets a new one, without its variables]"
    )
    assert (await kernel_box.python("1", timeout_s=T)).text == "1\n"


@pytest.mark.anyio
async def test_a_cancelled_cell_leaves_the_toolbox_usable(kernel_box: Toolbox) -> None:
    code = "import time\nopen('begun', 'w').close()\ntime.sleep(100)"
    call = asyncio.create_task(kernel_box.python(code, timeout_s=T))
    await kernel_box.run(["sh", "-c", "until [ -e begun ]; do sleep 0.01; done"], timeout_s=T)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert (await kernel_box.python("1", timeout_s=T)).text == "1\n"


@pytest.mark.anyio
async def test_a_lost_tool_server_is_reported_and_replaced(kernel_box: Toolbox) -> None:
    assert kernel_box._kernel is not None
    call = asyncio.create_task(kernel_box.python("open('begun', 'w').close()\nwhile True: pass", timeout_s=T))
    await kernel_box.run(["sh", "-c", "until [ -e begun ]; do sleep 0.01; done"], timeout_s=T)
    kernel_box._kernel._link.give_up("the test took it away")
    assert "was lost (the test took it away)" in (await call).text
    assert (await kernel_box.python("1", timeout_s=T)).text == "1\n"


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("interpreter", "error", "said", "hint"),
    [
        ("bare", EnvironmentFault, r"exited with status 1 \(.*No module named", "install ipykernel"),
        ("no-python", EnvironmentFault, "no-python cannot be started", "install ipykernel"),
        ("false", ToolError, "exited with status 1", ""),
    ],
)
async def test_a_kernel_that_does_not_start_is_reported(
    shared_driver: BubblewrapDriver,
    tmp_path: Path,
    interpreter: str,
    error: type[RolloutFailure],
    said: str,
    hint: str,
) -> None:
    venv.create(tmp_path / "venv", symlinks=True)  # a copy may not find its libpython
    mounts = tuple(Mount(source=path, target=str(path)) for path in (Path(sys.base_prefix), tmp_path))
    program = str(tmp_path / "venv/bin/python3") if interpreter == "bare" else interpreter
    sandbox = await shared_driver.start(SandboxSpec(mounts=mounts))
    with pytest.raises(error, match=said) as caught:
        await Toolbox.open(sandbox, python=PythonEngine.KERNEL, interpreter=program)
    assert hint in caught.value.hint
    await sandbox.close()


@pytest.mark.anyio
async def test_a_kernel_runs_in_an_emulated_root(shared_driver: BubblewrapDriver, tmp_path: Path) -> None:
    if Path(sys.base_prefix) == Path("/usr"):
        pytest.skip("this Python is a part of the system, which the image replaces")
    root = write_image(tmp_path / "image")
    (root / "workspace").mkdir()  # a directory of the image, which has no path on the host
    mounts, masks, env = python_runtime()
    spec = SandboxSpec(image=root, emulate_root=True, uid=0, mounts=mounts, masks=masks, env=env)
    sandbox = await shared_driver.start(spec)
    toolbox = await Toolbox.open(sandbox, python=PythonEngine.KERNEL, interpreter=sys.executable)
    assert (await toolbox.python("import os; os.getcwd()", timeout_s=T)).text == "'/workspace'\n"
    assert "kernel" not in (await toolbox.bash("ls -A / .", timeout_s=T)).text
    await toolbox.aclose()
    await sandbox.close()


# Messages of a kernel, handled by a pure function.


def test_output_is_bounded_and_colours_are_removed() -> None:
    output = CellOutput(100)
    output.take("stream", {"name": "stdout", "text": "x" * 1000})
    output.take("error", {"ename": "E", "evalue": "", "traceback": ["\x1b[31mred\x1b[0m"]})
    assert output.take("status", {"execution_state": "idle"})
    done = output.reply(timed_out=False, notice="")
    assert done.omitted == 904
    assert done.output.endswith("red\n")
    assert done.error == "E"


def test_a_cell_that_the_kernel_did_not_run_is_an_error() -> None:
    output = CellOutput(1000)
    assert not output.take("execute_reply", {"status": "aborted"})
    reply = output.reply(timed_out=False, notice="")
    assert reply.error == "Aborted" and "did not run" in reply.output


def test_displays_are_bounded() -> None:
    output = CellOutput(1000)
    for _ in range(20):
        output.take("display_data", {"data": {"text/html": "x" * 100_000}})
    done = output.reply(timed_out=False, notice="")
    assert len(done.display) == 10
    assert done.output.count("left out") == 10


@given(
    st.sampled_from(["stream", "error", "status", "display_data", "other"]),
    st.recursive(
        st.none() | st.integers() | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=6,
    ),
)
def test_any_content_is_accepted_or_refused(kind: str, content: object) -> None:
    try:
        CellOutput(100).take(kind, content)
    except msgspec.ValidationError:
        return


@pytest.mark.anyio
async def test_messages_that_break_the_protocol_stop_only_the_session(kernel_box: Toolbox) -> None:
    code = (
        "kernel = get_ipython().kernel\n"
        "kernel.session.send(kernel.iopub_socket, 'stream', {'text': 1}, parent=kernel.get_parent())"
    )
    result = await kernel_box.python(code, timeout_s=T)
    assert "the Python session broke the protocol (ValidationError)" in result.text
    assert (await kernel_box.python("1", timeout_s=T)).text == "1\n"


#: Writes into the connection that ipykernel's debugger has to the kernel itself.
FORGED_TO_ITSELF = """\
import os, socket
own = []
for fd in range(3, 256):
    try:
        peer = socket.socket(fileno=os.dup(fd)).getpeername()
    except OSError:
        continue
    own += [fd] if str(peer).endswith("k-1") else []
for fd in own:
    os.write(fd, b"\\0\\0\\0\\x05forged" * 9)
len(own) > 0
"""


@pytest.mark.anyio
async def test_no_log_of_the_kernel_is_output_of_a_cell(kernel_box: Toolbox) -> None:
    """A thread of the kernel logs a forged message at any moment: during this cell, or a later one."""
    code = "import logging\nlogging.getLogger('tornado.general').error('of the cell')"
    assert (await kernel_box.python(code, timeout_s=T)).text.endswith("of the cell\n")
    assert (await kernel_box.python(FORGED_TO_ITSELF, timeout_s=T)).text == "True\n"
    for _ in range(5):
        assert (await kernel_box.python("6 * 7", timeout_s=T)).text == "42\n"


@pytest.mark.anyio
async def test_a_jupyter_client_can_attach(kernel_box: Toolbox) -> None:
    await kernel_box.python("x = 41", timeout_s=T)
    path = kernel_box.jupyter_connection_file()
    assert stat.S_IMODE(path.lstat().st_mode) == 0o600
    client = AsyncKernelClient()
    client.load_connection_file(str(path))
    client.start_channels()
    try:
        await client.wait_for_ready(timeout=T)
        reply = await client.execute("x += 1", reply=True, timeout=T)
        assert reply["content"]["status"] == "ok"
    finally:
        client.stop_channels()
        client.context.destroy(linger=0)
    assert (await kernel_box.python("x", timeout_s=T)).text == "42\n"
    await kernel_box.python("exit()", timeout_s=T)
    await kernel_box.python("1", timeout_s=T)
    other = kernel_box.jupyter_connection_file()
    assert is_gone(path.parent)
    assert other != path


def is_gone(path: Path) -> bool:
    return not path.exists()


@pytest.mark.anyio
async def test_other_toolboxes_have_no_connection_file(box: Toolbox, python_box: Toolbox) -> None:
    for toolbox in (box, python_box):
        with pytest.raises(InputError, match="no Jupyter kernel"):
            toolbox.jupyter_connection_file()


@pytest.mark.thorough
@pytest.mark.anyio
async def test_a_message_that_is_too_long_is_reported_at_once(kernel_box: Toolbox) -> None:
    code = (
        "kernel = get_ipython().kernel\n"
        "kernel.session.send(kernel.iopub_socket, 'stream', {'name': 'stdout', 'text': 'x' * 20_000_000})"
    )
    result = await kernel_box.python(code + "\nwhile True: pass", timeout_s=T)
    assert "sent a message of more than 16777216 bytes" in result.text
    assert result.data["timed_out"] is False
    assert (await kernel_box.python("1", timeout_s=T)).text == "1\n"


@pytest.mark.anyio
async def test_a_kernel_that_exited_between_cells_is_reported_and_the_cell_runs(kernel_box: Toolbox) -> None:
    await kernel_box.python("import os\npid = os.getpid()", timeout_s=T)
    await kernel_box.bash("kill -9 -1", timeout_s=T)
    assert kernel_box._kernel is not None
    kernel = kernel_box._kernel._kernel
    assert kernel is not None
    await asyncio.wait({kernel._process})
    result = await kernel_box.python("1 + 1", timeout_s=T)
    assert result.text.startswith(
        "2\n[before this cell, the Python session exited with status -9; this is a new"
    )
