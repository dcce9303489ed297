"""From what NeMo Gym asks of a sandbox to what ours can be. Imports nothing of NeMo Gym."""

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from prorl_envs.errors import InputError
from prorl_envs.images.sources import Kind, Source
from prorl_envs.images.template import ImageTemplate
from prorl_envs.nemo.images import image_source
from prorl_envs.sandbox.base import Limits, Mount, SandboxSpec
from prorl_envs.sandbox.command import HOME
from prorl_envs.sandbox.runtime import python_runtime

#: Where a sandbox has its private empty directory when the commands run elsewhere.
PRIVATE = "/sandbox"
_READY_S = 120.0
#: Of NeMo Gym's resources: the name, ours, the unit, and how many of ours make one.
_RESOURCES = (
    ("cpu", "cpus", "CPUs", 1),
    ("memory_mib", "memory_bytes", "MiB of memory", 1 << 20),
    ("disk_gib", "disk_bytes", "GiB of disk", 1 << 30),
)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class Options(_Strict):
    """`provider_options` of one sandbox; the provider's own `options` are the defaults.

    Args:
        image_variables: values for `{{ NAME }}`, where the image is a definition.
        uid: user id inside. 0 looks like root and still has no capability.
        binds: host paths that appear inside, `SOURCE:TARGET[:MODE]`; MODE is `ro` (the default), `rw`
            (the host's path itself) or `overlay` (a private copy-on-write view of a directory).
        hostname: name the sandbox sees itself under.
        default_route: connections to outside time out instead of failing at once.
        host_python: this process's Python with its packages, at the same paths, read-only.
    """

    image_variables: dict[str, str] = {}
    uid: int = Field(default=0, ge=0, le=65_533)
    binds: Annotated[tuple[str, ...], BeforeValidator(_as_list)] = ()
    hostname: str = "sandbox"
    default_route: bool = False
    host_python: bool = False


