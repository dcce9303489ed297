"""Services of a Compose file beside the agent's own.

Reference: https://docs.docker.com/reference/compose-file/services/
"""

import posixpath
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from functools import partial
from graphlib import CycleError, TopologicalSorter
from typing import Any

from prorl_envs.envs.terminal.compose import (
    BUILT_IMAGE,
    FOLDER,
    NAME,
    MachineReader,
    Setting,
    is_unset,
)
from prorl_envs.envs.terminal.files import ComposeLoader, Files, mapping_of, paths_below
from prorl_envs.envs.terminal.task import Machine, Service
from prorl_envs.errors import InputError

#: Fields of a machine that say how its image is built.
_BUILD = ("folder", "image", "dockerfile", "build_args", "build_target", "build_s")
_DURATIONS = ("interval", "timeout", "start_period", "start_interval")
_DURATION = re.compile(r"(?:[0-9]{1,9}(?:\.[0-9]{1,6})?(?:us|ms|s|m|h))+|0")
_PART = re.compile(r"([0-9.]+)(us|ms|s|m|h)")
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_RESTART = re.compile(r"no|always|unless-stopped|on-failure(?::([0-9]{1,6}))?")
#: Restrictions, which programs that respect them cannot observe; and users: all programs run as root.
_RESTRICTIONS = ("cap_drop", "pids_limit", "read_only", "ulimits", "user")
#: Maximum services of a task.
_SERVICES_LIMIT = 32


def with_compose(
    machine: Machine,
    files: Files,
    path: str,
    own: Callable[[Mapping[str, Any]], str],
    variables: Mapping[str, str],
    *,
    always_built: bool,
) -> Machine:
    """Return a machine with the settings of the agent's service in a Compose file, and the other services.

    Args:
        machine: settings of the task's configuration; its variables and working directory take precedence.
        files: the task directory.
        path: path of the Compose file, which may be missing.
        own: returns the name of the agent's service, given all services.
        variables: values for `${NAME}`, in addition to those in the file `.env` beside the Compose file.
        always_built: whether the service is built although the file has no `build`.

    Raises:
        InputError: a value is malformed; the message names the file and the setting.
    """
    if path not in files:
        return machine
    content = mapping_of(files, path, ComposeLoader)
    services = content.get("services")
    if not isinstance(services, Mapping):
        raise InputError(f"{path}: services: not a mapping of mappings")
    services = {str(name): {} if service is None else service for name, service in services.items()}
    if not all(isinstance(service, Mapping) for service in services.values()):
        raise InputError(f"{path}: services: not a mapping of mappings")
    name = own(services)
    # Services with profiles start only on request.
    others = {other: service for other, service in services.items() if not service.get("profiles")}
    others.pop(name, None)
    if len(others) > _SERVICES_LIMIT or not all(map(NAME.fullmatch, others)):
        raise InputError(f"{path}: services: more than {_SERVICES_LIMIT}, or a name that is no host name")

    def reader[R: MachineReader](kind: type[R], name: str, base: Machine, built: bool) -> R:
        return kind(base, files, path, name, content, variables, always_built=built, connected=bool(others))

    base = Machine(folder=posixpath.dirname(path) or ".", network=machine.network, build_s=machine.build_s)
    own_reader = reader(MachineReader, name, machine, always_built)
    agent = machine.model_copy(update=own_reader.read(services.get(name, {})))
    readers = {other: reader(ServiceReader, other, base, False) for other in others}
    found = {other: readers[other].service(service) for other, service in others.items()}
    images: dict[str, Machine] = {
        readers[other].image: found[other] for other in others if readers[other].built
    }
    images[BUILT_IMAGE] = agent
    for other in others:
        depends_on = readers[other].depends_on(others, name)
        update = {**readers[other].build_of(images), "depends_on": depends_on}
        found[other] = found[other].model_copy(update=update)
    _check_order(path, found)
    shared = _shared([one.volumes for one in (own_reader, *readers.values())])
    reasons = [f"{path}: volumes.{source[:100]}: shared by services" for source in shared]
    if name not in services and not always_built:
        reasons.append(f"{path}: services: none is named {name}, the agent's own")
    return agent.model_copy(
        update={
            "depends_on": own_reader.depends_on(others, name) if others else {},
            "services": tuple(found.values()),
            "unsupported": (*agent.unsupported, *reasons),
        }
    )


def _check_order(path: str, services: Mapping[str, Service]) -> None:
    try:
        TopologicalSorter({name: service.depends_on.keys() for name, service in services.items()}).prepare()
    except CycleError as error:
        raise InputError(f"{path}: depends_on: a cycle: {', '.join(sorted(set(error.args[1])))}") from None


