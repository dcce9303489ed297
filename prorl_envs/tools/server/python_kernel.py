"""Process of the Python session: IPython, used through its Python API, one cell after the other.

Forked by the tool server (`python_session.py`); the template has already called `prepare`. Output goes to
descriptors 1 and 2 as in any program; descriptor 3 receives the cells and returns their results. The cells'
code runs in this process, so the server trusts none of its messages.
"""

import builtins
import contextlib
import getpass
import importlib.util
import json
import multiprocessing.process
import os
import re
import signal
import socket
import subprocess
import sys
import traceback
import warnings
from collections.abc import Iterator
from io import BufferedWriter, FileIO, TextIOWrapper
from types import TracebackType
from typing import Any

from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher
from IPython.core.inputtransformer2 import TransformerManager
from IPython.core.interactiveshell import InteractiveShell
from traitlets import Type
from traitlets.config import Config

from prorl_envs.tools.protocol.messages import ERROR_NAME_LIMIT, CellDone, Framer, Python, decode_cell, encode
from prorl_envs.tools.protocol.output import DisplayBuffer
from prorl_envs.tools.server.cell_streams import CellStreams, copy_descriptors
from prorl_envs.tools.server.interrupts import interrupt_kept, run_coroutine

CONTROL_FD = 3
#: Imported before every session, if installed. Cells must still import them to use their names.
LIBRARIES = ("numpy", "pandas", "scipy.optimize", "scipy.stats", "sympy")
#: Types whose only representation is text, unless a formatter is registered for them.
_PLAIN = frozenset(
    {type(None), bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset, range}
)
#: Characters that can start IPython's own syntax.
_MAGIC = re.compile(r"[%!?]|^\s*[,;/]")
#: Prefix of the paths of this package's files.
_OWN_FILES = os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(__file__))), "")  # noqa: PTH118, PTH120


class _Hook(DisplayHook):
    """Display hook that shows the value of a last expression without a numbered prompt."""

    def __call__(self, result: Any = None) -> None:
        with _shell(self).streams.shown():
            super().__call__(result)  # type: ignore[no-untyped-call]

    def compute_format_data(self, result: Any) -> Any:
        # Calling every formatter takes a quarter of a short cell's time.
        shell: Any = self.shell
        formatter = shell.display_formatter
        if type(result) in _PLAIN and not _is_registered(type(result), formatter.formatters):
            return {"text/plain": formatter.formatters["text/plain"](result)}, {}
        return super().compute_format_data(result)  # type: ignore[no-untyped-call]

    def quiet(self) -> bool:
        # The superclass tokenizes the cell to check for a final semicolon.
        shell: Any = self.shell
        cells = shell.history_manager.input_hist_parsed
        return ";" in cells[-1] and bool(super().quiet())  # type: ignore[no-untyped-call]

    def write_output_prompt(self) -> None:
        pass

    def write_format_data(self, format_dict: dict[str, Any], md_dict: dict[str, Any] | None = None) -> None:
        _shell(self).show(format_dict)

    def cull_cache(self) -> None:
        with warnings.catch_warnings(action="ignore"):  # the model would see the warning
            super().cull_cache()  # type: ignore[no-untyped-call]

    def log_output(self, format_dict: dict[str, Any]) -> None:
        pass  # IPython would keep every output


def _is_registered(kind: type, formatters: dict[str, Any]) -> bool:
    """Return True if a formatter other than the text formatter is registered for a built-in type."""
    names = {(each.__module__, each.__name__) for each in kind.__mro__}
    for mime, formatter in formatters.items():
        if mime != "text/plain":
            deferred = formatter.deferred_printers
            if not formatter.type_printers.keys().isdisjoint(kind.__mro__):
                return True
            if deferred and not deferred.keys().isdisjoint(names):
                return True
    return False


class _Publisher(DisplayPublisher):
    """Display publisher used by `display()`."""

    def publish(self, data: Any, metadata: Any = None, source: Any = None, **_: Any) -> None:
        shell = _shell(self)
        with shell.streams.shown():
            shell.show(data)

    def clear_output(self, wait: bool = False) -> None:
        pass


def _shell(part: DisplayHook | DisplayPublisher) -> "CellShell":
    assert isinstance(part.shell, CellShell)
    return part.shell


