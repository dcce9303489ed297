"""The template process: imports the modules that tool servers need, then forks a child per request.

Started by `process.py` with the control socket as descriptor 0, an empty environment and nothing else open.
It is single-threaded and never acts on input from a sandbox; only its forks do.

    host -> template    once, the setup (modules to import); then one message per fork, with descriptors.
                        Tool server: the sandbox's first process, the tool server's socket, the memory of a
                        Python session that was saved if there is one, the status socket.
                        Default route or new socket: the network namespace, the status socket.
                        Program (spawned, not forked): the descriptor for its standard streams, those
                        that become its descriptors 3, 4, and so on, the status socket.
                        Size of a tree: its directory, the sandbox's first process if it has one, the status
                        socket.
                        Checkpoint, or memory of a Python session: see `checkpoint.py`.
                        While there is a spare (a child forked in advance), only the spare reads the
                        requests. It handles the next request and is an ordinary child from then on.
    template -> host    on the control socket, `ready` with its pid, or the error; for each fork, on its
                        status socket, the child's pid with its pidfd (a spare sends them itself).
                        The first process of a sandbox (see `sandbox_init.py`) adds to `ready` its namespaces,
                        and descriptors of itself and of its root directory. Its forks join no
                        namespaces, and ignore their descriptors.
    child -> host       on the status socket: `ready` once it has joined, with the new socket if one was
                        requested; or the error. Then the socket closes. If the entry fails later, the child
                        writes the traceback to the template's standard error.
"""

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import PathFinder
from typing import Any, NoReturn

from prorl_envs.sandbox.filesystem.disk_usage import measure
from prorl_envs.sandbox.linux.children import kill_children
from prorl_envs.sandbox.linux.descriptors import close_all_but, note_library_descriptors, receive_descriptors
from prorl_envs.sandbox.linux.kernel_settings import PROCESS_LIMITS, enter_and_limit
from prorl_envs.sandbox.linux.seccomp import install_filter, own_program
from prorl_envs.sandbox.linux.syscall_wrappers import (
    PR_SET_CHILD_SUBREAPER,
    PR_SET_NO_NEW_PRIVS,
    capabilities,
    prctl,
)
from prorl_envs.sandbox.template.enter import (
    die_with_parent,
    drop_privileges,
    enter_cgroups,
    join,
    lead_session,
    restore_signals,
    yield_processors,
)
from prorl_envs.sandbox.template.immortal_objects import make_immortal
from prorl_envs.sandbox.template.route import add_default_route, socket_inside
from prorl_envs.sandbox.template.sandbox_init import become_init, is_inside, kill_all_but, set_init_socket
from prorl_envs.sandbox.template.spawn import spawn

MESSAGE_LIMIT = 160 * 1024
REPORT_LIMIT = 16 * 1024
#: Milliseconds without a request after which the next spare is forked, so that the fork delays no request.
_SPARE_MS = 8
#: Maximum number of descriptors in a request.
_DESCRIPTORS = 4

type Entry = Callable[..., None]


def main(control_fd: int) -> None:
    """Serve fork requests until the control socket closes. Never returns in a child.

    Args:
        control_fd: the control socket, a copy of descriptor 0.
    """
    control = socket.socket(fileno=control_fd)
    errors = os.dup(2)
    _replace_with_null(0)
    restore_signals()
    # Adopts a tool server's orphans: an unreaped zombie would keep its pid namespace alive.
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    setup = control.recv(MESSAGE_LIMIT)
    if not setup:  # end of file: the host has exited
        return
    try:
        prepared = _prepare(json.loads(setup), errors)
    except (ImportError, AttributeError, OSError) as error:
        _send(control, error="".join(traceback.format_exception(error)))
        return
    gc.collect()
    if not prepared.inside:  # a first process forks only once or twice, and its sandbox waits for it
        make_immortal()
    gc.freeze()
    socket.send_fds(control, [json.dumps({"ready": True, **prepared.found}).encode()], prepared.descriptors)
    if prepared.inside:
        _close_all_but([control.fileno(), errors])
    _serve(control, prepared)


