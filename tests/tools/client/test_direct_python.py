"""Python sessions that a tool server lends to the host. The host uses a session directly and returns it."""

import asyncio
import os
import socket

import pytest

from prorl_envs.errors import ToolError
from prorl_envs.tools.client.connection import ToolConnection
from prorl_envs.tools.client.python import ForkedPython
from prorl_envs.tools.client.toolbox import Toolbox
from prorl_envs.tools.protocol.messages import Bash, BashDone, Python, PythonDone, encode
from tests.tools.deadlines import at_deadline

pytestmark = pytest.mark.anyio
T = 60.0
#: Finds the socket for cells, and writes arbitrary data to it.
FORGE = """
import msgspec, os, struct
def forge(*words):
    data = b''.join(struct.pack('>I', len(body)) + body for body in map(msgspec.msgpack.encode, words))
    os.write(3, data)
"""


async def connection_of(box: Toolbox) -> ToolConnection:
    assert isinstance(box._python, ForkedPython)
    return await box._python._link.connection()


async def is_lent(box: Toolbox) -> bool:
    return None in (await connection_of(box))._lent


async def given_back(box: Toolbox) -> None:
    """Wait until the server has the session again."""
    async with asyncio.timeout(T):
        while await is_lent(box):  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.01)


@pytest.fixture
async def lent(python_box: Toolbox) -> Toolbox:
    """Toolbox whose Python session is lent."""
    await python_box.python("kept = 'yes'", timeout_s=T)
    assert await is_lent(python_box)
    return python_box


async def usable(box: Toolbox) -> bool:
    """Check that the session is the same, and is soon lent again; on a busy machine, this may take several
    cells."""
    for _ in range(8):
        if (await box.python("print(kept)", timeout_s=T)).text != "yes\n":
            return False
        if await is_lent(box):
            return True
    return False


async def test_a_lent_session_gives_the_servers_answer(lent: Toolbox) -> None:
    result = await lent.python("import sys; print('out'); print('err', file=sys.stderr); 6 * 7", timeout_s=T)
    assert (result.ok, result.text) == (True, "out\nerr\n42\n")
    failed = await lent.python("1 / 0", timeout_s=T)
    assert failed.data["error"] == "ZeroDivisionError"
    assert failed.text.endswith("ZeroDivisionError: division by zero\n")
    shown = await lent.python("from IPython.display import HTML; HTML('<b>x</b>')", timeout_s=T)
    assert shown.data["display"] == [{"text/html": "<b>x</b>"}]
    assert await usable(lent)


async def test_one_loan_serves_many_cells(lent: Toolbox) -> None:
    loans = (await connection_of(lent))._lent
    kept = 0
    for number in range(20):  # on a busy machine some take longer than a loan lasts
        loan = loans.get(None)
        assert (await lent.python(f"{number} + 1", timeout_s=T)).text == f"{number + 1}\n"
        kept += loan is not None and loans.get(None) is loan
    assert kept >= 5


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import time; print('first'); time.sleep(0.1); print('last')", "first\nlast\n"),
        ("print('x' * 100_000)", "bytes of output left out"),
        (f"x = '{'x' * 40_000}'; len(x)", "40000\n"),
        ("from IPython.display import HTML; HTML('x' * 50_000)", "<IPython.core.display.HTML object>\n"),
        ("import subprocess; subprocess.run(['echo', 'child']); None", "child\n"),
    ],
    ids=["slow", "much", "long", "display", "child"],
)
async def test_unusual_cells_are_handled_by_the_server(lent: Toolbox, code: str, said: str) -> None:
    assert said in (await lent.python(code, timeout_s=T)).text
    assert await usable(lent)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("exit()", "the Python session exited with status 0"),
        ("import os; os._exit(3)", "the Python session exited with status 3"),
        ("import os; os.kill(os.getpid(), 9)", "the Python session was killed by signal 9"),
        (
            "import os; os.write(3, b'\\xff' * 64); import time; time.sleep(5)",
            "wrote to the session's own channel",
        ),
        ("import os; os.close(3); import time; time.sleep(5)", "the Python session was killed by signal 9"),
    ],
    ids=["exit", "_exit", "kill", "garbage", "closed"],
)
async def test_a_session_that_exits_is_reported_and_replaced(lent: Toolbox, code: str, said: str) -> None:
    assert said in (await lent.python(code, timeout_s=T)).text
    assert "NameError" in (await lent.python("kept", timeout_s=T)).text
    await lent.python("kept = 'yes'", timeout_s=T)
    assert await usable(lent)


