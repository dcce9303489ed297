"""Ways in which a process can start in a sandbox, and the state that a process reports in each.

Each way uses other parts of the templates and tool servers, so each can leak something else.
"""

import asyncio
import json
import shlex
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prorl_envs.conformance import state
from prorl_envs.conformance.box import TIMEOUT_S, Probe
from prorl_envs.conformance.promise import KERNEL, PYTHON, SESSION, PromiseBroken, expect, same
from prorl_envs.conformance.subject import STATE_ENTRY
from prorl_envs.tools.client.python import PythonEngine
from prorl_envs.tools.client.toolbox import Toolbox
from prorl_envs.tools.protocol.messages import Framer, encode
from prorl_envs.tools.protocol.terminal import SESSION_FRAME_LIMIT, Exited, Open, decode_from_session

type State = Mapping[str, Any]

_SCRIPT, _REPORT = "state.py", "state.json"
_INTERACTIVE = "prorl_envs.tools.server.interactive:serve"


@dataclass(frozen=True, slots=True, kw_only=True)
class StartWay:
    """Way in which a process starts.

    Args:
        process: name of the process, as the subject of a sentence.
        state: function that starts the process in a fresh sandbox and returns its reported state.
        descriptors: number of descriptors that it may have, by kind of file.
        others: kinds of files that the program opens itself, with any number of descriptors.
        ignored: signals that the program ignores or blocks itself.
        variables: variables that the program adds to its environment itself.
        is_fork: True if the process executed no program, so that `/proc` does not show its environment.
        needs, exempt: see `Promise`.
    """

    process: str
    state: Callable[[Probe], Awaitable[State]]
    descriptors: Mapping[str, int]
    others: frozenset[str] = frozenset()
    ignored: frozenset[int] = frozenset()
    variables: frozenset[str] = frozenset()
    is_fork: bool = False
    needs: tuple[str, ...] = (PYTHON,)
    exempt: Mapping[str, str] = field(default_factory=dict)


def put_script(box: Probe) -> None:
    """Write the program that reports a state into the working directory of a sandbox."""
    (box.sandbox.workspace / _SCRIPT).write_bytes(Path(state.__file__).read_bytes())


async def _reported(box: Probe) -> State:
    text = await asyncio.to_thread((box.sandbox.workspace / _REPORT).read_text)
    found: State = json.loads(text)
    return found


def _shell_line(box: Probe, pid: str) -> str:
    return f"{shlex.quote(box.python)} -I {_SCRIPT} {_REPORT} {pid}"


async def _command(box: Probe) -> State:
    put_script(box)
    done = await box.run(f"{_shell_line(box, '$$')}; :")
    same(done.output, b"")
    return await _reported(box)


async def _harness(box: Probe) -> State:
    put_script(box)
    # As in `HarnessedEnvironment.run_harness`, while the endpoint listens on the sandbox's loopback.
    with await box.sandbox.listen_loopback():
        done = await box.run(f"{_shell_line(box, '$$')}; :", env={"GIVEN_TO_IT": "1"}, stdin=b"instruction")
    same(done.output, b"")
    return await _reported(box)


async def _in_shell(box: Probe, pid: str, session: str = "main") -> State:
    put_script(box)
    same((await box.bash(_shell_line(box, pid), session=session)).text, "")
    return await _reported(box)


async def _first_shell(box: Probe) -> State:
    return await _in_shell(box, "$$")


async def _further_shell(box: Probe) -> State:
    await box.bash(":")
    return await _in_shell(box, "$$", "further")


async def _shell_command(box: Probe) -> State:
    return await _in_shell(box, "self")


async def _interactive(box: Probe, *, terminal: bool) -> State:
    put_script(box)
    argv = ["/bin/sh", "-c", f"{_shell_line(box, '$$')}; :"]
    cwd = await box.sh("pwd")
    with await box.sandbox.spawn(_INTERACTIVE) as sock:
        loop, framer = asyncio.get_running_loop(), Framer(SESSION_FRAME_LIMIT)
        await loop.sock_sendall(sock, encode(Open(argv, cwd, {"GIVEN_TO_IT": "1"}, terminal, 24, 80)))
        async with asyncio.timeout(TIMEOUT_S):
            while data := await loop.sock_recv(sock, 65536):
                for message in map(decode_from_session, framer.feed(data)):
                    if isinstance(message, Exited):
                        same((message.status, message.failure), (0, ""))
                        return await _reported(box)
    raise PromiseBroken("the interactive session ended before its program")


