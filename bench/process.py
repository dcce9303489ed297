"""Control of a subject's process by the harness."""

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench.catalogue import Entry
from prorl_envs.sandbox.drivers.probe import find_bwrap

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENTS = ROOT / ".build" / "bench"
CLOSE_TIMEOUT_S = 60.0
#: Set in the environment of a subject and all its children, so that leaked processes can be attributed.
MARK = "PRORL_BENCH_SUBJECT"


class SubjectError(Exception):
    """Error of a subject that cannot be measured; the table shows the message."""


class SubjectProcess:
    """Process of one subject. Not thread-safe; the caller must close it.

    Args:
        entry: the subject.
        scratch: an existing empty directory for its home, temporary files, sockets and log.
        image: the SIF, for subjects that need one.
    """

    def __init__(self, entry: Entry, scratch: Path, image: Path | None) -> None:
        self.entry = entry
        self.run_dir = scratch / "run"
        self._scratch = scratch
        self._log = scratch / "log"
        self._buffer = b""
        python = interpreter(entry)
        arguments = [*entry.arguments, *([str(image)] if entry.image else [])]
        for name in ("home", "tmp", "run"):
            (scratch / name).mkdir()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [str(python), "-m", f"bench.subjects.{entry.module}", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                bufsize=0,
                cwd=ROOT,
                env=self._environment(),
                start_new_session=True,
            )

    def ask(self, operation: str, *, timeout_s: float, **arguments: float) -> dict[str, Any]:
        """Run an operation of `bench.subjects.protocol` in the subject, and return the answer.

        Raises:
            SubjectError: the subject exited, or did not answer in time.
        """
        self.tell(operation, **arguments)
        return self.answer(operation, timeout_s=timeout_s)

    def tell(self, operation: str, **arguments: float) -> None:
        """Start an operation without waiting. Raises SubjectError if the subject has exited."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"op": operation, **arguments}).encode() + b"\n")
        except BrokenPipeError:
            raise SubjectError(self._last_words()) from None

    def answer(self, operation: str, *, timeout_s: float) -> dict[str, Any]:
        """Return the answer to the last request. Raises SubjectError as `ask` does."""
        answer: dict[str, Any] = json.loads(self._read_line(operation, time.monotonic() + timeout_s))
        return answer

    def finish(self) -> None:
        """Request the subject's exit without waiting for it. Idempotent."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def close(self) -> list[str]:
        """Stop the subject and all processes that it has started.

        Returns:
            Names of leaked processes, which have been killed.
        """
        assert self._process.stdout is not None
        self.finish()
        try:
            self._process.wait(CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._process.stdout.close()
        leaked = self._kill_marked()
        if self._process.returncode:
            ENVIRONMENTS.mkdir(parents=True, exist_ok=True)
            shutil.copy(self._log, ENVIRONMENTS / f"{self.entry.module}-{self.entry.kind}.log")
        shutil.rmtree(self._scratch, ignore_errors=True)
        return leaked

    def _environment(self) -> dict[str, str]:
        inherited = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
        return inherited | {
            MARK: str(self._scratch),
            "HOME": str(self._scratch / "home"),  # without a user's .bashrc
            "TMPDIR": str(self._scratch / "tmp"),
            "TMUX_TMPDIR": str(self._scratch / "tmp"),
            "PRORL_RUN_DIR": str(self.run_dir),
            "BENCH_BWRAP": str(find_bwrap()),
            "LANG": "C.UTF-8",
            "TERM": "xterm-256color",
            "MSWEA_SILENT_STARTUP": "1",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # without it, OpenHands' import needs a download
        }

    def _read_line(self, operation: str, deadline: float) -> bytes:
        assert self._process.stdout is not None
        while b"\n" not in self._buffer:
            remaining = deadline - time.monotonic()
            if remaining <= 0 or not select.select([self._process.stdout], [], [], remaining)[0]:
                raise SubjectError(f"no answer to `{operation}` in time")
            data = os.read(self._process.stdout.fileno(), 1 << 20)
            if not data:
                raise SubjectError(self._last_words())
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        return line

    def _last_words(self) -> str:
        self._process.wait(CLOSE_TIMEOUT_S)
        return last_line(self._log) or f"ended with status {self._process.returncode}"

    def _kill_marked(self) -> list[str]:
        mark = f"{MARK}={self._scratch}".encode()
        names = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                    pidfd = os.pidfd_open(int(entry.name))
                    try:
                        if mark in (entry / "environ").read_bytes().split(b"\0"):
                            names.append((entry / "comm").read_text().strip())
                            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                    finally:
                        os.close(pidfd)
            except OSError:  # the process has exited, or belongs to another user
                continue
        return names


def interpreter(entry: Entry) -> Path:
    """Return the Python interpreter for the subject.

    Raises:
        SubjectError: the subject or a program that it needs is not installed.
    """
    for program in entry.needs:
        if shutil.which(program) is None:
            raise SubjectError(f"{program} is not installed")
    if not entry.peer:
        return Path(sys.executable)
    python = ENVIRONMENTS / entry.module / "bin" / "python"
    failed = ENVIRONMENTS / f"{entry.module}.failed"
    if failed.exists():
        raise SubjectError(f"not installed: {last_line(failed)}")
    if not python.exists():
        raise SubjectError("not installed: run scripts/setup-bench.sh")
    return python


def last_line(path: Path) -> str:
    """Return the last non-empty line of a log, shortened for a table."""
    lines = [line.strip() for line in path.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:200].replace("|", "/") if lines else ""