@dataclass(slots=True)
class _Prepared:
    """State of a template that is ready.

    Args:
        entries: functions that its forks may run.
        inside: whether it is the first process of a sandbox.
        spares: whether to keep a child forked in advance.
        found, descriptors: data and descriptors to send to the host.
        errors: copy of standard error, for forks: their own is /dev/null.
    """

    entries: dict[str, Entry]
    inside: bool
    spares: bool
    found: dict[str, object]
    descriptors: list[int]
    errors: int


def _prepare(setup: dict[str, Any], errors: int) -> _Prepared:
    own_program()
    capabilities()
    for name in setup["preload"]:
        module, _, function = name.partition(":")
        loaded = importlib.import_module(module)
        if function:
            getattr(loaded, function)()
    entries = {name: _load(name) for name in setup["entries"]}
    note_library_descriptors()
    # After the imports, because the first sandbox waits for them.
    yield_processors(setup["nice"])
    found: dict[str, object] = {"pid": os.getpid()}
    descriptors: list[int] = []
    inside = setup.get("inside")
    if inside is not None:
        # The cells of a Python session must not import from the package's folder.
        sys.path[:] = [path for path in sys.path if path != inside["code"]]
        found, descriptors = become_init(route=inside["route"], settings=inside["settings"])
    if setup["filtered"]:  # once here: the kernel compiles the filter for each process that installs it
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        install_filter()
    return _Prepared(entries, inside is not None, setup["spares"], found, descriptors, errors)


def _load(name: str) -> Entry:
    module, _, function = name.partition(":")
    entry: Entry = getattr(importlib.import_module(module), function)
    return entry


def _serve(control: socket.socket, prepared: _Prepared) -> None:
    wakeup, signalled = socket.socketpair()
    wakeup.setblocking(False)
    signalled.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(signalled.fileno(), warn_on_full_buffer=False)
    children: set[int] = set()
    #: Sockets from the first process to its tool servers.
    servers: dict[int, socket.socket] = {}
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(wakeup, select.POLLIN)
    #: Socket that closes when the spare receives a request, or dies.
    spare: socket.socket | None = None
    wanted = prepared.spares
    while True:
        ready = {fd for fd, _ in poll.poll(_SPARE_MS if wanted else None)}
        if not ready:
            wanted = False
            spare = _fork_spare(prepared, control, children)
            if spare is not None:
                poll.unregister(control)
                poll.register(spare, select.POLLIN)
        if spare is not None and spare.fileno() in ready:
            poll.unregister(spare)
            spare.close()
            spare, wanted = None, True
            poll.register(control, select.POLLIN)
        if wakeup.fileno() in ready:
            wakeup.recv(4096)
            _reap(children)
        if control.fileno() in ready:
            message, fds = receive_descriptors(control, MESSAGE_LIMIT, _DESCRIPTORS)
            if not message:
                break
            request = json.loads(message)
            if "command" in request:
                _spawn(request["command"], fds)
                continue
            try:
                ours, theirs = _init_socket_pair(prepared, request)
            except OSError as error:  # the machine has no more open files
                _refuse(fds, error)
                continue
            pid = _fork(request, fds, prepared, theirs)
            if pid is not None:
                children.add(pid)
            if ours is not None:
                servers[ours.fileno()] = ours
                poll.register(ours, select.POLLIN)
        for fd in ready & servers.keys():
            if servers[fd].recv(16):
                _reap(children)
                ended = kill_all_but(children)
                with contextlib.suppress(OSError):  # it has exited
                    servers[fd].send(b"ended" if ended else b"some live")
            else:
                poll.unregister(fd)
                servers.pop(fd).close()
    signal.set_wakeup_fd(-1)  # the socket closes when this function returns
    if prepared.entries:
        # Without a pid namespace, the orphans of its tool servers are children of this process too.
        kill_children()
    else:
        for pid in children:  # spawned programs are not among them, and survive
            os.kill(pid, signal.SIGKILL)  # not reaped yet, so the pid cannot be another process's


