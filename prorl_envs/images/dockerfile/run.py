"""RUN: runs a command in a sandbox. The changes become a layer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from prorl_envs.errors import SandboxError
from prorl_envs.images.dockerfile.copy_files import is_unchanged
from prorl_envs.images.threads import in_thread
from prorl_envs.sandbox.base import Driver, Mount, Network, Sandbox, SandboxLimits, SandboxSpec
from prorl_envs.sandbox.filesystem.directories import remove_tree
from prorl_envs.sandbox.filesystem.layered import SUFFIX, LayeredImage, LayerTree
from prorl_envs.tools.client.toolbox import Toolbox
from prorl_envs.tools.types import Completed

#: Workspace of a sandbox whose command runs in the root directory.
_WORKDIR = "/tmp"


class RunFailed(SandboxError):
    """Error of a command in a Dockerfile. Another attempt would most likely fail too."""

    retryable = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandRequest:
    """Command of a RUN.

    Args:
        argv: program and arguments.
        layers: layers of the image below, the lowest first.
        workdir: absolute path of an existing directory inside.
        stdin: its standard input.
        env: its environment.
        mounts: mounts of the instruction.
        network: hosts that it can reach.
        limits: limits of its sandbox; None uses the driver's.
        seconds: timeout.
        output_bytes: most bytes of its output; the rest is dropped.
    """

    argv: Sequence[str]
    layers: Sequence[Path]
    workdir: str
    stdin: bytes = b""
    env: Mapping[str, str] = field(default_factory=dict)
    mounts: Sequence[Mount] = ()
    network: Network = field(default_factory=Network)
    limits: SandboxLimits | None = None
    seconds: float = 3600.0
    output_bytes: int = 1 << 20


async def run_command(driver: Driver, request: CommandRequest, place: Path, scratch: Path) -> Completed:
    """Run a command. If it succeeds, move its changes to `place` as a layer, which may be empty.

    Args:
        place: empty directory for the layer.
        scratch: private directory on the file system of the driver's sandboxes.

    Raises:
        RunFailed: the command could not be started.
        SandboxError: the sandbox failed, or exceeded a limit.
    """
    image = scratch / f"below{SUFFIX}"
    await in_thread(LayeredImage(layers=tuple(request.layers)).write, image)
    sandbox = await driver.start(_spec(request, image))
    try:
        completed = await _run(sandbox, request)
        if completed.exit_code == 0:
            await sandbox.take_layer(place)
            await in_thread(_clean_layer, place, request)
    finally:
        await sandbox.close()
    return completed


def _spec(request: CommandRequest, image: Path) -> SandboxSpec:
    return SandboxSpec(
        image=image,
        emulate_root=True,
        workdir=request.workdir if request.workdir != "/" else _WORKDIR,
        env=request.env,
        mounts=tuple(request.mounts),
        network=request.network,
        limits=request.limits,
    )


async def _run(sandbox: Sandbox, request: CommandRequest) -> Completed:
    toolbox = await Toolbox.open(sandbox)
    try:
        return await toolbox.run(
            request.argv,
            cwd=request.workdir,
            stdin=request.stdin,
            timeout_s=request.seconds,
            output_limit=request.output_bytes,
        )
    except OSError as error:
        raise RunFailed(f"cannot start {request.argv[0]}: {error.strerror}") from error
    finally:
        await toolbox.aclose()


def _clean_layer(place: Path, request: CommandRequest) -> None:
    """Remove mount points of the instruction's mounts from a layer, and all files if nothing changed."""
    tree = LayerTree(request.layers)
    for mount in request.mounts:
        _remove_mount_point(place, tree, PurePosixPath(tree.resolve(mount.target)))
    if is_unchanged(place, request.layers):
        remove_tree(place)
        place.mkdir(mode=0o755)


def _remove_mount_point(place: Path, tree: LayerTree, target: PurePosixPath) -> None:
    for path in (target, *target.parents[:-1]):
        host = place / str(path)[1:]
        if tree.find(str(path)) is not None or host.is_symlink():
            return
        try:
            if host.is_dir():
                host.rmdir()
            elif host.is_file() and host.stat().st_size == 0:
                host.unlink()
        except OSError:  # the command left files there
            return


def last_lines(output: bytes, count: int) -> str:
    """Return the last lines of an output."""
    return "\n".join(output.decode(errors="replace").rstrip().splitlines()[-count:])
