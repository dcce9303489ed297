"""Settings of the agent's own service in a Compose file.

Reference: https://docs.docker.com/reference/compose-file/services/, and `build` and `deploy` beside it.

A setting is applied, or ignored because tests cannot observe it. Any other setting, known or not, is a
reason why the task cannot run: otherwise a policy could get the reward 0 because its environment is not
that of the task.
"""

import posixpath
import re
import shlex
from collections.abc import Callable, Mapping
from typing import Any

from prorl_envs.envs.terminal.compose_variables import MissingVariable, interpolated, parsed_env_file
from prorl_envs.envs.terminal.files import ComposeLoader, Files, mapping_of, text_of
from prorl_envs.envs.terminal.task import Machine, NetworkAccess, dockerfile_of, is_root
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
            "annotations attach container_name cpu_shares depends_on develop dns dns_opt dns_search expose "
            "healthcheck init label_file labels links logging mem_reservation mem_swappiness memswap_limit "
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
#: Fields of the reader from which those of the machine are made.
_COMBINED: Mapping[str, Any] = {"env_file": {}, "environment": {}, "devices": (), "privileged": ()}

type _Setting = Callable[[Any], None]


def with_compose(
    machine: Machine,
    files: Files,
    path: str,
    own: Callable[[Mapping[str, Any]], str],
    variables: Mapping[str, str],
    *,
    always_built: bool,
) -> Machine:
    """Return a machine with the settings of the agent's service in a Compose file.

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
    others = [other for other, service in services.items() if other != name and not service.get("profiles")]
    reader = _Reader(machine, files, path, name, content, variables, always_built)
    found = reader.read(services.get(name, {}))
    return machine.model_copy(update={**found, "services": tuple(sorted(others))})


class _Reader:
    """Reader of the agent's service: collects fields of its machine, and reasons why the task cannot run."""

    def __init__(
        self,
        machine: Machine,
        files: Files,
        path: str,
        name: str,
        content: Mapping[str, Any],
        variables: Mapping[str, str],
        always_built: bool,
    ) -> None:
        self._machine, self._files, self._content = machine, files, content
        self._path, self._always_built = path, always_built
        self._folder = posixpath.dirname(path)
        self._where = f"{path}: services.{name}"
        self._fields: dict[str, Any] = {}
        self._reasons: list[str] = []
        self._variables = dict(variables)
        if (dotenv := posixpath.join(self._folder, ".env")) in files:
            self._variables = {**self._env_file(dotenv), **variables}

    def read(self, service: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of the machine."""
        if not _is_unset(self._content.get("include")):
            self._refuse("include", where=self._path)
        known = {
            "build": self._build,
            "command": lambda value: self._command("command", value),
            "cpus": lambda value: self._cpus("cpus", value),
            "deploy": self._deploy,
            "devices": self._devices,
            "entrypoint": lambda value: self._command("entrypoint", value),
            "env_file": self._env_files,
            "environment": self._environment,
            "gpus": lambda value: self._fields.update(gpus=1),
            "hostname": self._hostname,
            "image": self._image,
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
        default = {} if "network_mode" in service else {"networks": ["default"]}
        self._each("", {**default, **service}, known)
        image = self._fields.pop("image", "")
        built = self._always_built or not _is_unset(service.get("build"))
        if image not in ("", BUILT_IMAGE) and (
            self._machine.image or not built or self._dockerfile_is_missing()
        ):
            self._fields["image"] = image
        fields = {name: self._fields.pop(name, default) for name, default in _COMBINED.items()}
        return {
            **self._fields,
            "env": {**fields["env_file"], **fields["environment"], **self._machine.env},
            "host": (*fields["devices"], *fields["privileged"]),
            "unsupported": tuple(dict.fromkeys(self._reasons)),
        }

    def _each(self, prefix: str, settings: Mapping[Any, Any], known: Mapping[str, _Setting]) -> None:
        """Apply the settings of a section; refuse those that are neither known nor harmless."""
        for name, value in settings.items():
            setting = f"{prefix}{name}"
            if name in _HARMLESS.get(prefix, ()) or str(name).startswith("x-") or _is_unset(value):
                continue
            try:
                known.get(str(name), lambda value, setting=setting: self._refuse(setting))(value)
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
        if isinstance(value, list):
            words = [self._text(setting, word) for word in value]
        else:
            try:
                words = shlex.split(self._text(setting, value))
            except ValueError as error:
                raise self._error(setting, str(error)) from None
        if not _IDLE.fullmatch(" ".join(words)):
            self._refuse(setting)

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
        elif mode not in ("bridge", "default"):
            self._refuse("network_mode")

    def _networks(self, value: Any) -> None:
        """Read the networks of a single service, in which only access to other networks matters."""
        networks = dict.fromkeys(value) if _is_list_of_texts(value) else self._section("networks", value)
        defined = self._section("networks", self._content.get("networks") or {})
        settings = [self._section("networks", defined.get(name) or {}) for name in networks]
        if not all(map(_is_unset, networks.values())) or any(item.get("external") for item in settings):
            self._refuse("networks")
        elif networks and all(item.get("internal") is True for item in settings):
            self._fields["network"] = NetworkAccess()

    # Volumes.

    def _tmpfs(self, value: Any) -> None:
        for item in value if isinstance(value, list) else [value]:
            if not _TEMPORARY.fullmatch(self._text("tmpfs", item).partition(":")[0].rstrip("/")):
                self._refuse("tmpfs")

    def _volumes(self, value: Any) -> None:
        """Refuse all volumes but the benchmark's directories of logs, and temporary file systems.

        The files of the task would have to be read-only, or to reach the verifier with the agent's changes.
        """
        for item in self._list("volumes", value):
            if isinstance(item, Mapping):
                kind, source, target = (
                    self._text("volumes", item.get(key, "")) for key in ("type", "source", "target")
                )
            else:
                kind, (source, _, target) = "bind", self._text("volumes", item).partition(":")
                target = target.partition(":")[0]
            is_log = source.startswith(HOST_LOGS) and _LOGS.fullmatch(target)
            if not is_log and not (kind == "tmpfs" and _TEMPORARY.fullmatch(target)):
                self._refuse("volumes")


def _is_unset(value: Any) -> bool:
    """Return whether a value is the same as none: Compose keeps its default."""
    return value is None or value is False or value in ("", [], {})


def _is_list_of_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)