def _init_socket_pair(
    prepared: _Prepared, request: dict[str, Any]
) -> tuple[socket.socket, socket.socket] | tuple[None, None]:
    if not prepared.inside or "entry" not in request:
        return None, None
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _reap(children: set[int]) -> None:
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        children.discard(pid)


def _fork(
    request: dict[str, Any], fds: list[int], prepared: _Prepared, init_socket: socket.socket | None
) -> int | None:
    """Fork a child for a request. `init_socket` is the child's socket to this process, if it needs one."""
    parent = os.getpid()
    try:
        pid = os.fork()
    except OSError as error:
        # A sandbox may have used up the user's processes. This process must continue: its exit would stop the
        # tool servers of all sandboxes.
        if init_socket is not None:
            init_socket.close()
        _refuse(fds, error)
        return None
    if pid == 0:
        _run_child(request, fds, prepared, parent, init_socket)
    if init_socket is not None:
        init_socket.close()
    return _report_child(pid, fds)


def _spawn(command: list[str], fds: list[int]) -> None:
    """Start a program. It is not killed with this process: the child of a bubblewrap that is killed at the
    wrong moment would wait forever."""
    try:
        pid = spawn(command, fds[:-1])
    except OSError as error:
        _refuse(fds, error)
    else:
        _report_child(pid, fds, ready=True)


def _report_child(pid: int, fds: list[int], **fields: object) -> int:
    """Send the host the pidfd of a child. Kill the child if that fails."""
    *others, status_fd = fds
    with socket.socket(fileno=status_fd) as status:
        try:
            _send_pid(status, pid, **fields)
        except OSError as error:
            # A sandbox may have used up the user's descriptors in flight, or the machine's open files. This
            # process must continue: its exit would stop the tool servers of all sandboxes.
            os.kill(pid, signal.SIGKILL)
            _send_error(status, error)
    for fd in others:
        os.close(fd)
    return pid


def _send_pid(status: socket.socket, pid: int, **fields: object) -> None:
    pidfd = os.pidfd_open(pid)
    try:
        # If the host no longer waits for the child, the child finds its status socket closed and exits.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(status, [json.dumps({"pid": pid, **fields}).encode()], [pidfd])
    finally:
        os.close(pidfd)


def _fork_spare(prepared: _Prepared, control: socket.socket, children: set[int]) -> socket.socket | None:
    """Fork a child in advance. It receives the next request itself, so that the request waits for no fork.

    Returns:
        A socket that closes when the child has received a request, or died; None if the fork failed.
    """
    parent = os.getpid()
    try:
        parent_end, child_end = socket.socketpair()
    except OSError:  # the next request reports it
        return None
    try:
        pid = os.fork()
    except OSError:  # the next request reports it
        parent_end.close()
        return None
    finally:
        if os.getpid() == parent:
            child_end.close()
    if pid == 0:
        _run_spare(control.fileno(), child_end.fileno(), prepared, parent)
    children.add(pid)
    return parent_end


def _run_spare(control: int, child_end: int, prepared: _Prepared, parent: int) -> NoReturn:
    try:
        _close_all_but([control, child_end, prepared.errors])
        _reset_signals()
        lead_session()  # can take milliseconds on a busy machine
        die_with_parent(parent)
        with socket.socket(fileno=control) as requests:
            message, fds = receive_descriptors(requests, MESSAGE_LIMIT, _DESCRIPTORS)
            os.close(child_end)
        if message:
            _run_child(json.loads(message), fds, prepared, parent, None, spare=True)
    finally:
        os._exit(0)  # the host has exited


def _refuse(fds: list[int], error: OSError) -> None:
    *others, status_fd = fds
    with socket.socket(fileno=status_fd) as status:
        _send_error(status, error)
    for fd in others:
        os.close(fd)


