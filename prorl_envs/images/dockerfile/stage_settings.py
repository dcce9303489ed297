"""Settings of a stage, such as its environment, as its instructions change them."""

import posixpath
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from prorl_envs.images.dockerfile.expand import ExpansionError, expand, split_words
from prorl_envs.images.dockerfile.parser import Dockerfile, Instruction, json_items
from prorl_envs.images.dockerfile.stages import declared_args
from prorl_envs.sandbox.filesystem.layered import ImageConfig
from prorl_envs.sandbox.filesystem.mount_plan import DEFAULT_ENV

_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ns|us|ms|s|m|h)")
_NANOSECONDS = {"ns": 1, "us": 1e3, "ms": 1e6, "s": 1e9, "m": 60e9, "h": 3600e9}
#: Arguments that RUN can use without ARG. They are not part of a layer's key.
PROXY_ARGS = frozenset(
    name
    for lower in ("http_proxy", "https_proxy", "ftp_proxy", "no_proxy", "all_proxy")
    for name in (lower, lower.upper())
)
_VARIABLES_LIMIT = 4096
#: Variables that a base without them has, so that `ENV PATH=/opt/bin:$PATH` only adds a folder.
_DEFAULTS = {"PATH": DEFAULT_ENV["PATH"]}


class StageSettings:
    """Settings that the instructions of a stage read and change.

    Args:
        config: settings of its base image.
        given: arguments from the caller of the build.
        inherited: arguments before the first FROM, and predefined ones.
        variables: variables of the stage that this one is based on.
    """

    def __init__(
        self,
        dockerfile: Dockerfile,
        config: ImageConfig,
        given: Mapping[str, str],
        inherited: Mapping[str, str],
        variables: Mapping[str, str],
    ) -> None:
        self._dockerfile, self._given, self._inherited = dockerfile, given, inherited
        self.env = dict(config.env)
        #: Variables that instructions expand. Of an ENV and an ARG with the same name, the later one counts.
        self.variables = {**variables, **config.env}
        self._fields: dict[str, Any] = {}
        self._base = config

    @property
    def config(self) -> ImageConfig:
        """The image's settings."""
        return replace(self._base, **self._fields, env=dict(self.env))

    @property
    def workdir(self) -> str:
        return str(self._fields.get("workdir", self._base.workdir)) or "/"

    @property
    def shell(self) -> tuple[str, ...]:
        return tuple(self._fields.get("shell", self._base.shell))

    @property
    def proxy_environment(self) -> dict[str, str]:
        """Proxy variables among the arguments of the build."""
        return {name: value for name, value in self._given.items() if name in PROXY_ARGS}

    def expand(self, instruction: Instruction, text: str, *, keep_quotes: bool = False) -> str:
        """Replace the variables of a text.

        Raises:
            DockerfileError: the text is incomplete.
        """
        try:
            return expand(
                text, _DEFAULTS | self.variables, escape=self._dockerfile.escape, keep_quotes=keep_quotes
            )
        except ExpansionError as error:
            raise self._dockerfile.error(instruction, error.message, error.hint) from error

    def words(self, instruction: Instruction) -> list[str]:
        """Return the arguments of an instruction with their variables replaced.

        Raises:
            DockerfileError: an argument is incomplete.
        """
        escape = self._dockerfile.escape
        if instruction.items is not None:
            return [self.expand(instruction, item) for item in instruction.items]
        return [self.expand(instruction, word) for word in split_words(instruction.text, escape=escape)]

    def path_inside(self, path: str) -> str:
        """Resolve a path against the working directory. A `/` at its end stays."""
        joined = posixpath.normpath(posixpath.join(self.workdir, path)).replace("//", "/")
        is_folder = path.endswith("/") or path in (".", "..") or path.endswith(("/.", "/.."))
        return f"{joined.rstrip('/')}/" if is_folder else joined

    def apply(self, instruction: Instruction) -> None:
        """Apply an instruction that changes settings; ignore others.

        Raises:
            DockerfileError: its arguments are invalid.
        """
        match instruction.name:
            case "ENV":
                pairs = self._pairs(instruction)
                self.variables |= pairs
                self.env |= pairs
                if len(self.env) > _VARIABLES_LIMIT:
                    raise self._dockerfile.error(instruction, f"more than {_VARIABLES_LIMIT} values")
            case "ARG":
                self.variables |= declared_args(
                    self._dockerfile, instruction, self.variables, self._given, self._inherited
                )
            case "WORKDIR":
                path = self.path_inside(self.expand(instruction, instruction.text))
                self._fields["workdir"] = path.rstrip("/") or "/"
            case "SHELL":
                if not instruction.items:
                    raise self._dockerfile.error(instruction, "needs a JSON list of strings")
                self._fields["shell"] = instruction.items
            case "ENTRYPOINT":
                self._fields["entrypoint"] = self._program(instruction)
                self._fields.setdefault("command", ())  # a CMD of the base belongs to its own entry point
            case "CMD":
                self._fields["command"] = self._program(instruction)
            case "HEALTHCHECK":
                self._fields["healthcheck"] = self._healthcheck(instruction)

    def _program(self, instruction: Instruction) -> tuple[str, ...]:
        return instruction.items if instruction.items is not None else (*self.shell, instruction.text)

    def _pairs(self, instruction: Instruction) -> dict[str, str]:
        words = split_words(instruction.text, escape=self._dockerfile.escape)
        if "=" not in words[0]:
            value = instruction.text[len(words[0]) :].strip()
            if len(words) < 2:
                raise self._dockerfile.error(instruction, "needs NAME=value")
            return {self.expand(instruction, words[0]): self.expand(instruction, value)}
        pairs = {}
        for word in words:
            name, equals, value = word.partition("=")
            if not equals or not name:
                raise self._dockerfile.error(instruction, f"{word} is not NAME=value", "quote white space")
            pairs[self.expand(instruction, name)] = self.expand(instruction, value)
        return pairs

    def _healthcheck(self, instruction: Instruction) -> Mapping[str, Any]:
        kind, _, rest = instruction.text.partition(" ")
        if kind.upper() == "NONE":
            return {"Test": ["NONE"]}
        if kind.upper() != "CMD" or not rest.strip():
            raise self._dockerfile.error(instruction, "needs CMD and a command, or NONE")
        items = json_items(rest.strip())
        found: dict[str, Any] = {
            "Test": ["CMD", *items] if items is not None else ["CMD-SHELL", rest.strip()]
        }
        fields = {
            "interval": "Interval",
            "timeout": "Timeout",
            "start-period": "StartPeriod",
            "start-interval": "StartInterval",
        }
        for name, value in instruction.flags:
            value = self.expand(instruction, value)
            if name in fields:
                found[fields[name]] = self._nanoseconds(instruction, value)
            elif not value.isdecimal() or len(value) > 6:
                raise self._dockerfile.error(instruction, f"--retries={value} is not a number")
            else:
                found["Retries"] = int(value)
        return found

    def _nanoseconds(self, instruction: Instruction, value: str) -> int:
        parts = _DURATION.findall(value)
        if "".join(f"{number}{unit}" for number, unit in parts) != value or len(value) > 40:
            raise self._dockerfile.error(
                instruction, f"{value} is not a duration", "write it as 30s or 1m30s"
            )
        return int(sum(float(number) * _NANOSECONDS[unit] for number, unit in parts))
