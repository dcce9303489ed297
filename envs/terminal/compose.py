"""Settings of the agent's own service in a Compose file; `compose_services` reads the others.

Reference: https://docs.docker.com/reference/compose-file/services/, and `build` and `deploy` beside it.

A setting is applied, or ignored because tests cannot observe it. Any other setting, known or not, is a
reason why the task cannot run: otherwise a policy could get the reward 0 because its environment is not
that of the task.
"""

import contextlib
import posixpath
import re
import shlex
from collections.abc import Callable, Collection, Mapping
from typing import Any, get_args

from prorl_envs.envs.terminal.compose_variables import MissingVariable, interpolated, parsed_env_file
from prorl_envs.envs.terminal.files import Files, text_of
from prorl_envs.envs.terminal.task import Condition, Machine, NetworkAccess, dockerfile_of, is_root
from prorl_envs.errors import InputError
from prorl_envs.images.registry.documents import host_platform

#: Value of the variables that name the image which the benchmark builds from the Dockerfile.
BUILT_IMAGE = "built-from-the-dockerfile"
#: Value of the variables that name directories of the benchmark on the host.
HOST_LOGS = "/host-logs"
#: Directories of containers in which the benchmarks mount directories of the host.
_LOGS = re.compile(r"/(?:logs|agent-logs)(?:/.*)?")
#: Directories for temporary files, which every sandbox has.
_TEMPORARY = re.compile(r"/(?:tmp|run|var/run|dev/shm)")
#: Settings of the service, its build, and its deployment that tests cannot observe.
_HARMLESS = {
    "": frozenset(
        re.findall(
            r"\w+",
            "annotations attach container_name cpu_shares develop dns dns_opt dns_search expose "
            "healthcheck init label_file labels logging mem_reservation mem_swappiness memswap_limit "
            "oom_score_adj ports pull_policy restart shm_size stdin_open stop_grace_period stop_signal tty",
        )
    ),
    "build.": frozenset(
        ("cache_from", "cache_to", "labels", "no_cache", "provenance", "pull", "sbom", "shm_size", "tags")
    ),
    "deploy.": frozenset(("endpoint_mode", "labels", "restart_policy", "rollback_config", "update_config")),
    "deploy.resources.reservations.": frozenset(("cpus", "memory")),
}
#: Commands that only keep a container running.
_IDLE = re.compile(
    r"(?:(?:/bin/)?(?:ba)?sh -l?c )?(?:exec )?"
    r"(?:sleep (?:infinity|inf|[0-9]+[smhd]?)|tail -[fF] /dev/null|cat|(?:/(?:usr/)?bin/)?(?:ba)?sh(?: -l)?"
    r"|while (?:true|:); ?do sleep [0-9]+[smhd]?; ?done)"
)
_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,6})?) ?([kmgt]?)b?", re.IGNORECASE)
_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_CPUS = re.compile(r"[0-9]{1,6}(?:\.[0-9]{1,6})?")
_HOSTNAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?")
#: Names of services, by which others reach them.
NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,251}[A-Za-z0-9])?")
#: Directories that a volume may have: not the whole root.
FOLDER = re.compile(r"(?:/(?!\.\.?(?:/|$))[^/\0]+)+/?")
#: Fields of the reader from which those of the machine are made.
_COMBINED: Mapping[str, Any] = {
    "env_file": {},
    "environment": {},
    "devices": (),
    "privileged": (),
    "networks": {},
}

#: Default condition of `depends_on`.
STARTED: Condition = "service_started"

type Setting = Callable[[Any], None]