async def test_an_exit_between_cells_is_reported(lent: Toolbox) -> None:
    await lent.end_processes()
    result = await lent.python("'kept' in globals()", timeout_s=T)
    assert "the Python session was killed by signal 9" in result.text and "False" in result.text


async def test_output_between_cells_returns_the_session(lent: Toolbox) -> None:
    late = "import threading; threading.Timer(0.2, lambda: print('late', flush=True)).start()"
    await lent.python(late, timeout_s=T)
    await given_back(lent)
    assert (await lent.python("print('now')", timeout_s=T)).text == "late\nnow\n"
    assert await usable(lent)


async def test_another_cells_end_message_does_not_end_a_cell(lent: Toolbox) -> None:
    """The server handles forged messages, because it knows the running cell."""
    await lent.python(FORGE, timeout_s=T)
    forged = await lent.python("forge([7_000_000, 'Forged', []]); print('true')", timeout_s=T)
    assert forged.ok and forged.text == "true\n"
    assert await usable(lent)
    later = "import threading; threading.Timer(0.2, forge, ([7_000_001, 'Forged', []],)).start()"
    await lent.python(later, timeout_s=T)
    await given_back(lent)
    assert (await lent.python("print('true')", timeout_s=T)).text == "true\n"
    assert await usable(lent)


async def test_a_cell_is_interrupted_at_its_deadline(lent: Toolbox) -> None:
    code = "print('before'); import time; time.sleep(100)"
    result = await at_deadline(lambda limit_s: lent.python(code, timeout_s=limit_s))
    assert "s: it was interrupted" in result.text
    assert await usable(lent)


async def test_a_cell_can_be_cancelled_at_once(lent: Toolbox) -> None:
    for _ in range(8):  # at any stage of its start
        call = asyncio.create_task(lent.python("import time; time.sleep(100)", timeout_s=T))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert (await lent.python("kept", timeout_s=T)).duration_s < 10
        assert await usable(lent)


async def test_a_restarted_session_is_lent_again(lent: Toolbox) -> None:
    await lent.restart_python()
    assert not await is_lent(lent)
    await lent.python("kept = 'yes'", timeout_s=T)
    assert await usable(lent)


# A hostile server, played by the test


async def lend(descriptors: list[int], request: Python | Bash) -> ToolConnection:
    """Open a connection whose server answers a request by lending these as a Python session."""
    ours, theirs = socket.socketpair()
    with theirs:
        connection = await ToolConnection.open(ours)
        socket.send_fds(theirs, [encode(PythonDone(1, "", 0, "", False, "", [], lent=True))], descriptors)
        kind = PythonDone if isinstance(request, Python) else BashDone
        try:
            await connection.request(lambda _: request, kind, deadline_s=T)
        except ToolError:
            await connection.aclose()
            raise
        return connection


async def test_descriptors_that_belong_to_no_session_are_rejected() -> None:
    reading, writing = os.pipe()
    one, other = socket.socketpair()
    try:
        for descriptors in ([], [reading], [reading, writing, reading], [reading, one.fileno(), reading]):
            connection = await lend(descriptors, Python(1, "1", T))
            assert not connection._lent, "a pipe for a socket, or one on which reading blocks"
            await connection.aclose()
    finally:
        os.close(reading)
        os.close(writing)
        one.close()
        other.close()


async def test_only_the_answer_to_a_cell_may_lend_a_session() -> None:
    with pytest.raises(ToolError, match="in a wrong reply"):
        await lend([0, 0, 0], Bash(1, "main", ":", T))


async def test_no_session_is_lent_twice() -> None:
    reading, writing = os.pipe()
    session, cells = socket.socketpair()
    ours, theirs = socket.socketpair()
    os.set_blocking(reading, False)
    session.setblocking(False)
    descriptors = [reading, session.fileno(), reading]
    connection = await ToolConnection.open(ours)
    try:
        for number in (1, 2):
            lent = encode(PythonDone(number, "", 0, "", False, "", [], lent=True))
            socket.send_fds(theirs, [lent], descriptors)
            call = connection.request(lambda id_: Python(id_, "1", T), PythonDone, deadline_s=T)
            if number == 1:
                await call
                assert None in connection._lent
            else:
                with pytest.raises(ToolError, match="lent twice"):
                    await call
        assert connection.lost and not connection._lent
    finally:
        await connection.aclose()
        for fd in (reading, writing):
            os.close(fd)
        for each in (session, cells, theirs):
            each.close()
