"""Runner of a batch of cases in the grading sandbox. The host starts one process; cases are forked from it.

    runner    reads the batch from stdin, sends fork requests to the nursery, keeps time, prints the results
    nursery   forks on request. The runner forks it before it reads the batch, so the batch is neither in the
              nursery's memory nor in that of its forks
    case      one fork of the nursery per case: receives only the input of its case, and runs the solution
    tests     if there is test code, a further fork per case that runs it, and never the solution; tests and
              solution communicate by a socket

All of them run under the same user id. Runner, nursery and tests are not dumpable, so the solution cannot
access their memory and descriptors. It can kill them, which fails its cases. The results carry a secret that
came with the batch, so no other process can forge them.

The only module of this package that is imported is `values`; its text precedes this text in the sandbox.
"""

import atexit
import bisect
import builtins
import collections
import contextlib
import copy
import ctypes
import datetime
import fcntl
import functools
import gc
import heapq
import io
import itertools
import json
import math
import operator
import os
import random
import re
import resource
import select
import signal
import socket
import statistics
import string
import struct
import sys
import threading
import time
import types
import typing
from typing import Any, NoReturn

from prorl_envs.envs.code.values import NotPlain, decode, encode

#: A solution with functions can use these modules and their names without an import, as in LiveCodeBench and
#: LeetCode. Later modules take precedence. They are imported here so that they cost a case nothing.
_COMMON = (
    *(string, re, datetime, collections, heapq, bisect, copy, math, random, statistics, itertools, functools),
    *(operator, io, sys, json, typing),
)
#: As LiveCodeBench's. Python's own limit is 1,000.
_RECURSION_LIMIT = 50_000

_PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 4, 36
_MESSAGE = 4096
#: Maximum bytes of one call or result between test code and solution.
_CALL_LIMIT = 16 * 2**20
_ERROR_BYTES = 2_000
#: Maximum bytes of a file that the solution writes, including its output.
_FILE_LIMIT = 64 * 2**20
_LENGTH = struct.Struct(">I")
#: Timeout of the nursery's answers in seconds, which a solution can delay; less if `total_s` is less.
_ANSWER_S = 30.0
#: Maximum wall time of a case: `time_s` times the factor, plus the seconds. High, for busy machines.
_PATIENCE, _PATIENCE_S = 4.0, 2.0


def main() -> None:
    """Run the batch of cases on stdin, and print their results as JSON. Only the runner returns: its forks
    (nursery, cases, tests) exit inside."""
    _prctl(_PR_SET_DUMPABLE, 0)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        ours.close()
        _perform(*_nursery(theirs))
    theirs.close()
    batch = json.load(sys.stdin.buffer)
    ours.settimeout(min(_ANSWER_S, batch["total_s"]))
    results = _run_all(batch, ours)
    ours.close()
    json.dump({"secret": batch["secret"], "results": results}, sys.stdout)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


# The runner.


def _run_all(batch: dict[str, Any], nursery: socket.socket) -> list[dict[str, Any]]:
    ends = time.monotonic() + batch["total_s"]
    results: list[dict[str, Any]] = []
    for case in batch["cases"]:
        if time.monotonic() >= ends:
            break
        try:
            result = _run_case({**batch, **case}, nursery, ends)
        except (OSError, ValueError) as error:  # for example, the solution killed the nursery
            results.append({"status": "lost", "error": str(error)[:200]})
            break
        results.append(result)
        if batch["stop_early"] and result["status"] != "ok":
            break
    return results