async def _on_terminal(box: Probe) -> State:
    return await _interactive(box, terminal=True)


async def _on_pipes(box: Probe) -> State:
    return await _interactive(box, terminal=False)


async def _cell(box: Probe, engine: PythonEngine, code: str) -> State:
    put_script(box)
    tools = await Toolbox.open(box.sandbox, python=engine, interpreter=box.python, limits=box.tools.limits)
    try:
        result = await tools.python(code, timeout_s=TIMEOUT_S)
    finally:
        await tools.aclose()
    expect(result.ok and not result.text, f"the cell printed {result.text[:500]!r}")
    return await _reported(box)


_CELL = f"import runpy; runpy.run_path({_SCRIPT!r})['write']({_REPORT!r});"


async def _session(box: Probe) -> State:
    return await _cell(box, PythonEngine.FORKED, _CELL)


async def _of_session(box: Probe) -> State:
    code = f"import subprocess; subprocess.run([{box.python!r}, '-I', {_SCRIPT!r}, {_REPORT!r}], check=True);"
    return await _cell(box, PythonEngine.FORKED, code)


async def _kernel(box: Probe) -> State:
    return await _cell(box, PythonEngine.KERNEL, _CELL)


async def tool_server(box: Probe) -> State:
    """Return the state, at its entry point, of a process that a template forks into the sandbox."""
    loop, data = asyncio.get_running_loop(), b""
    with await box.sandbox.spawn(STATE_ENTRY) as sock:
        async with asyncio.timeout(TIMEOUT_S):
            while chunk := await loop.sock_recv(sock, 65536):
                data += chunk
    found: State = json.loads(data)
    return found


_THREE_PIPES = {"pipe": 3}
_TERMINAL = {"terminal": 3}
#: A shell also has a second descriptor of its terminal, the file with a command, and the pipe for its status.
_SHELL = {"terminal": 4, "file": 1, "pipe": 1}
#: Signals that the commands of a bash, the interactive bash, and a Python interpreter ignore or block.
_BY_COMMAND = frozenset({32, 33})
_BY_BASH = _BY_COMMAND | {3, 15, 17, 20, 21, 22}
_BY_PYTHON = frozenset({2, 13, 25})
_GIVEN = frozenset({"GIVEN_TO_IT"})
_PROMPTS = frozenset({"PS1", "PS2"})
_LIBRARIES = frozenset({"OPENBLAS_NUM_THREADS"})


def _shell(process: str, state: Callable[[Probe], Awaitable[State]]) -> StartWay:
    return StartWay(
        process=process,
        state=state,
        descriptors=_SHELL,
        ignored=_BY_BASH,
        variables=_PROMPTS,
        needs=(PYTHON, "bash"),
    )


WAYS: Mapping[str, StartWay] = {
    "WAY-001": StartWay(process="A command", state=_command, descriptors={"null": 1, "pipe": 2}),
    "WAY-002": StartWay(process="A harness", state=_harness, descriptors=_THREE_PIPES, variables=_GIVEN),
    "WAY-003": _shell("The first shell", _first_shell),
    "WAY-004": _shell("A further shell", _further_shell),
    "WAY-005": StartWay(
        process="A command of a shell",
        state=_shell_command,
        descriptors=_TERMINAL,
        ignored=_BY_COMMAND | _BY_PYTHON,
        needs=(PYTHON, "bash"),
    ),
    "WAY-006": StartWay(
        process="A program on a terminal", state=_on_terminal, descriptors=_TERMINAL, variables=_GIVEN
    ),
    "WAY-007": StartWay(
        process="A program on pipes", state=_on_pipes, descriptors=_THREE_PIPES, variables=_GIVEN
    ),
    "WAY-008": StartWay(
        process="A Python session",
        state=_session,
        descriptors={"null": 2, "pipe": 4, "socket": 1},  # with copies of its standard streams
        ignored=_BY_PYTHON,
        variables=_LIBRARIES,
        is_fork=True,
        needs=(SESSION,),
    ),
    "WAY-009": StartWay(
        process="A program of a Python session",
        state=_of_session,
        descriptors={"null": 1, "pipe": 2},
        ignored=_BY_PYTHON,
        variables=_LIBRARIES,
        needs=(SESSION,),
    ),
    "WAY-010": StartWay(
        process="A Jupyter kernel",
        state=_kernel,
        descriptors={},
        others=frozenset({"null", "pipe", "socket", "file", "other"}),
        ignored=_BY_PYTHON,
        needs=(PYTHON, KERNEL),
    ),
}