class Transformers(TransformerManager):
    """Transformer that tokenizes only cells that may have magics. It saves a tenth of a short cell's time."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._usual = tuple(self.token_transformers)

    def do_token_transforms(self, lines: list[str]) -> Any:
        if tuple(self.token_transformers) == self._usual and not any(map(_MAGIC.search, lines)):
            return lines
        return super().do_token_transforms(lines)  # type: ignore[no-untyped-call]


class CellShell(InteractiveShell):
    """IPython without a terminal, without files, history, colours or questions to the user."""

    displayhook_class = Type(_Hook)
    display_pub_class = Type(_Publisher)

    def __init__(self) -> None:
        self.displays = DisplayBuffer()
        self.streams = CellStreams(_text_stream, {}, {}, shown=())
        self.exiting = False
        super().__init__(  # type: ignore[no-untyped-call]
            config=Config(HistoryManager={"enabled": False, "hist_file": ":memory:"}),
            colors="nocolor",
            input_transformer_manager=Transformers(),
        )
        self.loop_runner = run_coroutine

    def show(self, bundle: dict[str, Any]) -> None:
        """Print the text of a representation; keep the rest."""
        if "text/plain" in bundle:
            sys.stdout.write(f"{bundle['text/plain']}\n")
        rich = {
            mime: value if isinstance(value, str) else json.dumps(value, default=repr)
            for mime, value in bundle.items()
            if mime != "text/plain"
        }
        if rich and not self.displays.add(rich):
            size = sum(map(len, rich.values()))
            sys.stdout.write(f"[display data of {size} characters left out: {', '.join(rich)}]\n")

    def init_ipython_dir(self, ipython_dir: str | None) -> None:
        self.ipython_dir = ""

    def init_profile_dir(self, profile_dir: object) -> None:
        pass  # the default would be created on disk

    def init_virtualenv(self) -> None:
        pass

    @contextlib.contextmanager
    def _tee(self, channel: str) -> Iterator[None]:
        yield  # IPython would keep all printed text

    def _format_exception_for_storage(self, exception: BaseException, *_: Any, **__: Any) -> dict[str, Any]:
        return {}  # unused, and as expensive as showing the exception

    def _get_exc_info(self, exc_tuple: Any = None) -> Any:
        kind, value, _ = super()._get_exc_info(exc_tuple)  # type: ignore[no-untyped-call]
        _leave_out_own_frames(value)
        return kind, value, value.__traceback__

    def showtraceback(self, *args: Any, **options: Any) -> None:
        with self.streams.shown():
            super().showtraceback(*args, **options)

    def showsyntaxerror(self, *args: Any, **options: Any) -> None:
        with self.streams.shown():
            super().showsyntaxerror(*args, **options)  # type: ignore[no-untyped-call]

    def should_run_async(self, raw_cell: str, *, transformed_cell: str | None = None, **more: Any) -> bool:
        # The superclass compiles the cell to find out.
        if (
            transformed_cell is not None
            and "await" not in transformed_cell
            and "async" not in transformed_cell
        ):
            return False
        found: bool = super().should_run_async(raw_cell, transformed_cell=transformed_cell, **more)
        return found

    def init_user_ns(self) -> None:
        super().init_user_ns()  # type: ignore[no-untyped-call]
        # `multiprocessing` reads this attribute of the main module to start processes (spawn, forkserver).
        self.user_ns.setdefault("__spec__", None)
        self.user_ns_hidden.setdefault("__spec__", None)

    def system(self, cmd: str) -> None:
        """Run a `!` command. IPython's own method uses a terminal, takes 0.1 s, alters line ends, and
        continues the cell after an interrupt."""
        with self.streams.shown():  # flushes the output so far
            pass
        command = self.var_expand(cmd, depth=1)  # type: ignore[no-untyped-call]
        status = subprocess.call(command, shell=True, executable=os.environ.get("SHELL"))
        self.user_ns["_exit_code"] = 128 - status if status > 128 else status
        if self.system_raise_on_error and status != 0:
            raise subprocess.CalledProcessError(status, command)

    def getoutput(self, cmd: str, split: bool = True, depth: int = 0) -> Any:
        """Run a command for its output: `names = !ls`."""
        with interrupt_kept():
            return super().getoutput(cmd, split, depth + 1)  # type: ignore[no-untyped-call]

    def run_line_magic(self, magic_name: str, line: str, _stack_depth: int = 1) -> Any:
        with interrupt_kept():
            return super().run_line_magic(magic_name, line, _stack_depth + 1)

    def run_cell_magic(self, magic_name: str, line: str, cell: str) -> Any:
        with interrupt_kept():
            return super().run_cell_magic(magic_name, line, cell)  # type: ignore[no-untyped-call]

    def ask_exit(self) -> None:
        """Handle `exit` and `quit`."""
        self.exiting = True


def _leave_out_own_frames(error: BaseException) -> None:
    """Remove the frames of this package from tracebacks, because the paths of its files are the host's."""
    waiting, seen = [error], set[int]()
    while waiting:
        current = waiting.pop()
        if id(current) not in seen:
            seen.add(id(current))
            current.__traceback__ = _without_own_frames(current.__traceback__)
            waiting += filter(None, (current.__cause__, current.__context__))