def _run_case(case: dict[str, Any], nursery: socket.socket, ends: float) -> dict[str, Any]:
    mode, files = case["mode"], [_file() for _ in range(3)]
    try:
        stdin, out, err = files
        wires = socket.socketpair() if mode == "script" else ()
        spec = {key: case[key] for key in ("mode", "source", "path", "entry", "time_s", "memory")}
        if mode == "program":
            _fill(stdin, case["input"].encode("utf-8", "replace"))
        if mode == "call":
            spec["args"], spec["kwargs"] = case["args"], case["kwargs"]
        # `out` receives a program's output or the result of a call; a function's printed text is discarded.
        fds = [stdin, out, err, *(wire.fileno() for wire in wires[:1])]
        pids = [_fork(nursery, spec, fds)]
        if wires:
            tests = {"mode": "tests", **{key: case[key] for key in ("code", "prelude", "names")}}
            pids.append(_fork(nursery, tests, [stdin, out, err, wires[1].fileno()]))
            for wire in wires:
                wire.close()
            return _judged(case, pids, nursery, out, ends)
        wall = _wait(pids[0], case, ends)
        usage = _reap(nursery, pids)[0]
        return _result(case, usage, wall, out, err)
    finally:
        for file in files:
            os.close(file)


def _fork(nursery: socket.socket, spec: dict[str, Any], fds: list[int]) -> int:
    file = _file()
    try:
        _fill(file, json.dumps(spec).encode())
        socket.send_fds(nursery, [b"fork"], [file, *fds])
    finally:
        os.close(file)
    return int(_received(nursery))


def _received(sock: socket.socket) -> bytes:
    message = sock.recv(_MESSAGE)
    if not message:
        raise OSError("the process that forks has ended")
    return message


def _wait(pid: int, case: dict[str, Any], ends: float) -> bool:
    """Wait for a process, and kill it at its deadline; return true if it was killed."""
    limit = min(case["time_s"] * _PATIENCE + _PATIENCE_S, max(0.0, ends - time.monotonic()))
    pidfd = os.pidfd_open(pid)  # the id is valid: the nursery reaps the process only on request
    try:
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        if poller.poll(math.ceil(limit * 1000)):
            return False
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        poller.poll()
        return True
    finally:
        os.close(pidfd)


def _reap(nursery: socket.socket, pids: list[int]) -> list[list[float]]:
    """Kill all processes of the case; return status, processor seconds and peak bytes of each of `pids`."""
    nursery.send(json.dumps(pids).encode())
    usages: list[list[float]] = json.loads(_received(nursery))
    return usages


def _result(case: dict[str, Any], usage: list[float], late: bool, out: int, err: int) -> dict[str, Any]:
    status, seconds, memory = int(usage[0]), usage[1], usage[2]
    size = os.fstat(out).st_size
    if late or seconds > case["time_s"] or -status == signal.SIGXCPU:
        verdict = "time"
    elif size > case["output"]:
        verdict = "output"
    else:
        verdict = "ok" if status == 0 else "error"
    result: dict[str, Any] = {"status": verdict, "exit": status, "seconds": seconds, "memory": memory}
    if verdict == "ok":
        result["output"] = os.pread(out, size, 0).decode("utf-8", "replace")
    else:
        errors = os.fstat(err).st_size
        tail = os.pread(err, _ERROR_BYTES, max(0, errors - _ERROR_BYTES))
        result["error"] = tail.decode("utf-8", "replace")
    return result


def _judged(
    case: dict[str, Any], pids: list[int], nursery: socket.socket, out: int, ends: float
) -> dict[str, Any]:
    """Return the outcome of test code.

    Args:
        pids: the processes of the solution and of the tests; only the tests write to `out`.
    """
    late = _wait(pids[1], case, ends)
    # The tests have finished, so the solution is killed at once.
    solution, _ = _reap(nursery, pids)
    seconds = solution[1]
    text = os.pread(out, _MESSAGE * 4, 0)
    if late or seconds > case["time_s"] or -int(solution[0]) == signal.SIGXCPU:
        return {"status": "time", "seconds": seconds, "memory": solution[2]}
    verdict = json.loads(text) if text else {"status": "error", "error": "the tests were ended"}
    return {**verdict, "seconds": seconds, "memory": solution[2]}


def _file() -> int:
    return os.memfd_create("case", os.MFD_CLOEXEC)


