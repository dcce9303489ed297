"""Translation of NeMo Gym's sandbox requests to our specs. Imports nothing of NeMo Gym."""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from prorl_envs.errors import InputError, expand_user
from prorl_envs.images.sources import Source, SourceKind
from prorl_envs.images.template import ImageTemplate
from prorl_envs.nemo.images import image_source
from prorl_envs.sandbox.base import Mount, Network, SandboxLimits, SandboxSpec
from prorl_envs.sandbox.filesystem.mount_plan import HOME
from prorl_envs.sandbox.filesystem.python_runtime import python_runtime
from prorl_envs.sandbox.network.policy import Target, parse_target

#: Private empty directory of a sandbox if its commands run in another directory.
PRIVATE = "/sandbox"
_READY_S = 120.0
#: NeMo Gym's resources: its name, our name, its unit, and the number of our units in one of these.
_RESOURCES = (
    ("cpu", "cpus", "CPUs", 1),
    ("memory_mib", "memory_bytes", "MiB of memory", 1 << 20),
    ("disk_gib", "disk_bytes", "GiB of disk", 1 << 30),
)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class PlanOptions(_Strict):
    """`provider_options` of one sandbox; the provider's own `options` are the defaults.

    Args:
        image_variables: values for `{{ NAME }}`, if the image is a definition.
        uid: user id inside. 0 looks like root but has no capability.
        binds: host paths that appear inside, as `SOURCE:TARGET[:MODE]`; MODE is `ro` (the default), `rw` (the
            host's path itself) or `overlay` (a private copy-on-write view of a directory).
        hostname: the sandbox's own host name.
        allow: hosts that programs inside reach through an HTTP proxy; see `Network.allow`.
        servers: servers that they reach, by URL or by their names in NeMo Gym's configuration: directly at
            their own address if that is a loopback address, else through the proxy. None is refused for a
            harness that is known to run inside.
        default_route: True lets connections to outside time out instead of failing at once.
        host_python: True mounts this process's Python with its packages, at the same paths, read-only.
    """

    image_variables: dict[str, str] = {}
    uid: int = Field(default=0, ge=0, le=65_533)
    binds: Annotated[tuple[str, ...], BeforeValidator(_as_list)] = ()
    hostname: str = "sandbox"
    allow: Annotated[tuple[str, ...], BeforeValidator(_as_list)] = ()
    servers: Annotated[tuple[str, ...] | None, BeforeValidator(_as_list)] = None
    default_route: bool = False
    host_python: bool = False


class ProviderConfig(_Strict):
    """The provider's block in a configuration: `{prorl: {...}}`.

    Args:
        driver: the sandbox driver; None takes the setting `driver`.
        run_dir: directory on a local disk below which sandboxes keep their files; None takes the setting
            `run_dir`.
        default_timeout_s: timeout of a command if the caller gives none, in seconds; None for none.
        output_limit: bytes kept of stdout and of stderr of each command; longer output is cut in the middle.
        concurrency: maximum concurrent commands in one sandbox; further commands wait.
        unenforced: reaction to requested limits that are not enforced here: `warn` or `error`.
        options: see `PlanOptions`.
    """

    driver: Literal["auto", "bubblewrap", "apptainer", "apptainer-instance", "local"] | None = None
    run_dir: Path | None = None
    default_timeout_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    output_limit: int = Field(default=4 * 1024 * 1024, ge=1024, le=16 * 1024 * 1024)
    concurrency: int = Field(default=128, ge=1, le=200)
    unenforced: Literal["warn", "error"] = "warn"
    options: PlanOptions = PlanOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Plan of one sandbox, ready to start.

    Args:
        spec: spec for the driver, without the image.
        image: source of the image, for `ImageBuilder.resolve`.
        asked: the requested limits in words, by their names in `SandboxLimits`.
        workdir: working directory of commands.
        make_workdir: create `workdir` after the start.
        files: text by path, written before the entry point starts.
        entrypoint: program that runs beside the commands for the lifetime of the sandbox; empty for none.
        servers: servers on the host's loopback that programs inside reach.
        ttl_s: seconds after which the sandbox is closed.
        ready_s: timeout of the start, once the image exists, in seconds.
    """

    spec: SandboxSpec
    image: ImageTemplate | Source
    asked: Mapping[str, str]
    workdir: str
    make_workdir: bool
    files: Mapping[str, str]
    entrypoint: tuple[str, ...]
    servers: tuple[Target, ...]
    ttl_s: float | None
    ready_s: float

    def with_image(self, image: Path | None, env: Mapping[str, str]) -> SandboxSpec:
        """Return the spec for the driver, after the image's path and variables are known."""
        return dataclasses.replace(self.spec, image=image, env={**env, **self.spec.env})


def provider_config(values: Mapping[str, Any]) -> ProviderConfig:
    """Validate a configuration.

    Raises:
        InputError: a setting is unknown or invalid.
    """
    return _checked(ProviderConfig, values, "sandbox provider prorl")