def _without_own_frames(trace: TracebackType | None) -> TracebackType | None:
    """Remove the frames of this package from a traceback in place; return the first remaining frame."""
    first = TracebackType(trace, sys._getframe(), 0, 1)
    last = first
    while last.tb_next is not None:
        if last.tb_next.tb_frame.f_code.co_filename.startswith(_OWN_FILES):
            last.tb_next = last.tb_next.tb_next
        else:
            last = last.tb_next
    return first.tb_next


def prepare(*, libraries: bool = True) -> Any:
    """Create the shell, once per process. A template calls this before it forks.

    Args:
        libraries: import the libraries that most sessions use.

    Returns:
        the process's `CellShell`; IPython is untyped.
    """
    warm = CellShell.initialized()
    shell: Any = CellShell.instance()
    if not warm:
        if libraries:
            _import_libraries()
        # Run now, because a first cell and a first traceback import another megabyte of modules.
        sys.stdout, stdout = open(os.devnull, "w"), sys.stdout  # noqa: PTH123, SIM115
        try:
            shell.run_cell("1 + 1")
            shell.run_cell("1 / 0")
        finally:
            sys.stdout.close()
            sys.stdout = stdout
        shell.reset()
    return shell


def prepare_alone() -> Any:
    """Create the shell without the libraries; the first cell that needs a library imports it."""
    return prepare(libraries=False)


def _import_libraries() -> None:
    """Import the libraries that nearly every session uses, to save each session seconds of processor time."""
    # A forked process has no threads, so none may start before the fork. OpenBLAS would start some.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    for name in LIBRARIES:
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            importlib.import_module(name)


def main() -> None:
    """Run cells until the control socket closes. Main function of the forked process."""
    shell = prepare()
    copies = copy_descriptors()
    own = {"stdout": _text_stream("stdout", copies[1]), "stderr": _text_stream("stderr", copies[2])}
    shell.streams = CellStreams(_text_stream, own, copies, shown=(1, 2))
    sys.stdin = sys.stdout = sys.stderr = None  # those of the template
    shell.streams.settle()
    builtins.input = getpass.getpass = shell.streams.ask
    os.system = _run_system  # type: ignore[assignment]  # typeshed also allows paths of bytes
    # These values name the program of the template, and directories of the host.
    sys.argv[:] = [""]
    sys.orig_argv[:] = ["python3"]
    multiprocessing.process.ORIGINAL_DIR = None  # type: ignore[attr-defined]
    warnings.filterwarnings("ignore", message="To exit: use 'exit'", module="IPython")
    # The session's own directory first; then only directories that exist in this sandbox.
    sys.path[:] = ["", *filter(os.path.exists, sys.path)]
    control = socket.socket(fileno=CONTROL_FD)
    framer = Framer()
    while data := control.recv(65536):
        for frame in framer.feed(data):
            pid = os.getpid()  # for each cell, because a restored session has another one
            reply = _run(shell, decode_cell(frame))
            shell.streams.settle()
            if os.getpid() != pid:  # the cell forked, and this is the child
                os._exit(0)
            if shell.exiting:  # the exit of this process is the answer
                control.detach()  # if it were closed before the exit, the server would kill this process
                return
            control.sendall(encode(reply))


class _Buffer(BufferedWriter):
    """Buffer that stays open: a text stream that a cell wraps around it closes it when it is collected."""

    def close(self) -> None:
        self.flush()


def _text_stream(name: str, fd: int | None = None) -> TextIOWrapper:
    fd = ("stdin", "stdout", "stderr").index(name) if fd is None else fd
    raw = open(fd, "rb", closefd=False) if name == "stdin" else _Buffer(FileIO(fd, "w", closefd=False))  # noqa: SIM115
    # Buffered by line, so that stdout and stderr keep their order.
    return TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", line_buffering=True)


def _run(shell: Any, cell: Python) -> CellDone:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        result = shell.run_cell(cell.code, store_history=True)
        error = result.error_before_exec or result.error_in_exec
    except KeyboardInterrupt as interrupt:  # raised outside IPython's own handlers
        error = interrupt
    except BaseException as raised:  # noqa: BLE001 - the cell has broken the shell
        error = raised
        _leave_out_own_frames(error)
        with shell.streams.shown():
            traceback.print_exception(error)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    name = type(error).__name__[:ERROR_NAME_LIMIT] if error is not None else ""
    return CellDone(cell.id, name, shell.displays.take())


def _run_system(command: str | bytes | os.PathLike[str]) -> int:
    """Run a command like `os.system`, but without ignoring interrupts meanwhile: otherwise a loop of commands
    could only be killed. Return the wait status."""
    status = subprocess.call(command, shell=True, close_fds=False)
    return -status if status < 0 else status << 8