def _fill(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    os.lseek(fd, 0, os.SEEK_SET)


# The nursery.


def _nursery(sock: socket.socket) -> tuple[dict[str, Any], int]:
    """Fork on request. Returns only in a fork: its job, and its socket between tests and solution, or -1."""
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.close(null)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    gc.freeze()  # collections in forks skip the existing objects, which avoids copying their pages
    while True:
        message, fds, _, _ = socket.recv_fds(sock, _MESSAGE, 8)
        if not message:
            os._exit(0)
        if message == b"fork":
            pid = os.fork()
            if pid == 0:
                sock.close()
                return _job(fds)
            for fd in fds:
                os.close(fd)
            sock.send(str(pid).encode())
        else:
            sock.send(json.dumps(_end(json.loads(message))).encode())


def _end(pids: list[int]) -> list[list[float]]:
    """Kill all descendants, also orphans; return status, processor seconds, peak bytes of each of `pids`."""
    usages: dict[int, list[float]] = {}
    with contextlib.suppress(ChildProcessError):
        for _ in range(100_000):
            done, status, usage = os.wait4(-1, os.WNOHANG)
            if done:
                seconds = usage.ru_utime + usage.ru_stime
                usages[done] = [os.waitstatus_to_exitcode(status), seconds, usage.ru_maxrss * 1024]
                continue
            for pid in _children():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
    return [usages[pid] for pid in pids]


def _children() -> list[int]:
    me = os.getpid()
    with open(f"/proc/{me}/task/{me}/children") as file:  # noqa: PTH123 - a sandbox's own program
        return [int(pid) for pid in file.read().split()]


# A case.


def _job(fds: list[int]) -> tuple[dict[str, Any], int]:
    with open(fds[0], "rb") as file:  # noqa: PTH123
        job: dict[str, Any] = json.load(file)
    # First move all descriptors above the target numbers, so that none is overwritten.
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 100) for fd in fds[1:]]
    os.closerange(3, 100)
    for fd, target in zip(high, (0, 3, 2, 4), strict=False):
        os.dup2(fd, target)
        os.close(fd)
    return job, 4 if len(high) > 3 else -1


