"""Setup code that a Jupyter kernel runs before its first cell, so that cells behave as in the forked engine.

The code runs in the image's interpreter, which may be old. It improves the behaviour of honest cells only; a
hostile cell can undo it, but the host's limits still hold.
"""

import inspect

from prorl_envs.tools.server import cell_streams, interrupts

#: Runs `!command` without a terminal, which would take 0.1 s and alter line ends. Limits the size of
#: messages: otherwise one print of 20 MB would be one message, which is too large for the host.
SETUP = """
def _setup(*sources):
    import codecs, io, logging, os, select, subprocess, sys, threading
    names = {}
    for source in sources:
        exec(source, names)
    interrupt_kept, no_running_loop = names["interrupt_kept"], names["no_running_loop"]
    shell = get_ipython()
    limit = 1 << 20

    def clip(text):
        left_out = len(text) - 2 * limit
        if left_out <= 0:
            return text
        return "%s\\n[... %d characters left out ...]\\n%s" % (text[:limit], left_out, text[-limit:])

    # A separate object, because the shell restores the methods of the original stream.
    # It also reads what programs write to the descriptor: the kernel's own thread shows it at any moment, so
    # that it would often be in the output of the next cell.
    class Bounded(object):
        def __init__(self, stream, fd):
            self._stream = stream
            self._waiting = 0
            self._written, pipe = os.pipe()
            os.set_blocking(self._written, False)
            os.dup2(pipe, fd)
            os.close(pipe)
            self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
            self._reading, self._pid = threading.Lock(), os.getpid()
            stream._should_watch = False  # else `close` waits for the kernel's own thread
            threading.Thread(target=self._follow, daemon=True).start()

        def __getattr__(self, name):
            return getattr(self._stream, name)

        def _follow(self):
            while True:
                select.select([self._written], [], [])
                self._read()

        def _read(self):
            if os.getpid() != self._pid:  # in a fork, the lock may be held forever
                return
            with self._reading:
                try:
                    self._put(self._decode(os.read(self._written, 65536)))
                except OSError:  # there is nothing, or a cell has closed it
                    pass

        def write(self, text):
            self._read()
            return self._put(text)

        def _put(self, text):
            written = self._stream.write(clip(text) if isinstance(text, str) else text)
            self._waiting += len(text)
            if self._waiting > limit:
                self._waiting = 0
                self._stream.flush()
            return written

        def close(self):
            self._stream.flush()

        def writelines(self, lines):
            for line in lines:
                self.write(line)

    def format_bounded(*args, **kwargs):
        data, metadata = format_any(*args, **kwargs)
        for mime, value in list(data.items()):
            if isinstance(value, str) and len(value) > 2 * limit:
                if mime == "text/plain":
                    data[mime] = clip(value)
                else:
                    del data[mime]
                    note = "[display data of %d characters left out: %s]" % (len(value), mime)
                    data["text/plain"] = "%s\\n%s" % (data.get("text/plain", ""), note)
        return data, metadata

    def run(command):
        process = subprocess.Popen(
            command, shell=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        try:
            with io.TextIOWrapper(process.stdout, "utf-8", "replace", newline="") as output:
                for line in output:
                    sys.stdout.write(line)
        except KeyboardInterrupt:
            stop(process)
            raise
        finally:
            status = process.wait()
        return status

    def system(cmd):
        shell.user_ns["_exit_code"] = run(shell.var_expand(cmd, depth=1))

    def os_system(command):
        status = run(command)
        return -status if status < 0 else status << 8

    def stop(process):
        # The interrupt has reached this process too, because it is in the kernel's process group.
        try:
            process.wait(0.25)
        except subprocess.TimeoutExpired:
            process.kill()

    getoutput_any = shell.getoutput

    def getoutput(cmd, split=True, depth=0):
        with interrupt_kept():
            return getoutput_any(cmd, split, depth + 1)

    run_cell_any = shell.run_cell

    def run_cell(*args, **kwargs):
        try:
            with no_running_loop():
                return run_cell_any(*args, **kwargs)
        finally:
            streams.settle()

    line_magic_any, cell_magic_any = shell.run_line_magic, shell.run_cell_magic

    def run_line_magic(magic_name, line, _stack_depth=1):
        with interrupt_kept():
            return line_magic_any(magic_name, line, _stack_depth + 1)

    def run_cell_magic(magic_name, line, cell):
        with interrupt_kept():
            return cell_magic_any(magic_name, line, cell)

    kernel_threads = set(thread.ident for thread in threading.enumerate())
    kernel_threads.discard(threading.current_thread().ident)

    # The kernel's own log is no output of a cell. Its threads log a forged message at any moment, so that the
    # text would often be in the output of the next cell.
    class NotOfTheKernel(logging.Filter):
        def filter(self, record):
            return record.thread not in kernel_threads

    shell.kernel.log.disabled = True
    for name in ("asyncio", "tornado.application", "tornado.general"):
        logging.getLogger(name).addFilter(NotOfTheKernel())

    def with_own_streams(function):
        def call(*args, **kwargs):
            with streams.shown():
                return function(*args, **kwargs)
        return call

    own = {"stdout": Bounded(sys.stdout, 1), "stderr": Bounded(sys.stderr, 2)}

    def make(name):
        return own.get(name) or io.open(0, closefd=False)

    sys.stdin, sys.stdout, sys.stderr = None, own["stdout"], own["stderr"]
    # The kernel flushes `sys.stdout` before it sends a value or a traceback, and marks only this stream's
    # output as the running cell's.
    streams = names["CellStreams"](make, own, names["copy_descriptors"](), shown=())
    streams.settle()
    for part, name in (
        (shell.displayhook, "finish_displayhook"), (shell.display_pub, "publish"),
        (shell, "showtraceback"), (shell, "showsyntaxerror"), (shell, "set_parent"),
    ):
        setattr(part, name, with_own_streams(getattr(part, name)))
    format_any = shell.display_formatter.format
    shell.display_formatter.format = format_bounded
    shell.system = system
    # By default, a kernel runs cells that await in its own loop. No interrupt wakes this loop, and
    # `asyncio.run` fails in every cell. With another `loop_runner`, the kernel runs cells without its loop.
    shell.run_cell = run_cell
    shell.loop_runner = names["run_coroutine"]
    shell.getoutput = getoutput
    shell.run_line_magic = run_line_magic
    shell.run_cell_magic = run_cell_magic
    shell.kernel.raw_input = shell.kernel.getpass = streams.ask
    os.system = os_system  # otherwise its output is not in order with the cell's output
    sys.argv[:] = [""]  # an argument parser in a cell would fail on the kernel's own arguments
    if hasattr(sys, "orig_argv"):
        sys.orig_argv[:] = ["python3"]

"""
SETUP += f"_setup({inspect.getsource(interrupts)!r}, {inspect.getsource(cell_streams)!r})\ndel _setup\n"