def plan(
    request: Any,
    config: ProviderConfig,
    limits: SandboxLimits,
    *,
    harness: str = "",
    find: Callable[[str], str] = str,
) -> Plan:
    """Translate a request. Accesses the files of the image and of the binds.

    Args:
        request: a `nemo_gym.sandbox.SandboxSpec` of NeMo Gym 0.4 or later.
        config: configuration of the provider.
        limits: limits of a sandbox that requests none.
        harness: the agent that runs a harness in the sandbox, if that is known.
        find: returns the URL of a server of NeMo Gym, or a URL unchanged.

    Raises:
        InputError: the request is invalid, or these sandboxes cannot meet it.
    """
    values = {**config.options.model_dump(), **dict(request.provider_options or {})}
    options = _checked(PlanOptions, values, "provider_options")
    if harness and options.servers is None:
        raise InputError(
            f"{harness} runs its harness in the sandbox, which reaches no server, not even the model's",
            hint="name its model server, and its tool servers: provider_options: {servers: [policy_model]}",
        )
    servers = dict.fromkeys(_server(find(name)) for name in options.servers or ())
    local = tuple(server for server in servers if server.host.startswith("127."))
    others = (f"{'' if server.address else 'private:'}{server}" for server in servers if server not in local)
    image = image_source(request.image, options.image_variables)
    host = isinstance(image, Source) and image.kind is SourceKind.HOST
    inside, workdir, make_workdir = _places(request.workdir, host=host)
    bounds, descriptions = _limits(request.resources, limits)
    return Plan(
        spec=dataclasses.replace(
            _spec(inside, _environment(request.env or {}), options),
            limits=bounds,
            network=Network(allow=(*options.allow, *others)),
        ),
        image=image,
        asked=descriptions,
        workdir=workdir,
        make_workdir=make_workdir,
        files={str(path): str(text) for path, text in (request.files or {}).items()},
        entrypoint=tuple(map(str, request.entrypoint or ())),
        servers=local,
        ttl_s=_seconds("ttl_s", request.ttl_s),
        ready_s=_seconds("ready_timeout_s", request.ready_timeout_s) or _READY_S,
    )


def unenforced(asked: Mapping[str, str], kept: Collection[str], config: ProviderConfig) -> tuple[str, ...]:
    """Return warnings for the requested limits that are not enforced.

    Args:
        asked: see `Plan`.
        kept: limits that the driver enforces, by the names in `SandboxLimits`.

    Raises:
        InputError: such limits were requested, and `config.unenforced` is `error`.
    """
    notes = tuple(f"a limit of {text} is not enforced here" for key, text in asked.items() if key not in kept)
    if notes and config.unenforced == "error":
        raise InputError("; ".join(notes), hint="omit them, or set `unenforced: warn`")
    return notes


def _limits(resources: Any, limits: SandboxLimits) -> tuple[SandboxLimits, dict[str, str]]:
    """Return the default limits with those of a `SandboxResources` applied, and the latter in words."""
    if resources.gpu:
        raise InputError("a GPU was requested", hint="these sandboxes have no devices: omit `gpu`")
    values: dict[str, Any] = {}
    descriptions: dict[str, str] = {}
    for key, name, unit, factor in _RESOURCES:
        value = getattr(resources, key)
        if value is not None:
            values[name] = value * factor
            descriptions[name] = f"{value:g} {unit}"
    return dataclasses.replace(limits, **values), descriptions


def _checked[M: BaseModel](model: type[M], values: Mapping[str, Any], source: str) -> M:
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            known = ", ".join(sorted(model.model_fields))
            raise InputError(f"{source}: unknown key {where}", hint=f"known: {known}") from error
        raise InputError(f"{source}: {where}: {first['msg']}") from error


def _spec(place: str, env: dict[str, str], options: PlanOptions) -> SandboxSpec:
    mounts, masks, python_env = python_runtime() if options.host_python else ((), (), {})
    return SandboxSpec(
        workdir=place,
        env={**python_env, **env},
        mounts=(*mounts, *map(_bind, options.binds)),
        masks=masks,
        hostname=options.hostname,
        uid=options.uid,
        default_route=options.default_route,
    )


def _server(url: str) -> Target:
    scheme, _, rest = url.partition("://")
    target = parse_target(rest.partition("/")[0], {"http": 80, "https": 443}.get(scheme))
    if target is None or target.host in ("::", "::1"):
        raise InputError(f"not a server: {url!r}", hint="write http://HOST:PORT, or a name of NeMo Gym")
    # A server that listens on all addresses is reached on the loopback.
    return Target("127.0.0.1", target.port) if target.host in ("localhost", "0.0.0.0") else target


def _places(workdir: str | None, *, host: bool) -> tuple[str, str, bool]:
    """Return the private directory, the working directory, and whether to create the latter.

    The host's system is read-only, so there the private directory is at the path of the working directory,
    unless commands can write to that path anyway. In an image, the working directory is the image's own.
    """
    private = "/workspace" if host else PRIVATE
    if not workdir:
        return private, private, False
    path = PurePosixPath(workdir)
    if not path.is_absolute() or ".." in path.parts:
        raise InputError(f"workdir {workdir!r} is not an absolute path")
    if path == PurePosixPath("/"):
        return private, "/", False
    writable = any(path.is_relative_to(place) for place in ("/tmp", HOME))
    if not host or writable:
        return private, str(path), True
    return str(path), str(path), False


def _environment(env: Mapping[str, Any]) -> dict[str, str]:
    for name, value in env.items():
        if not name or "=" in name or "\0" in f"{name}{value}":
            raise InputError(f"not an environment variable: {name!r}")
    return {name: str(value) for name, value in env.items()}


def _bind(text: str) -> Mount:
    source, _, rest = text.partition(":")
    target, _, mode = rest.partition(":")
    if not source or not target or mode not in ("", "ro", "rw", "overlay"):
        raise InputError(
            f"not a bind: {text!r}", hint="write SOURCE:TARGET, SOURCE:TARGET:rw or SOURCE:TARGET:overlay"
        )
    path = expand_user(source)
    if not path.exists():
        raise InputError(f"the bind's source {path.absolute()} does not exist", hint="give an absolute path")
    return Mount(source=path.resolve(), target=target, writable=mode == "rw", overlay=mode == "overlay")


def _seconds(name: str, value: float | None) -> float | None:
    if value is None:
        return None
    if not 0 < value < float("inf"):
        raise InputError(f"{name} is {value}; it must be a positive number of seconds")
    return float(value)
