"""The one step of a build that needs the network: pip fetches the environment and the source release.

It runs in a jail with nothing of the host but its system, one interpreter and the folder being filled,
because pip runs a source package's own code to learn its name and version. bubblewrap is called directly: it
is one process that ends, so nothing has to join it, and the sandbox driver knows no sandbox with a network.
"""

import asyncio
import os
import shlex
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path

from prorl_envs.envs.swebench.interpreters import Interpreter, mounts_of
from prorl_envs.envs.swebench.task import EnvironmentSpec
from prorl_envs.errors import EnvironmentFault
from prorl_envs.sandbox.probe import find_bwrap
from prorl_envs.sandbox.system import system_arguments

#: Where the environment is inside, in the jail and in every sandbox: where the official images have it.
CONDA = "/opt/miniconda3"
VENV = f"{CONDA}/envs/testbed"
WHEELS = f"{CONDA}/wheels"
SDIST = f"{CONDA}/sdist"

TIMEOUT_S = 600.0
_KEPT_OUTPUT = 20_000
#: How pip says that an index did not answer; the last where it was told not to try again.
_UNREACHABLE = ("NewConnectionError", "ConnectTimeoutError", "NameResolutionError", "(from versions: none)")
#: What tells pip where the packages are, and how to get there.
_PASSED = (
    "PIP_",
    "http_proxy",
    "https_proxy",
    "no_proxy",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "NO_PROXY",
    "SSL_CERT_",
)
#: Name resolution and certificate authorities; no keys.
_ETC = (
    *("/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf", "/etc/ssl/certs", "/etc/ssl/openssl.cnf"),
    *("/etc/pki/tls/certs", "/etc/pki/ca-trust/extracted", "/etc/alternatives", "/etc/ld.so.cache"),
)


async def fetch(folder: Path, spec: EnvironmentSpec, interpreter: Interpreter) -> None:
    """Make the virtual environment with every pinned package, and fetch the source release beside it.

    Args:
        folder: existing and empty; becomes `/opt/miniconda3` inside.
        spec: what to install.
        interpreter: what the environment runs on.

    Raises:
        EnvironmentFault: a package cannot be had or built, or it took too long.
    """
    command = [str(find_bwrap()), *_jail(folder, interpreter), "/bin/bash", "-c", _script(spec, interpreter)]
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(TIMEOUT_S):
            output = await _drain(process)
            status = await process.wait()
    except TimeoutError:
        raise EnvironmentFault(f"fetching {spec.sdist} took more than {TIMEOUT_S:.0f} s") from None
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)  # bubblewrap's end ends its pid namespace
            await process.wait()
    if status != 0:
        raise _fault(spec, output.decode(errors="replace"))


async def _drain(process: asyncio.subprocess.Process) -> bytes:
    assert process.stdout is not None
    kept = b""
    while chunk := await process.stdout.read(65_536):
        kept = (kept + chunk)[-_KEPT_OUTPUT:]
    return kept


def _fault(spec: EnvironmentSpec, output: str) -> EnvironmentFault:
    if any(sign in output for sign in _UNREACHABLE):
        return EnvironmentFault(
            f"no package index can be reached to fetch {spec.sdist}: {output[-500:].strip()}",
            hint="the first build needs a network; PIP_INDEX_URL and HTTPS_PROXY are honoured",
        )
    return EnvironmentFault(f"fetching {spec.sdist} and its environment failed: {output[-1500:].strip()}")


def _jail(folder: Path, interpreter: Interpreter) -> Iterator[str]:
    for namespace in ("user", "pid", "ipc", "uts", "cgroup"):
        yield f"--unshare-{namespace}"
    yield from ("--disable-userns", "--new-session", "--die-with-parent", "--clearenv", "--cap-drop", "ALL")
    yield from ("--uid", "1000", "--gid", "1000")
    yield from system_arguments()
    for path in _ETC:
        yield from ("--ro-bind-try", str(Path(path).resolve()), path)
    yield from ("--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--dir", "/home/agent")
    for mount in mounts_of(interpreter.prefix):
        yield from ("--ro-bind", str(mount.source), mount.target)
    environment = _environment(os.environ)
    for name in ("PIP_CERT", "SSL_CERT_FILE"):
        if certificates := environment.get(name):
            yield from ("--ro-bind-try", certificates, certificates)
    yield from ("--bind", str(folder), CONDA, "--chdir", CONDA)
    for name, value in environment.items():
        yield from ("--setenv", name, value)


def _environment(host: Mapping[str, str]) -> dict[str, str]:
    passed = {name: value for name, value in host.items() if name.startswith(_PASSED)}
    own = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/home/agent", "LANG": "C.UTF-8"}
    return {**passed, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1", **own}


def _script(spec: EnvironmentSpec, interpreter: Interpreter) -> str:
    """Without ensurepip, whose three seconds buy a pip that is replaced at once.

    The release is asked for with the environment's own pip and build tools, the ones that will install it:
    build isolation would fetch today's, under which an old release may not even tell its name.
    """
    pins = shlex.join(spec.pip)
    return "\n".join(
        (
            "set -euo pipefail",
            f"{shlex.quote(str(interpreter.executable))} -m venv --without-pip {VENV}",
            f'bundled() {{ PYTHONPATH={shlex.quote(str(interpreter.pip))} {VENV}/bin/python -m pip "$@"; }}',
            f"bundled wheel --quiet --no-deps --use-pep517 --wheel-dir {WHEELS} {pins}",
            f"bundled install --quiet --no-deps --no-index --find-links {WHEELS} {pins}",
            f"{VENV}/bin/python -m pip download --quiet --no-deps --no-build-isolation --no-binary :all: "
            f"--dest {SDIST} {shlex.quote(spec.sdist)}",
        )
    )
