"""Imitation of a cluster's machine: setuid Apptainer, and no user namespaces for ordinary users.

`python -m tests.sandbox.setuid_machine PROGRAM [ARG ...]`, as root, runs a program as the user `nobody` on
such a machine. The first Apptainer in PATH is used if it is setuid; otherwise its starter gets the bit in a
private mount namespace. A system call filter refuses user namespaces, like a kernel that allows none.
"""

import ctypes
import errno
import os
import pwd
import shutil
import stat
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import prorl_envs

USER = "nobody"
#: Numbers of the calls that make namespaces, by machine: clone, unshare, seccomp.
_NUMBERS = {"x86_64": (56, 272, 317), "aarch64": (220, 97, 277)}
_CLONE3 = 435
_NEWUSER = 0x10000000
_LOAD, _EQUAL, _ANY, _RETURN = 0x20, 0x15, 0x45, 0x06
_ALLOW, _FAIL = 0x7FFF0000, 0x00050000
_STEP = struct.Struct("=HBBI")


def missing() -> str:
    """Return the reason why such a machine cannot be imitated here; "" if it can."""
    if os.geteuid() != 0:
        return "only root can make Apptainer setuid"
    if os.uname().machine not in _NUMBERS:
        return "the filter has no numbers for this architecture"
    try:
        starter = _starter()
    except OSError as error:
        return f"no Apptainer: {error}"
    if not starter.is_file():
        return f"{starter} is not there"
    probe = subprocess.run(
        ["unshare", "-m", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, check=False
    )
    return "" if probe.returncode == 0 else f"mounts cannot be made: {probe.stderr.decode()}"


def _starter() -> Path:
    """Return the path of the program that gets the setuid bit."""
    built = subprocess.run(["apptainer", "buildcfg"], capture_output=True, text=True, check=False).stdout
    pairs = dict(line.split("=", 1) for line in built.splitlines() if "=" in line)
    return Path(pairs.get("LIBEXECDIR", "/nonexistent"), "apptainer", "bin", "starter")


def _mount(*words: str | Path) -> None:
    subprocess.run(["mount", *words], check=True)


def _make_setuid() -> None:
    starter = _starter()
    if starter.with_name("starter-suid").exists():
        return
    scratch = Path(tempfile.mkdtemp())
    _mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", scratch)
    shutil.copytree(starter.parent, scratch, dirs_exist_ok=True)
    shutil.copy(starter, scratch / "starter-suid")
    (scratch / "starter-suid").chmod(0o4755)
    _mount("--move", scratch, starter.parent)
    scratch.rmdir()


def _show(wanted: list[Path]) -> None:
    """Make the directories accessible to every user, regardless of the permissions of their parents."""
    held = {path: os.open(path, os.O_PATH | os.O_DIRECTORY) for path in wanted}
    for path in wanted:
        closed = next((p for p in reversed(path.parents) if not p.stat().st_mode & stat.S_IXOTH), None)
        if closed is not None:
            _mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", closed)
    for path, fd in held.items():
        if not path.exists():
            path.mkdir(parents=True)
            subprocess.run(["mount", "-c", "--bind", f"/proc/self/fd/{fd}", path], check=True, pass_fds=[fd])
        os.close(fd)


def _refuse_user_namespaces() -> None:
    """Install a filter without `no_new_privs`, because setuid programs must work. Needs root."""
    clone, unshare, seccomp = _NUMBERS[os.uname().machine]
    steps = [
        (_LOAD, 0, 0, 0),
        (_EQUAL, 0, 1, _CLONE3),
        (_RETURN, 0, 0, _FAIL | errno.ENOSYS),
        (_EQUAL, 1, 0, clone),
        (_EQUAL, 0, 3, unshare),
        (_LOAD, 0, 0, 16),
        (_ANY, 0, 1, _NEWUSER),
        (_RETURN, 0, 0, _FAIL | errno.ENOSPC),
        (_RETURN, 0, 0, _ALLOW),
    ]
    code = b"".join(_STEP.pack(*step) for step in steps)
    text = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxP", len(steps), ctypes.addressof(text))
    if ctypes.CDLL(None, use_errno=True).syscall(seccomp, 1, 0, program) != 0:
        raise OSError(ctypes.get_errno(), "the filter was refused")


def main() -> None:
    """Run the program as `nobody` on the imitated machine."""
    os.unshare(os.CLONE_NEWNS)
    _mount("--make-rprivate", "/")
    _make_setuid()
    _show([Path(sys.base_prefix), Path(sys.prefix), Path(prorl_envs.__file__).resolve().parent.parent])
    _refuse_user_namespaces()
    user = pwd.getpwnam(USER)
    os.setgroups([])
    os.setresgid(user.pw_gid, user.pw_gid, user.pw_gid)
    os.setresuid(user.pw_uid, user.pw_uid, user.pw_uid)
    os.chdir("/")
    os.execvp(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