class MachineReader:
    """Reader of the agent's service: collects fields of its machine, and reasons why the task cannot run.

    Args:
        machine: settings of the task's configuration; its variables and working directory take precedence.
        files: the task directory.
        path: path of the Compose file.
        name: name of the service.
        content: the Compose file.
        variables: values for `${NAME}`, in addition to those in the file `.env` beside the Compose file.
        always_built: whether the service is built although the file has no `build`.
        connected: whether there are other services.
    """

    def __init__(
        self,
        machine: Machine,
        files: Files,
        path: str,
        name: str,
        content: Mapping[str, Any],
        variables: Mapping[str, str],
        *,
        always_built: bool,
        connected: bool,
    ) -> None:
        self._machine, self._files, self._content = machine, files, content
        self._path, self._name = path, name
        self._always_built, self._connected = always_built, connected
        self._folder = posixpath.dirname(path)
        self._where = f"{path}: services.{name}"
        self._fields: dict[str, Any] = {}
        self._reasons: list[str] = []
        #: Sources of the service's volumes, and whether it only reads them.
        self.volumes: dict[str, bool] = {}
        #: Conditions of the start by service; and services that may be missing.
        self._depends: dict[str, Condition] = {}
        self._optional: set[str] = set()
        #: Name of the service's image, which other services may use.
        self.image = ""
        self._variables = dict(variables)
        if (dotenv := posixpath.join(self._folder, ".env")) in files:
            self._variables = {**self._env_file(dotenv), **variables}

    def read(self, service: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of the machine."""
        if not is_unset(self._content.get("include")):
            self._refuse("include", where=self._path)
        default = {} if "network_mode" in service else {"networks": ["default"]}
        self._each("", {**default, **service}, self._known())
        self.image = image = self._fields.pop("image", "")
        built = self._always_built or not is_unset(service.get("build"))
        if image not in ("", BUILT_IMAGE) and (
            self._machine.image or not built or self._dockerfile_is_missing()
        ):
            self._fields["image"] = image
        fields = {name: self._fields.pop(name, default) for name, default in _COMBINED.items()}
        return {
            **self._fields,
            "env": {**fields["env_file"], **fields["environment"], **self._machine.env},
            "host": (*fields["devices"], *fields["privileged"]),
            "networks": self._with_container_name(fields["networks"], service.get("container_name")),
            "unsupported": tuple(dict.fromkeys(self._reasons)),
        }

    def _known(self) -> dict[str, Setting]:
        return {
            "build": self._build,
            "command": lambda value: self._command("command", value),
            "cpus": lambda value: self._cpus("cpus", value),
            "depends_on": self._depends_on,
            "deploy": self._deploy,
            "devices": self._devices,
            "entrypoint": lambda value: self._command("entrypoint", value),
            "env_file": self._env_files,
            "environment": self._environment,
            "gpus": lambda value: self._fields.update(gpus=1),
            "hostname": self._hostname,
            "image": self._image,
            "links": self._links,
            "mem_limit": lambda value: self._memory("mem_limit", value),
            "network_mode": self._network_mode,
            "networks": self._networks,
            "platform": lambda value: self._only("platform", value, host_platform()),
            "privileged": self._privileged,
            "security_opt": self._security,
            "tmpfs": self._tmpfs,
            "user": self._user,
            "volumes": self._volumes,
            "working_dir": self._working_dir,
        }

    def _each(self, prefix: str, settings: Mapping[Any, Any], known: Mapping[str, Setting]) -> None:
        """Apply the settings of a section; refuse those that are neither known nor harmless."""
        for name, value in settings.items():
            setting, apply = f"{prefix}{name}", known.get(str(name))
            harmless = apply is None and name in _HARMLESS.get(prefix, ())
            if harmless or str(name).startswith("x-") or is_unset(value):
                continue
            try:
                if apply is None:
                    self._refuse(setting)
                else:
                    apply(value)
            except MissingVariable as error:
                self._reasons.append(str(error))

    def _refuse(self, setting: str, *, where: str = "") -> None:
        self._reasons.append(f"{where or self._where}.{setting[:100]}: cannot be applied here")

    def _only(self, setting: str, value: Any, *allowed: str) -> None:
        """Refuse all values but those that change nothing."""
        if self._text(setting, value) not in allowed:
            self._refuse(setting)

    # Values.

    def _error(self, setting: str, problem: str) -> InputError:
        return InputError(f"{self._where}.{setting}: {problem}")

    def _text(self, setting: str, value: Any) -> str:
        """Return a scalar as text, with its references replaced."""
        if isinstance(value, bool):
            return str(value).lower()
        if not isinstance(value, str | int | float):
            raise self._error(setting, "not a text")
        try:
            return interpolated(str(value), self._variables)
        except ValueError as error:
            raise self._error(setting, str(error)) from None

    def _list(self, setting: str, value: Any) -> list[Any]:
        if not isinstance(value, list):
            raise self._error(setting, "not a list")
        return value

    def _section(self, setting: str, value: Any) -> Mapping[Any, Any]:
        if not isinstance(value, Mapping):
            raise self._error(setting, "not a mapping")
        return value

    def _pairs(self, setting: str, value: Any) -> dict[str, str]:
        """Return variables from a mapping or a list; without a value, a variable is the user's, if set."""
        # Nested values are refused: with YAML's aliases, their text can be enormous.
        if isinstance(value, Mapping) and not any(
            isinstance(item, Mapping | list) for item in value.values()
        ):
            pairs = [
                (str(name), None if item is None else self._text(setting, item))
                for name, item in value.items()
            ]
        elif isinstance(value, list) and all(isinstance(item, str) for item in value):
            texts = [self._text(setting, item).partition("=") for item in value]
            pairs = [(name, item if equals else None) for name, equals, item in texts]
        else:
            raise self._error(setting, "neither a mapping of scalars nor a list of texts")
        for name, item in pairs:
            if not name or "=" in name or "\0" in name + (item or ""):
                raise self._error(setting, f"{name[:100]!r} cannot be set")
        found = {name: self._variables.get(name) if item is None else item for name, item in pairs}
        return {name: item for name, item in found.items() if item is not None}

    def _task_path(self, setting: str, folder: str, path: str) -> str:
        """Return the path of a file or folder in the task directory."""
        found = posixpath.normpath(posixpath.join(folder, path))
        if "://" in path or path.startswith("git@") or found.startswith(("/", "../")) or found == "..":
            raise self._error(setting, f"{path[:200]!r} is not in the task directory")
        return found

    # Environment.

    def _environment(self, value: Any) -> None:
        self._fields["environment"] = self._pairs("environment", value)

    def _env_files(self, value: Any) -> None:
        found: dict[str, str] = {}
        for item in value if isinstance(value, list) else [value]:
            entry = {"path": item} if isinstance(item, str) else self._section("env_file", item)
            path = self._task_path("env_file", self._folder, self._text("env_file", entry.get("path")))
            if path in self._files:
                found |= self._env_file(path, raw=entry.get("format") == "raw")
            elif entry.get("required", True):
                raise self._error("env_file", f"{path} is missing")
        self._fields["env_file"] = found

    def _env_file(self, path: str, *, raw: bool = False) -> dict[str, str]:
        try:
            return parsed_env_file(text_of(self._files, path), self._variables, raw=raw)
        except ValueError as error:
            raise InputError(f"{path}: {error}") from None

    def _working_dir(self, value: Any) -> None:
        self._fields["workdir"] = self._machine.workdir or self._text("working_dir", value)

    def _user(self, value: Any) -> None:
        if not is_root(self._text("user", value)):
            self._refuse("user")

    def _hostname(self, value: Any) -> None:
        name = self._text("hostname", value)
        if not _HOSTNAME.fullmatch(name):
            raise self._error("hostname", f"not a host name: {name[:100]!r}")
        self._fields["hostname"] = name

    def _command(self, setting: str, value: Any) -> None:
        """Refuse a command that starts a service: processes run only while the agent and the tests do."""
        if not _IDLE.fullmatch(" ".join(self._words(setting, value))):
            self._refuse(setting)

    def _words(self, setting: str, value: Any) -> tuple[str, ...]:
        if isinstance(value, list):
            return tuple(self._text(setting, word) for word in value)
        try:
            return tuple(shlex.split(self._text(setting, value)))
        except ValueError as error:
            raise self._error(setting, str(error)) from None

    # Image.

    def _image(self, value: Any) -> None:
        self._fields["image"] = self._text("image", value)

    def _build(self, value: Any) -> None:
        section = {"context": value} if isinstance(value, str) else self._section("build", value)
        known = {
            "args": lambda value: self._fields.update(build_args=self._pairs("build.args", value)),
            "context": lambda value: self._fields.update(
                folder=self._task_path("build.context", self._folder, self._text("build.context", value))
            ),
            "dockerfile": lambda value: self._fields.update(dockerfile=self._text("build.dockerfile", value)),
            "network": lambda value: self._only("build.network", value, "default"),
            "platforms": lambda value: self._platforms(value),
            "target": lambda value: self._fields.update(build_target=self._text("build.target", value)),
        }
        self._each("build.", section, known)
        folder = self._fields.get("folder", self._machine.folder)
        if dockerfile := self._fields.get("dockerfile"):
            path = self._task_path("build.dockerfile", folder, dockerfile)
            self._fields["dockerfile"] = "" if path == posixpath.normpath(f"{folder}/Dockerfile") else path
            if folder != "." and not path.startswith(f"{folder}/"):
                self._refuse("build.dockerfile")

    def _platforms(self, value: Any) -> None:
        if host_platform() not in [
            self._text("build.platforms", item) for item in self._list("build.platforms", value)
        ]:
            self._refuse("build.platforms")

    def _dockerfile_is_missing(self) -> bool:
        return dockerfile_of(self._machine.model_copy(update=self._fields)) not in self._files

    # Resources.

    def _cpus(self, setting: str, value: Any) -> None:
        text = self._text(setting, value)
        if text and not _CPUS.fullmatch(text):
            raise self._error(setting, f"not a number: {text[:100]!r}")
        if text and float(text):
            self._fields["cpus"] = float(text)

    def _memory(self, setting: str, value: Any) -> None:
        text = self._text(setting, value)
        match = _SIZE.fullmatch(text)
        if text and match is None:
            raise self._error(setting, f"not a size: {text[:100]!r}")
        if match is not None and (size := int(float(match[1]) * _UNITS[match[2].lower()])):
            self._fields["memory_bytes"] = size

    def _deploy(self, value: Any) -> None:
        self._each(
            "deploy.",
            self._section("deploy", value),
            {
                "mode": lambda value: self._only("deploy.mode", value, "replicated"),
                "replicas": lambda value: self._only("deploy.replicas", value, "1"),
                "resources": lambda value: self._each(
                    "deploy.resources.",
                    self._section("deploy.resources", value),
                    {"limits": self._limits, "reservations": self._reservations},
                ),
            },
        )

    def _limits(self, value: Any) -> None:
        prefix = "deploy.resources.limits"
        known = {
            "cpus": lambda value: self._cpus(f"{prefix}.cpus", value),
            "memory": lambda value: self._memory(f"{prefix}.memory", value),
        }
        self._each(f"{prefix}.", self._section(prefix, value), known)

    def _reservations(self, value: Any) -> None:
        prefix = "deploy.resources.reservations"
        known = {"devices": lambda value: self._fields.update(gpus=1)}
        self._each(f"{prefix}.", self._section(prefix, value), known)

    # Parts of the host.

    def _devices(self, value: Any) -> None:
        devices = [
            item.get("source") if isinstance(item, Mapping) else item for item in self._list("devices", value)
        ]
        self._fields["devices"] = [self._text("devices", item).partition(":")[0][:200] for item in devices]

    def _privileged(self, value: Any) -> None:
        if self._text("privileged", value) != "false":
            self._fields["privileged"] = ["privileged"]

    def _security(self, value: Any) -> None:
        for item in self._list("security_opt", value):
            self._only(
                "security_opt", item, "no-new-privileges", "no-new-privileges:true", "no-new-privileges=true"
            )

    # Network.

    def _network_mode(self, value: Any) -> None:
        mode = self._text("network_mode", value)
        if mode == "none":
            self._fields["network"] = NetworkAccess()
            self._fields["networks"] = {}
        elif mode not in ("bridge", "default"):
            self._refuse("network_mode")

    def _networks(self, value: Any) -> None:
        networks = dict.fromkeys(value) if is_list_of_texts(value) else self._section("networks", value)
        defined = self._section("networks", self._content.get("networks") or {})
        settings = [self._section("networks", defined.get(name) or {}) for name in networks]
        names = {str(network): self._names(own) for network, own in networks.items()}
        if None in names.values() or any(item.get("external") for item in settings):
            self._refuse("networks")
            return
        self._fields["networks"] = names
        if networks and all(item.get("internal") is True for item in settings):
            self._fields["network"] = NetworkAccess()

    def _names(self, own: Any) -> tuple[str, ...] | None:
        """Return the names of the service in a network; None if a setting of it cannot be applied."""
        section = {} if is_unset(own) else self._section("networks", own)
        if section.keys() - ({"aliases"} if self._connected else ()):
            return None
        aliases = [
            self._text("aliases", alias) for alias in self._list("aliases", section.get("aliases", []))
        ]
        return (self._name, *aliases) if all(map(NAME.fullmatch, aliases)) else None

    def _links(self, value: Any) -> None:
        """Refuse names that only this service would have for others; it reaches them by their own names."""
        for item in self._list("links", value):
            service, _, alias = self._text("links", item).partition(":")
            self._depends.setdefault(service, STARTED)
            if alias not in ("", service):
                self._refuse("links")

    def _depends_on(self, value: Any) -> None:
        if is_list_of_texts(value):
            value = {name: {} for name in value}
        for name, settings in self._section("depends_on", value).items():
            section = self._section("depends_on", settings or {})
            condition = section.get("condition", STARTED)
            if condition not in get_args(Condition.__value__):
                raise self._error("depends_on", f"not a condition: {str(condition)[:100]!r}")
            self._depends[str(name)] = condition
            if section.get("required") is False:
                self._optional.add(str(name))

    def depends_on(self, services: Collection[str], agent: str) -> dict[str, Condition]:
        """Return the conditions of the start by service. The agent's sandbox starts first, and runs always.

        Raises:
            InputError: there is no such service.
        """
        for name in self._depends.keys() - {agent, *services} - self._optional:
            raise self._error("depends_on", f"no service {name[:100]!r}")
        return {name: condition for name, condition in self._depends.items() if name in services}

    def _with_container_name(self, networks: Mapping[str, Any], value: Any) -> dict[str, tuple[str, ...]]:
        """Return the names of the service by network. Others reach it by the name of its container, too."""
        with contextlib.suppress(MissingVariable, InputError):
            name = self._text("container_name", value)
            if NAME.fullmatch(name):
                return {network: (*names, name) for network, names in networks.items()}
        return dict(networks)

    # Volumes.

    def _tmpfs(self, value: Any) -> None:
        for item in value if isinstance(value, list) else [value]:
            if not _TEMPORARY.fullmatch(self._text("tmpfs", item).partition(":")[0].rstrip("/")):
                self._refuse("tmpfs")

    def _volumes(self, value: Any) -> None:
        """Refuse files of the task: they would have to be read-only, or to reach the verifier, changed."""
        for item in self._list("volumes", value):
            kind, source, target, only_read = self._volume(item)
            is_log = source.startswith(HOST_LOGS) and _LOGS.fullmatch(target)
            is_temporary = kind == "tmpfs" and _TEMPORARY.fullmatch(target)
            if kind == "volume" and FOLDER.fullmatch(target):
                self._private_volume(source, target, only_read)
            elif not is_log and not is_temporary:
                self._refuse("volumes")

    def _volume(self, item: Any) -> tuple[str, str, str, bool]:
        """Return the kind of a volume, its source, its target, and whether it is only read."""
        if isinstance(item, Mapping):
            kind, source, target = (
                self._text("volumes", item.get(key, "")) for key in ("type", "source", "target")
            )
            options = item.get("volume")
            is_part = isinstance(options, Mapping) and not is_unset(options.get("subpath"))
            return "part" if is_part else kind, source, target, item.get("read_only") is True
        source, colon, rest = self._text("volumes", item).partition(":")
        target, _, mode = rest.partition(":")
        if not colon:
            return "volume", "", source, False
        kind = "bind" if source.startswith((".", "/", "~")) else "volume"
        return kind, source, target, "ro" in mode.split(",")

    def _private_volume(self, source: str, target: str, only_read: bool) -> None:
        """Use a directory of the service itself, because no other service has the volume."""
        defined = self._section("volumes", self._content.get("volumes") or {})
        settings = self._section("volumes", defined.get(source) or {})
        if settings.get("external") or settings.get("driver_opts"):
            self._refuse("volumes")
        if source:
            self.volumes[source] = only_read
        self._fields["folders"] = (*self._fields.get("folders", ()), target)


def is_unset(value: Any) -> bool:
    """Return whether a value is the same as none: Compose keeps its default."""
    return value is None or value is False or value in ("", [], {})


def is_list_of_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)