def _run_child(
    request: dict[str, Any],
    fds: list[int],
    prepared: _Prepared,
    parent: int,
    init_socket: socket.socket | None,
    *,
    spare: bool = False,
) -> NoReturn:
    """Run a child until its exit. Never returns, so that the child does not run the template's code."""
    code = 1
    status: socket.socket | None = None
    try:
        status = socket.socket(fileno=fds[-1])
        if spare:  # `_run_spare` has done the other steps
            _send_pid(status, os.getpid())
        else:
            _close_all_but([*fds, prepared.errors, *(() if init_socket is None else (init_socket.fileno(),))])
            _reset_signals()
        if "route" in request:
            add_default_route(fds[0])
            _send(status, ready=True)
        elif "socket" in request:
            netns, netlink = None if prepared.inside else fds[0], request["socket"] == "netlink"
            with socket_inside(netns, netlink=netlink) as sock:
                socket.send_fds(status, [b'{"ready": true}'], [sock.fileno()])
        elif "measure" in request:
            root, *pidfd, _ = fds
            use = measure(root, pidfd[0] if pidfd else None, **request["measure"])
            _send(status, ready=True, size=use.size, files=use.files, too_deep=use.too_deep)
        elif "talk" in request:
            first, talk, *memory, _ = fds
            _send(status, ready=True)
            perform = _load(request["talk"])
            perform(first, memory[0] if memory else None, request["request"], socket.socket(fileno=talk))
        else:
            if init_socket is not None:
                set_init_socket(init_socket)
            _serve_tools(request, fds, prepared.entries[request["entry"]], parent, status)
        code = 0
    finally:
        try:
            error = sys.exception()
            if error is not None and status is not None and status.fileno() >= 0:
                _send_error(status, error)
            elif error is not None and status is not None:
                text = f"tool server of sandbox {request['sandbox']} failed: {_traceback(error)}"
                os.write(prepared.errors, text.encode())
        finally:
            os._exit(code)


def _serve_tools(
    request: dict[str, Any], fds: list[int], entry: Entry, parent: int, status: socket.socket
) -> None:
    namespaces, tool_fd, *memory, _ = fds
    enter_cgroups(request["groups"])
    if request["settings"]:
        enter_and_limit(namespaces, request["settings"], host_network=request["host_network"])
    if request["isolated"]:
        join(namespaces, host_network=request["host_network"])
    os.close(namespaces)
    drop_privileges(
        workdir=request["workdir"],
        env=request["env"],
        parent=parent,
        isolated=request["isolated"],
        emulate_root=request["emulate_root"],
        rlimits=[*request["rlimits"], *PROCESS_LIMITS],
    )
    if request["isolated"] or is_inside():
        # Later imports would load files of the sandbox, and run them outside its pid namespace.
        sys.meta_path.remove(PathFinder)
    _send(status, ready=True)
    status.close()  # the host keeps no descriptor of it either
    entry(socket.socket(fileno=tool_fd), *memory)


def _close_all_but(keep: list[int]) -> None:
    """Close every descriptor but `keep`, and point 0-2 at /dev/null."""
    close_all_but(keep)
    for fd in range(3):
        _replace_with_null(fd)


def _replace_with_null(fd: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, fd, inheritable=True)
    if null != fd:
        os.close(null)


def _reset_signals() -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _send(sock: socket.socket, **message: object) -> None:
    sock.send(json.dumps(message).encode())


def _send_error(report: socket.socket, error: BaseException) -> None:
    report.setblocking(False)
    # If the host has exited, or does not read, it detects the exit by itself.
    with contextlib.suppress(OSError):
        number = error.errno if isinstance(error, OSError) else None
        _send(
            report, error=_traceback(error), summary=f"{type(error).__name__}: {error}"[:1000], errno=number
        )


def _traceback(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))[-REPORT_LIMIT:]
