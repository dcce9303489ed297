"""A Python session that the host drives itself, and the ways it goes back to its server."""

import asyncio
import os
import socket

import pytest

from prorl_envs.errors import ToolError
from prorl_envs.tools.client import Toolbox
from prorl_envs.tools.connection import Connection
from prorl_envs.tools.python import ForkedPython
from prorl_envs.tools.wire import Bash, BashDone, Python, PythonDone, encode

pytestmark = pytest.mark.anyio
T = 20.0
#: Finds the socket for cells, and says in it what it likes.
FORGE = """
import msgspec, os, struct
def forge(*words):
    data = b''.join(struct.pack('>I', len(body)) + body for body in map(msgspec.msgpack.encode, words))
    os.write(3, data)
"""


async def connection_of(box: Toolbox) -> Connection:
    assert isinstance(box._python, ForkedPython)
    return await box._python._link.connection()


async def is_lent(box: Toolbox) -> bool:
    return None in (await connection_of(box))._lent


async def given_back(box: Toolbox) -> None:
    """Return once the session is its server's."""
    async with asyncio.timeout(T):
        while await is_lent(box):  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.01)


@pytest.fixture
async def lent(python_box: Toolbox) -> Toolbox:
    """A toolbox whose Python session is lent."""
    await python_box.python("kept = 'yes'", timeout_s=T)
    assert await is_lent(python_box)
    return python_box


async def usable(box: Toolbox) -> bool:
    """Whether the session is the one it was, and lent again soon: on a busy machine, not by every cell."""
    for _ in range(8):
        if (await box.python("print(kept)", timeout_s=T)).text != "yes\n":
            return False
        if await is_lent(box):
            return True
    return False


async def test_a_lent_session_says_what_the_server_would(lent: Toolbox) -> None:
    result = await lent.python("import sys; print('out'); print('err', file=sys.stderr); 6 * 7", timeout_s=T)
    assert (result.ok, result.text) == (True, "out\nerr\n42\n")
    failed = await lent.python("1 / 0", timeout_s=T)
    assert failed.data["error"] == "ZeroDivisionError"
    assert failed.text.endswith("ZeroDivisionError: division by zero\n")
    shown = await lent.python("from IPython.display import HTML; HTML('<b>x</b>')", timeout_s=T)
    assert shown.data["display"] == [{"text/html": "<b>x</b>"}]
    assert await usable(lent)


async def test_one_loan_does_for_many_cells(lent: Toolbox) -> None:
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
async def test_what_is_out_of_the_ordinary_is_the_server_s(lent: Toolbox, code: str, said: str) -> None:
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
async def test_its_end_is_said_and_it_is_replaced(lent: Toolbox, code: str, said: str) -> None:
    assert said in (await lent.python(code, timeout_s=T)).text
    assert "NameError" in (await lent.python("kept", timeout_s=T)).text
    await lent.python("kept = 'yes'", timeout_s=T)
    assert await usable(lent)


async def test_one_that_ends_between_cells_is_said(lent: Toolbox) -> None:
    await lent.end_processes()
    result = await lent.python("'kept' in globals()", timeout_s=T)
    assert "the Python session was killed by signal 9" in result.text and "False" in result.text


async def test_output_between_cells_sends_it_back(lent: Toolbox) -> None:
    late = "import threading; threading.Timer(0.2, lambda: print('late', flush=True)).start()"
    await lent.python(late, timeout_s=T)
    await given_back(lent)
    assert (await lent.python("print('now')", timeout_s=T)).text == "late\nnow\n"
    assert await usable(lent)


async def test_the_end_of_another_cell_ends_none(lent: Toolbox) -> None:
    """What is forged is for the server, which knows which cell runs."""
    await lent.python(FORGE, timeout_s=T)
    forged = await lent.python("forge([7_000_000, 'Forged', []]); print('true')", timeout_s=T)
    assert forged.ok and forged.text == "true\n"
    assert await usable(lent)
    later = "import threading; threading.Timer(0.2, forge, ([7_000_001, 'Forged', []],)).start()"
    await lent.python(later, timeout_s=T)
    await given_back(lent)
    assert (await lent.python("print('true')", timeout_s=T)).text == "true\n"
    assert await usable(lent)


async def test_at_its_deadline_a_cell_is_interrupted(lent: Toolbox) -> None:
    result = await lent.python("print('begun'); import time; time.sleep(100)", timeout_s=0.5)
    assert result.text.startswith("begun\n")
    assert "timed out after 0.5 s: it was interrupted" in result.text
    assert await usable(lent)


async def test_a_cell_can_be_cancelled_at_once(lent: Toolbox) -> None:
    for _ in range(8):  # it may be anywhere on its way
        call = asyncio.create_task(lent.python("import time; time.sleep(100)", timeout_s=T))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert (await lent.python("kept", timeout_s=T)).duration_s < 10
        assert await usable(lent)


async def test_a_restarted_session_is_lent_anew(lent: Toolbox) -> None:
    await lent.restart_python()
    assert not await is_lent(lent)
    await lent.python("kept = 'yes'", timeout_s=T)
    assert await usable(lent)


# A hostile server, played by the test.


async def lend(descriptors: list[int], request: Python | Bash) -> Connection:
    """A connection whose server answered a request by lending these as a Python session."""
    ours, theirs = socket.socketpair()
    with theirs:
        connection = await Connection.open(ours)
        socket.send_fds(theirs, [encode(PythonDone(1, "", 0, "", False, "", [], lent=True))], descriptors)
        kind = PythonDone if isinstance(request, Python) else BashDone
        try:
            await connection.request(lambda _: request, kind, deadline_s=T)
        except ToolError:
            await connection.aclose()
            raise
        return connection


async def test_descriptors_that_are_none_of_a_session_are_not_taken() -> None:
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


async def test_only_a_cell_s_answer_lends_a_session() -> None:
    with pytest.raises(ToolError, match="at the wrong moment"):
        await lend([0, 0, 0], Bash(1, "main", ":", T))


async def test_no_session_is_lent_twice() -> None:
    reading, writing = os.pipe()
    session, cells = socket.socketpair()
    ours, theirs = socket.socketpair()
    os.set_blocking(reading, False)
    session.setblocking(False)
    descriptors = [reading, session.fileno(), reading]
    connection = await Connection.open(ours)
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
