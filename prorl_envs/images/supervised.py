"""Runs a builder's command under the supervisor, with bounded output and checks of the disk."""

import asyncio
import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from prorl_envs.errors import SandboxError

_TAIL = 8192
_POLL_S = 1.0
_LAST_OUTPUT_S = 5.0
_ESCAPE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildLimits:
    """Limits of a build.

    Args:
        seconds: timeout.
        free_bytes: the build is killed if less space is free on the scratch disk.
        unpacked_bytes: most bytes of an unpacked archive.
    """

    seconds: float = 3600.0
    free_bytes: int = 1 << 30
    unpacked_bytes: int = 64 << 30


@dataclass(frozen=True, slots=True)
class BuildOutcome:
    """Result of a command: its exit status, and the end of its output, made safe to print."""

    status: int
    output: str


class Tail:
    """Last bytes of a stream."""

    def __init__(self) -> None:
        self._bytes = b""

    def add(self, chunk: bytes) -> None:
        self._bytes = (self._bytes + chunk)[-_TAIL:]

    @property
    def text(self) -> str:
        """The bytes as text, without colours and control characters."""
        text = _ESCAPE.sub("", self._bytes.decode(errors="replace")).replace("\r", "\n")
        return "".join(c for c in text if c in "\n\t" or c.isprintable()).strip()

    @property
    def line(self) -> str:
        """The last line, cut to a hundred characters."""
        return self.text.rpartition("\n")[2][:100]


async def run_supervised(
    command: Sequence[str],
    *,
    scratch: Path,
    env: Mapping[str, str],
    identity: bool,
    limits: BuildLimits,
    progress: Callable[[str], None],
) -> BuildOutcome:
    """Run `command` in `scratch`. Remove `scratch` if the run is interrupted.

    Args:
        env: the complete environment of the command.
        identity: see the supervisor.
        progress: called with the last line of the output, whenever there is new output.

    Raises:
        SandboxError: the command took too long, or the disk is nearly full.
    """
    arguments = ["-I", "-m", "prorl_envs.images.supervisor", str(scratch)]
    arguments += ["identity" if identity else "same", *command]
    tail = Tail()
    output, write_end = await _pipe()
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable, *arguments, cwd=scratch, env=env, start_new_session=True,
            stdin=asyncio.subprocess.PIPE, stdout=write_end, stderr=write_end,
        )  # fmt: skip
    except BaseException:
        output.transport.close()
        raise
    finally:
        os.close(write_end)
    reading = asyncio.create_task(_read(output.stream, tail, progress))
    try:
        async with asyncio.timeout(limits.seconds):
            await _watch(reading, scratch, limits.free_bytes)
    except TimeoutError:
        raise SandboxError(
            f"building the image took more than {limits.seconds:.0f} s: {tail.line}",
            hint="see the build's last output, or raise image_build_s",
        ) from None
    finally:
        assert process.stdin is not None
        process.stdin.close()  # the supervisor then kills all remaining processes of the command
        await _wait_for_exit(reading, process, output)
    return BuildOutcome(process.returncode or 0, tail.text)


async def _read(stream: asyncio.StreamReader, tail: Tail, progress: Callable[[str], None]) -> None:
    while chunk := await stream.read(1 << 16):
        tail.add(chunk)
        progress(tail.line)


async def _watch(reading: asyncio.Task[None], scratch: Path, free_bytes: int) -> None:
    """Return when the command's output is closed.

    Raises:
        SandboxError: the disk is nearly full.
    """
    while not reading.done():
        free = (await asyncio.to_thread(shutil.disk_usage, scratch)).free
        if free < free_bytes:
            raise SandboxError(
                f"too little disk space to build the image: {free >> 20} MiB are free in {scratch.parent}",
                hint="set run_dir to a larger local disk",
            )
        await asyncio.wait([reading], timeout=_POLL_S)


async def _wait_for_exit(
    reading: asyncio.Task[None], process: asyncio.subprocess.Process, output: "_Output"
) -> None:
    """Wait until the supervisor has exited. A cancellation takes effect only afterwards."""
    ending = asyncio.ensure_future(_end(reading, process, output))
    cancelled = None
    while not ending.done():
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError as error:
            cancelled = error
    ending.result()
    if cancelled is not None:
        raise cancelled


async def _end(reading: asyncio.Task[None], process: asyncio.subprocess.Process, output: "_Output") -> None:
    await process.wait()
    # Another process still has the write end only if the supervisor was killed.
    await asyncio.wait([reading], timeout=_LAST_OUTPUT_S)
    reading.cancel()
    await asyncio.wait([reading])
    output.transport.close()
    if not reading.cancelled():
        reading.result()


@dataclass(frozen=True, slots=True)
class _Output:
    stream: asyncio.StreamReader
    transport: asyncio.ReadTransport


async def _pipe() -> tuple[_Output, int]:
    """Create a pipe. With `asyncio.subprocess.PIPE`, `wait` would wait until no process has it open."""
    read_end, write_end = os.pipe()
    stream = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(read_end, "rb", 0)
    )
    return _Output(stream, transport), write_end


def environment(scratch: Path, host: Mapping[str, str], *, remote: bool) -> dict[str, str]:
    """Return a builder's environment: its directories and network settings, nothing else.

    Args:
        host: environment of this process.
        remote: True to pull from a registry: adds the registry's credentials, and the home directory in which
            Apptainer stores them. A build that runs a definition's commands never gets them.
    """
    variables = {
        name: host[name] for name in (*_PASSED_ON, *(_CREDENTIALS if remote else ())) if name in host
    }
    home = host.get("HOME", str(scratch)) if remote else str(scratch)
    path = host.get("PATH", "") or os.defpath
    for prefix in ("APPTAINER_", "SINGULARITY_"):
        variables |= {f"{prefix}TMPDIR": str(scratch / "tmp"), f"{prefix}CACHEDIR": str(scratch / "cache")}
    return variables | {
        "PATH": f"{path}:/usr/sbin:/sbin",
        "HOME": home,
        "TMPDIR": str(scratch / "tmp"),
        "LANG": "C",
    }


_PASSED_ON = (
    "USER", "LOGNAME", "SSL_CERT_FILE", "SSL_CERT_DIR", "http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY",
    "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY", "APPTAINER_NOHTTPS", "SINGULARITY_NOHTTPS",
)  # fmt: skip
_CREDENTIALS = (
    "APPTAINER_DOCKER_USERNAME", "APPTAINER_DOCKER_PASSWORD", "SINGULARITY_DOCKER_USERNAME",
    "SINGULARITY_DOCKER_PASSWORD", "APPTAINER_AUTHFILE", "SINGULARITY_AUTHFILE", "DOCKER_CONFIG",
    "REGISTRY_AUTH_FILE", "XDG_RUNTIME_DIR",
)  # fmt: skip