class ProviderConfig(_Strict):
    """The provider's block in a configuration: `{prorl: {...}}`.

    Args:
        driver: what makes the sandboxes; None takes the setting `driver`.
        run_dir: directory on a local disk below which sandboxes keep their files; None takes the setting
            `run_dir`.
        default_timeout_s: seconds a command may take where the caller names no time.
        output_limit: bytes kept of stdout and of stderr of each command; the middle of more is cut.
        concurrency: commands under way in one sandbox; further ones wait.
        unenforced: what happens where a sandbox asks for limits that are not kept here: `warn` or `error`.
        options: see `Options`.
    """

    driver: Literal["auto", "namespaces", "bubblewrap", "apptainer", "instance", "local"] | None = None
    run_dir: Path | None = None
    default_timeout_s: float = Field(default=180.0, gt=0, allow_inf_nan=False)
    output_limit: int = Field(default=4 * 1024 * 1024, ge=1024, le=16 * 1024 * 1024)
    concurrency: int = Field(default=128, ge=1, le=200)
    unenforced: Literal["warn", "error"] = "warn"
    options: Options = Options()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One sandbox, ready to be started.

    Args:
        spec: what the driver starts, but for the image.
        image: where it comes from, for `ImageBuilder.resolve`.
        asked: the limits that were asked for, in words, by their names in `Limits`.
        workdir: where commands start.
        make_workdir: whether it must be made once the sandbox runs.
        files: text by path, put there before the entry point starts.
        entrypoint: runs beside the commands for as long as the sandbox; empty for none.
        ttl_s: seconds after which the sandbox ends.
        ready_s: seconds its start may take, once its image is there.
    """

    spec: SandboxSpec
    image: ImageTemplate | Source
    asked: Mapping[str, str]
    workdir: str
    make_workdir: bool
    files: Mapping[str, str]
    entrypoint: tuple[str, ...]
    ttl_s: float | None
    ready_s: float

    def with_image(self, image: Path | None, env: Mapping[str, str]) -> SandboxSpec:
        """What the driver starts, once it is known where the image lies, and what variables it sets."""
        return dataclasses.replace(self.spec, image=image, env={**env, **self.spec.env})


def provider_config(values: Mapping[str, Any]) -> ProviderConfig:
    """Raises InputError where a setting is unknown or wrong."""
    return _checked(ProviderConfig, values, "sandbox provider prorl")


def plan(asked: Any, config: ProviderConfig, limits: Limits) -> Plan:
    """Translate a request. Looks at the image and the binds.

    Args:
        asked: a `nemo_gym.sandbox.SandboxSpec`, of 0.4 or later.
        config: the provider's.
        limits: of a sandbox that asks for no others.

    Raises:
        InputError: it asks for what these sandboxes cannot be, or is wrong in itself.
    """
    given = {**config.options.model_dump(), **dict(asked.provider_options or {})}
    options = _checked(Options, given, "provider_options")
    if getattr(asked, "ports", ()):
        raise InputError(
            f"ports {list(asked.ports)} were asked for, and a sandbox has no network but its own loopback",
            hint="run the client of that service in the sandbox too",
        )
    image = image_source(asked.image, options.image_variables)
    host = isinstance(image, Source) and image.kind is Kind.HOST
    place, workdir, make_workdir = _places(asked.workdir, host=host)
    bounds, words = _limits(asked.resources, limits)
    return Plan(
        spec=dataclasses.replace(_spec(place, _environment(asked.env or {}), options), limits=bounds),
        image=image,
        asked=words,
        workdir=workdir,
        make_workdir=make_workdir,
        files={str(path): str(text) for path, text in (asked.files or {}).items()},
        entrypoint=tuple(map(str, asked.entrypoint or ())),
        ttl_s=_seconds("ttl_s", asked.ttl_s),
        ready_s=_seconds("ready_timeout_s", asked.ready_timeout_s) or _READY_S,
    )


def unenforced(asked: Mapping[str, str], kept: Collection[str], config: ProviderConfig) -> tuple[str, ...]:
    """What to warn of: the limits that were asked for and are not kept.

    Args:
        asked: see `Plan`.
        kept: what the driver keeps, by the names in `Limits`.

    Raises:
        InputError: there are such limits, and the provider is not to start without.
    """
    lost = tuple(f"a limit of {words} is not kept here" for name, words in asked.items() if name not in kept)
    if lost and config.unenforced == "error":
        raise InputError("; ".join(lost), hint="leave them out, or set `unenforced: warn`")
    return lost


def _limits(resources: Any, limits: Limits) -> tuple[Limits, dict[str, str]]:
    """A `SandboxResources` over the limits of those that ask for none, and what it asks for in words."""
    if resources.gpu:
        raise InputError("a GPU was asked for", hint="these sandboxes have no devices: leave `gpu` out")
    bounds: dict[str, Any] = {}
    words: dict[str, str] = {}
    for key, name, unit, factor in _RESOURCES:
        value = getattr(resources, key)
        if value is not None:
            bounds[name] = value * factor
            words[name] = f"{value:g} {unit}"
    return dataclasses.replace(limits, **bounds), words


def _checked[M: BaseModel](model: type[M], values: Mapping[str, Any], what: str) -> M:
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            known = ", ".join(sorted(model.model_fields))
            raise InputError(f"{what}: unknown key {where}", hint=f"known: {known}") from error
        raise InputError(f"{what}: {where}: {first['msg']}") from error


def _spec(place: str, env: dict[str, str], options: Options) -> SandboxSpec:
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


def _places(workdir: str | None, *, host: bool) -> tuple[str, str, bool]:
    """The private directory, the working directory, and whether the latter must be made.

    On the host's system, which is read-only, the working directory is the private one, unless it lies where
    commands can write anyway. In an image it is the image's own, with what the image has there.
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
            f"not a bind: {text!r}", hint="SOURCE:TARGET, or with :ro, :rw or :overlay behind it"
        )
    path = Path(source).expanduser()
    if not path.exists():
        raise InputError(f"the bind's source {source} does not exist")
    return Mount(source=path.resolve(), target=target, writable=mode == "rw", overlay=mode == "overlay")


def _seconds(name: str, value: float | None) -> float | None:
    if value is None:
        return None
    if not 0 < value < float("inf"):
        raise InputError(f"{name} is {value}; it must be a positive number of seconds")
    return float(value)