def _shared(volumes: Collection[Mapping[str, bool]]) -> list[str]:
    """Return the sources that several services use, without files that all of them only read.

    Args:
        volumes: of each service, whether it only reads a source, by source.
    """
    uses = Counter(source for sources in volumes for source in sources)
    changed = {source for sources in volumes for source, only_read in sources.items() if not only_read}
    return [source for source, count in uses.items() if count > 1 and source in changed]


class ServiceReader(MachineReader):
    """Reader of a service other than the agent's."""

    #: Whether the service has a `build`, so that `image` names the result.
    built = False

    def service(self, service: Mapping[str, Any]) -> Service:
        """Return the service, without its dependencies, and with the name of its image only."""
        self.built = not is_unset(service.get("build"))
        for setting in ("entrypoint", "command"):
            if service.get(setting) in ([], ""):  # unlike a missing one, it removes that of the image
                self._fields[setting] = ()
        fields = {**dict(self._machine), **self.read(service)}
        if not self.built and not self.image:
            fields["unsupported"] = (*fields["unsupported"], f"{self._where}: neither image nor build")
        return Service(name=self._name, **fields)

    def build_of(self, images: Mapping[str, Machine]) -> dict[str, Any]:
        """Return the fields of the build, if another service builds the image that this one names."""
        other = None if self.built else images.get(self.image)
        return {} if other is None else {name: getattr(other, name) for name in _BUILD}

    def _known(self) -> dict[str, Setting]:
        ignored: dict[str, Setting] = dict.fromkeys(_RESTRICTIONS, lambda value: None)
        own: dict[str, Setting] = {
            "command": lambda value: self._fields.update(command=self._words("command", value)),
            "entrypoint": lambda value: self._fields.update(entrypoint=self._words("entrypoint", value)),
            "healthcheck": self._healthcheck,
            "restart": self._restart,
        }
        return {**super()._known(), **ignored, **own}

    def _healthcheck(self, value: Any) -> None:
        known: dict[str, Setting] = {
            **{name: partial(self._duration, name) for name in _DURATIONS},
            "disable": lambda value: self._check.update(test=("NONE",)),
            "retries": self._retries,
            "test": self._test,
        }
        self._check: dict[str, Any] = {}
        self._each("healthcheck.", self._section("healthcheck", value), known)
        self._fields["healthcheck"] = self._check

    def _test(self, value: Any) -> None:
        words = (
            ("CMD-SHELL", self._text("test", value)) if isinstance(value, str) else self._words("test", value)
        )
        counts = {"NONE": len(words) > 0, "CMD": len(words) > 1, "CMD-SHELL": len(words) == 2}
        if not counts.get(words[0] if words else ""):
            raise self._error("healthcheck.test", "needs NONE, CMD or CMD-SHELL, and a command")
        self._check.setdefault("test", words)

    def _duration(self, name: str, value: Any) -> None:
        text = self._text(f"healthcheck.{name}", value)
        if not _DURATION.fullmatch(text):
            raise self._error(f"healthcheck.{name}", f"not a duration: {text[:100]!r}")
        seconds = sum(float(number) * _SECONDS[unit] for number, unit in _PART.findall(text))
        if seconds:
            self._check[f"{name}_s"] = seconds

    def _retries(self, value: Any) -> None:
        text = self._text("healthcheck.retries", value)
        if not re.fullmatch("[0-9]{1,6}", text):
            raise self._error("healthcheck.retries", f"not a number: {text[:100]!r}")
        if int(text):
            self._check["retries"] = int(text)

    def _restart(self, value: Any) -> None:
        match = _RESTART.fullmatch(text := self._text("restart", value))
        if match is None:
            raise self._error("restart", f"not a policy: {text[:100]!r}")
        always = text in ("always", "unless-stopped")
        restarts = 0 if text == "no" else int(match[1]) if match[1] else None
        self._fields.update(always=always, restarts=restarts)

    def _tmpfs(self, value: Any) -> None:
        for item in value if isinstance(value, list) else [value]:
            self._private_volume("", self._text("tmpfs", item).partition(":")[0], False)

    def _volumes(self, value: Any) -> None:
        for item in self._list("volumes", value):
            kind, source, target, only_read = self._volume(item)
            if not FOLDER.fullmatch(target) or kind not in ("volume", "tmpfs", "bind"):
                self._refuse("volumes")
            elif kind != "bind":
                self._private_volume(source if kind == "volume" else "", target, only_read)
            else:
                self._task_files(source, target.rstrip("/"), only_read)

    def _task_files(self, source: str, target: str, only_read: bool) -> None:
        """Copy files of the task to the service, which may change its copies."""
        try:
            path = self._task_path("volumes", self._folder, source)
        except InputError:  # such as a socket of the host
            self._refuse("volumes")
            return
        self.volumes[f"./{path}"] = only_read
        files = {target: path} if path in self._files else {}
        files |= {f"{target}/{name}": found for name, found in paths_below(self._files, path).items()}
        self._fields["files"] = {**self._fields.get("files", {}), **files}
        if not files:
            self._private_volume("", target, only_read)