def _perform(job: dict[str, Any], wire: int) -> NoReturn:
    if job["mode"] == "tests":
        _tests(job, wire)
    _prctl(_PR_SET_DUMPABLE, 1)
    os.setsid()
    _limit(job)
    for number in (signal.SIGXFSZ, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    sys.argv = [job["path"]]
    if job["mode"] == "program":
        _program(job)
    if job["mode"] == "call":
        _call(job)
    os.close(3)  # the descriptor of the tests' verdict
    _serve(job, socket.socket(fileno=wire))


def _limit(job: dict[str, Any]) -> None:
    seconds = math.ceil(job["time_s"])
    for kind, soft, hard in (
        (resource.RLIMIT_CPU, seconds, seconds + 1),
        (resource.RLIMIT_AS, job["memory"], job["memory"]),
        (resource.RLIMIT_FSIZE, _FILE_LIMIT, _FILE_LIMIT),
        (resource.RLIMIT_CORE, 0, 0),
    ):
        resource.setrlimit(kind, (soft, hard))


def _streams() -> None:
    sys.stdin = open(0, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115


def _program(job: dict[str, Any]) -> NoReturn:
    """Run the program and exit like the interpreter: with its threads, exit functions and exit status."""
    os.dup2(3, 1)
    os.close(3)
    _streams()
    module = types.ModuleType("__main__")
    module.__file__ = job["path"]
    sys.modules["__main__"] = module
    status = 0
    try:
        exec(compile(job["source"], job["path"], "exec"), module.__dict__)
    except SystemExit as ended:
        status = _exit_status(ended.code)
    except BaseException:  # noqa: BLE001 - reported as the interpreter would
        sys.excepthook(*sys.exc_info())
        status = 1
    # The interpreter's exit, without the teardown of modules, which takes most of the time of a short case.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with contextlib.suppress(ValueError):  # closed
        sys.stdout.flush()
    os._exit(status)


def _exit_status(code: Any) -> int:
    if code is None or isinstance(code, int):
        return (code or 0) & 0xFF
    sys.stderr.write(f"{code}\n")
    return 1


def _load(job: dict[str, Any]) -> dict[str, Any]:
    """Load the solution and return its names. The code can use the names that such solutions expect."""
    _streams()
    sys.setrecursionlimit(_RECURSION_LIMIT)
    module = types.ModuleType("solution")
    module.__file__ = job["path"]
    sys.modules["solution"] = module
    # Among the builtins, so that none of them passes for a function that the solution defines.
    module.__dict__["__builtins__"] = _builtins()
    exec(compile(job["source"], job["path"], "exec"), module.__dict__)
    return module.__dict__


def _builtins() -> dict[str, Any]:
    """Return the builtins, the public names of common modules, and the modules."""
    found: dict[str, Any] = {}
    for module in _COMMON:
        public = getattr(module, "__all__", None) or [name for name in vars(module) if name[0] != "_"]
        found |= {name: getattr(module, name) for name in public}
    return found | vars(builtins) | {module.__name__: module for module in _COMMON}


def _find(names: dict[str, Any], entry: str) -> Any:
    if callable(found := names.get(entry)):
        return found
    if isinstance(kind := names.get("Solution"), type) and hasattr(kind, entry):
        return getattr(kind(), entry)
    raise NameError(f"the solution defines no {entry}")


def _call(job: dict[str, Any]) -> NoReturn:
    function = _find(_load(job), job["entry"])
    result = function(*decode(job["args"]), **decode(job["kwargs"]))
    data = memoryview(json.dumps(encode(result)).encode())
    while data:
        data = data[os.write(3, data) :]
    os._exit(0)


def _serve(job: dict[str, Any], sock: socket.socket) -> NoReturn:
    """Answer calls of the tests until they exit."""
    names = _load(job)
    while True:
        request = json.loads(_receive(sock))
        try:
            result = _find(names, request["name"])(*decode(request["args"]), **decode(request["kwargs"]))
            answer = {"value": encode(result)}
        except BaseException as error:  # noqa: BLE001 - the tests may expect it
            answer = {"error": type(error).__name__, "text": str(error)[:500]}
        _send(sock, json.dumps(answer).encode())


def _send(sock: socket.socket, data: bytes) -> None:
    sock.sendall(_LENGTH.pack(len(data)) + data)


def _receive(sock: socket.socket) -> bytes:
    (size,) = _LENGTH.unpack(_exactly(sock, _LENGTH.size))
    if size > _CALL_LIMIT:
        raise OSError("a value is too large")
    return _exactly(sock, size)


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        if not (part := sock.recv(min(size - len(data), 2**20))):
            raise EOFError("the other side has ended")
        data += part
    return bytes(data)


# Test code, in a process in which the solution never runs.


def _tests(job: dict[str, Any], wire: int) -> NoReturn:
    sock = socket.socket(fileno=wire)
    names: dict[str, Any] = {"__name__": "tests"}
    functions = {name: _remote(sock, name) for name in job["names"]}
    verdict: dict[str, Any] = {"status": "ok"}
    try:
        exec(compile(job["prelude"], "<prelude>", "exec"), names)
        names.update(functions)
        exec(compile(job["code"], "<tests>", "exec"), names)
        if callable(check := names.get("check")):
            check(functions[job["names"][0]])
    except NotPlain as error:
        verdict = {"status": "unfit", "error": str(error)[:500]}
    except BaseException as error:  # noqa: BLE001 - any exception means that the tests failed
        verdict = {"status": "error", "error": f"{type(error).__name__}: {error}"[:500]}
    _fill(3, json.dumps(verdict).encode())
    os._exit(0)


def _remote(sock: socket.socket, name: str) -> Any:
    def function(*args: Any, **kwargs: Any) -> Any:
        # NotPlain is not caught: the tests, not the solution, pass an unsupported value.
        call = {"name": name, "args": encode(list(args)), "kwargs": encode(kwargs)}
        _send(sock, json.dumps(call).encode())
        answer = json.loads(_receive(sock))
        if "error" in answer:
            kind = getattr(builtins, str(answer["error"]), None)
            if isinstance(kind, type) and issubclass(kind, Exception) and kind is not UnicodeDecodeError:
                raise kind(str(answer.get("text", "")))
            raise RuntimeError(f"{answer['error']}: {answer.get('text', '')}")
        return decode(answer["value"])

    function.__name__ = name
    return function


if __name__ == "__main__":
    main()
