"""Translation of a `SandboxSpec` to the Apptainer command line of one sandbox. Pure, except for
`write_system` and `write_points`.

Without an image, Apptainer's container is a generated directory with all mount points, so that the site's
settings do not affect it. An image is passed to Apptainer unchanged; changes to it stay in memory.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from prorl_envs.errors import SandboxError
from prorl_envs.sandbox.base import SandboxSpec
from prorl_envs.sandbox.drivers.apptainer_wrapper import CONFIGURATION, explain_apptainer, on_one_line
from prorl_envs.sandbox.drivers.instance.runtime import PLACE
from prorl_envs.sandbox.filesystem.host_system import kernel_files, root_directories
from prorl_envs.sandbox.filesystem.mount_plan import HOME, SandboxFiles, mount_points

#: Apptainer's default mounts that are disabled: a sandbox gets them in another way, or not at all.
_NO_MOUNTS = "sys,tmp,cwd,bind-paths,hostfs"
_LIMITED = (
    "the administrator must add to `limit container {0}` in Apptainer's configuration, or unset it: each "
    "image counts, and each sandbox without one is a directory of this user's below PRORL_RUN_DIR"
)
#: Remedies by parts of Apptainer's messages. The first match counts.
_REMEDIES = {
    "unknown flag": "Apptainer 1.2 or later, or SingularityCE 3.11 or later",
    "disallows users from running sandbox": CONFIGURATION.format("allow container dir = yes"),
    "disallows users from running unencrypted sif": CONFIGURATION.format("allow container sif = yes"),
    "not in an allowed configured path": _LIMITED.format("paths"),
    "not owned by required user": _LIMITED.format("owners"),
    "not owned by required group": _LIMITED.format("groups"),
    "/proc/net/dev": CONFIGURATION.format("mount proc = yes"),
    "/proc/self/": CONFIGURATION.format("mount proc = yes"),
    "user bind control": CONFIGURATION.format("user bind control = yes"),
    "not allowed by configuration": CONFIGURATION.format("allow user ns = yes"),
    "user namespace": "install Apptainer's setuid program (`apptainer-suid`), with "
    "`allow setuid = yes` in its configuration, or allow user namespaces (`prorl-envs doctor` says how)",
    "writable-tmpfs": CONFIGURATION.format("enable overlay = yes"),
    "overlay": CONFIGURATION.format("enable overlay = yes"),
    "destination": "the target of a mount must exist in the image or below a writable directory",
}
_MESSAGE_LIMIT = 500
#: Apptainer's settings that allow each namespace.
_SETTINGS = {"pid": "allow pid ns = yes", "ipc": "allow ipc ns = yes", "uts": "allow uts ns = yes"}


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceFiles(SandboxFiles):
    """Host directories of one sandbox, and files of its driver that are mounted into it.

    Args:
        runtime: directory with the Python of its first process.
        empty, blank: an empty directory, and an empty file.
    """

    runtime: Path
    empty: Path
    blank: Path

    @property
    def system(self) -> Path:
        """Container directory of a sandbox without an image. It has the mount points."""
        return self.root / "system"


def apptainer_command(
    program: Path,
    spec: SandboxSpec,
    files: InstanceFiles,
    *,
    setuid: bool,
    root: bool = False,
    system_masks: tuple[str, ...] = (),
    copied: Mapping[int, Path] | None = None,
    host_mounts: Sequence[str] = (),
) -> list[str]:
    """Return the command prefix with which Apptainer runs a sandbox's first process.

    Args:
        program: the Apptainer program.
        setuid: whether Apptainer uses its setuid program in place of a user namespace.
        root: whether root runs it, so that the first process has capabilities to drop.
        system_masks: paths that are hidden in addition to the spec's `masks`.
        copied: the private copies of overlay mounts, by their index in the spec.
        host_mounts: the host's mount points.
    """
    network = () if spec.network.open else ("--net", "--network", "none")
    image = spec.image
    mounts = _with_parts(_mounts(spec, files, system_masks, copied or {}), host_mounts)
    return [
        *(str(program), "--silent", "--nocolor", "exec", *(() if setuid else ("--userns",))),
        # No shim process: the first process must be ours, so that no signal from inside kills it.
        *("--contain", "--cleanenv", "--no-eval", "--pid", "--ipc", "--uts", "--no-init"),
        *(("--keep-privs",) if root else ("--no-privs",)),
        *("--hostname", spec.hostname, *network),
        *("--no-mount", _NO_MOUNTS, "--home", f"{files.home}:{HOME}", "--scratch", "/run"),
        *(() if image is None else ("--writable-tmpfs",)),
        *(word for mount in mounts for word in ("--mount", mount.text())),
        *("--pwd", "/", str(files.system if image is None else image.resolve())),
    ]


@dataclass(frozen=True, slots=True)
class _Bind:
    source: Path
    target: str
    writable: bool = False

    def text(self) -> str:
        """Return the argument of `--mount`: a line of CSV."""
        fields = ["type=bind", f"source={self.source}", f"destination={self.target}"]
        return ",".join(map(_quoted, fields if self.writable else [*fields, "ro"]))


def _with_parts(mounts: Iterable[_Bind], host_mounts: Sequence[str]) -> Iterator[_Bind]:
    """Add the host's mounts below each read-only mount: Apptainer makes only the top mount read-only."""
    for mount in mounts:
        yield mount
        if not mount.writable:
            for path in map(Path, host_mounts):
                if path != mount.source and path.is_relative_to(mount.source):
                    target = PurePosixPath(mount.target, path.relative_to(mount.source))
                    yield _Bind(path, str(target))


