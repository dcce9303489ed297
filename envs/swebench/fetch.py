"""The only step of a build that needs the network: pip fetches the environment and the source release.

pip runs a source package's own code to read its name and version. So the step runs in a sandbox that has only
the host's system and network, one interpreter, and the folder for the result.
"""

import os
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

from prorl_envs.env.node import Node
from prorl_envs.env.sandboxed import sandbox_session
from prorl_envs.envs.swebench.interpreters import Interpreter, mounts_of
from prorl_envs.envs.swebench.root import CONDA, SDIST, VENV, WHEELS
from prorl_envs.envs.swebench.task import EnvironmentSpec
from prorl_envs.errors import EnvironmentFault
from prorl_envs.sandbox.base import Mount, Network, SandboxSpec

TIMEOUT_S = 1200.0
#: Messages of pip if an index did not answer; the last one appears if retries are disabled.
_UNREACHABLE = ("NewConnectionError", "ConnectTimeoutError", "NameResolutionError", "(from versions: none)")
#: Prefixes of variables with pip's package index and network settings.
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


async def fetch(node: Node, folder: Path, spec: EnvironmentSpec, interpreter: Interpreter) -> None:
    """Create the virtual environment with every pinned package, and fetch the source release.

    Args:
        node: runs the sandbox.
        folder: existing, empty folder for both; it is `/opt/miniconda3` in the sandbox.
        spec: the packages to install.
        interpreter: interpreter of the environment.

    Raises:
        EnvironmentFault: a package is not available or fails to build, or the timeout expired.
        SandboxError, ToolError: the sandbox failed.
    """
    environment = _environment(os.environ)
    conda = Mount(source=folder, target=CONDA, writable=True)
    sandbox_spec = SandboxSpec(
        env=environment,
        mounts=(conda, *mounts_of(interpreter.prefix), *_certificates(environment)),
        network=Network(open=True, reason="pip fetches the packages of a SWE-bench environment"),
    )
    command = ["/bin/bash", "--noprofile", "--norc", "-c", _script(spec, interpreter)]
    async with sandbox_session(node, sandbox_spec) as session:
        done = await session.tools.run(command, cwd=CONDA, timeout_s=TIMEOUT_S)
    if done.timed_out:
        raise EnvironmentFault(f"fetching {spec.sdist} took more than {TIMEOUT_S:.0f} s")
    if done.exit_code != 0:
        raise _fault(spec, done.output.decode(errors="replace"))


def _fault(spec: EnvironmentSpec, output: str) -> EnvironmentFault:
    if any(sign in output for sign in _UNREACHABLE):
        return EnvironmentFault(
            f"no package index can be reached to fetch {spec.sdist}: {output[-500:].strip()}",
            hint="the first build needs a network; set PIP_INDEX_URL or HTTPS_PROXY if necessary",
        )
    return EnvironmentFault(f"fetching {spec.sdist} and its environment failed: {output[-1500:].strip()}")


def _certificates(environment: Mapping[str, str]) -> Iterator[Mount]:
    """Yield mounts of the certificate files that variables name, if a sandbox does not have them already."""
    for name in ("PIP_CERT", "SSL_CERT_FILE"):
        path = environment.get(name, "")
        if (
            path.startswith("/")
            and not path.startswith(("/etc/ssl/certs/", "/usr/"))
            and Path(path).is_file()
        ):
            yield Mount(source=Path(path), target=path)


def _environment(host: Mapping[str, str]) -> dict[str, str]:
    passed = {name: value for name, value in host.items() if name.startswith(_PASSED)}
    return {**passed, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}


def _script(spec: EnvironmentSpec, interpreter: Interpreter) -> str:
    """Return the script of the fetch.

    It skips ensurepip, which takes three seconds to install a pip that is replaced at once. It fetches the
    release with the environment's own pip and build tools, which also install it later. With build isolation,
    pip would use the current build tools, with which an old release may even fail to report its name.
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