def _mounts(
    spec: SandboxSpec, files: InstanceFiles, system_masks: tuple[str, ...], copied: Mapping[int, Path]
) -> Iterator[_Bind]:
    if spec.image is None:
        for name in ("usr", *(path.name for path in root_directories() if not path.is_symlink())):
            yield _Bind(Path("/", name), f"/{name}")
        yield _Bind(files.etc, "/etc")
    else:
        # Hide the image's environment scripts and its ld.so.preload from Apptainer and the first process.
        yield _Bind(files.empty, "/.singularity.d")
        yield _Bind(files.blank, "/etc/ld.so.preload")
        yield _Bind(files.blank, "/etc/resolv.conf")
    yield _Bind(files.root / "hosts", "/etc/hosts")
    yield _Bind(files.root / "hostname", "/etc/hostname")
    # The host's /proc/sys shows a process inside the settings of its own namespaces.
    yield _Bind(Path("/proc/sys"), "/proc/sys")
    for name in kernel_files():
        yield _Bind(Path("/dev/null"), f"/proc/{name}")  # cannot be opened on a mount without devices
    yield _Bind(files.runtime, PLACE)
    yield _Bind(files.tmp, "/tmp", writable=True)
    yield _Bind(files.work, spec.workdir, writable=True)
    for index, mount in enumerate(spec.mounts):
        source = copied.get(index, mount.source)
        yield _Bind(source, mount.target, writable=mount.writable or mount.overlay)
    for mask in (*spec.masks, *system_masks):
        for place, source in _directories_above(mask, files.places(spec)):
            yield _Bind(source, place, writable=True)
        yield _Bind(files.empty, mask)


def _directories_above(target: str, places: Mapping[str, Path]) -> Iterator[tuple[str, Path]]:
    """Yield the directories between a directory that is writable inside and a mount below it.

    They are bind-mounted too. Otherwise the sandbox could rename them, and thereby move the mount.
    """
    path = PurePosixPath(target)
    above = max((place for place in places if path.is_relative_to(place)), key=len, default=None)
    if above is not None:
        parts = path.relative_to(above).parts
        for count in range(1, len(parts)):
            yield str(PurePosixPath(above, *parts[:count])), places[above].joinpath(*parts[:count])


def _quoted(field: str) -> str:
    return '"' + field.replace('"', '""') + '"' if any(c in field for c in ',"\n\r ') else field


def write_system(spec: SandboxSpec, files: InstanceFiles) -> None:
    """Write the container directory of a sandbox without an image: mount points, and links.

    Raises:
        OSError: it cannot be written.
    """
    system = files.system
    for name in ("usr", "etc", "proc", "dev", "run", "tmp", "var", PLACE[1:]):
        (system / name).mkdir(parents=True)
    (system / "var" / "tmp").symlink_to("/tmp")
    for path in root_directories():
        if path.is_symlink():
            (system / path.name).symlink_to(path.readlink())
        else:
            (system / path.name).mkdir()
    write_points(spec, {**files.places(spec), "/": system})


def write_points(spec: SandboxSpec, places: Mapping[str, Path]) -> None:
    """Create the mount points in the sandbox's own directories: Apptainer cannot create them there.

    Args:
        places: the directories by their paths inside.

    Raises:
        OSError: a mount point cannot be created.
    """
    for target, is_directory in mount_points(spec).items():
        path = PurePosixPath(target)
        above = [place for place in places if path != PurePosixPath(place) and path.is_relative_to(place)]
        if not above:
            continue
        place = max(above, key=len)
        point = places[place] / path.relative_to(place)
        point.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        if is_directory:
            point.mkdir(mode=0o755, exist_ok=True)
        else:
            point.touch(mode=0o644)


def explain_instance(output: str) -> SandboxError:
    """Return the error for a failed start, from Apptainer's output."""
    return explain_apptainer(on_one_line(output)[-_MESSAGE_LIMIT:], _REMEDIES)


def explain_shared(names: Sequence[str]) -> SandboxError:
    """Return the error for a sandbox that shares namespaces with the host.

    Args:
        names: the names of these namespaces, as in `/proc/self/ns`.
    """
    settings = ", ".join(f"`{_SETTINGS[name]}`" for name in names if name in _SETTINGS)
    return SandboxError(
        f"Apptainer gave the sandbox no namespace of its own for: {', '.join(names)}",
        hint=f"the administrator must set {settings} in Apptainer's configuration"
        if settings
        else "`prorl-envs doctor` checks this machine",
    )
