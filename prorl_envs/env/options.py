"""Variants of a family: subclasses with another name, system prompt, Python engine, sandbox or options."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import BaseModel, ValidationError

from prorl_envs.env.base import Environment, Task
from prorl_envs.env.sandboxed import SandboxedEnvironment
from prorl_envs.errors import InputError
from prorl_envs.sandbox.base import Network, SandboxLimits, SandboxSpec
from prorl_envs.tools.client.python import PythonEngine
from prorl_envs.tools.schemas import PYTHON


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Differences of a variant from its family; None and empty values change nothing.

    Args:
        system_prompt: first message of every episode.
        limits: fields of `SandboxLimits`; the other fields come from the family, else from `default_limits`.
        default_limits: limits of the node's sandboxes.
        network: replaces the sandbox's network.
        image: a directory or SIF file, as in `SandboxSpec`.
        python: engine of the Python tool, a `PythonEngine`. The tool is added to a family without it.
        own: values of the family's own options.
    """

    system_prompt: str | None = None
    limits: Mapping[str, Any] = field(default_factory=dict)
    default_limits: SandboxLimits = field(default_factory=SandboxLimits)
    network: Network | None = None
    image: Any = None
    python: str | None = None
    own: Mapping[str, Any] = field(default_factory=dict)

    @property
    def sandbox_changes(self) -> frozenset[str]:
        """Names of the sandbox properties that these options change."""
        values = {
            "limits": self.limits, "network": self.network, "image": self.image, "python": self.python,
        }  # fmt: skip
        return frozenset(name for name, value in values.items() if value)

    def applied(self, spec: SandboxSpec) -> SandboxSpec:
        """Return `spec` with these options applied."""
        if self.limits:
            spec = replace(spec, limits=replace(spec.limits or self.default_limits, **self.limits))
        if self.network is not None:
            spec = replace(spec, network=self.network)
        return replace(spec, image=self.image) if self.image is not None else spec


def with_options(name: str, base: type[Environment[Any]], options: Options) -> type[Environment[Any]]:
    """Return a subclass of `base` that differs by `options`.

    Args:
        name: name of the variant.
        base: the family.

    Raises:
        InputError: the family has no such property, or does not allow it to change.
    """
    fields: dict[str, Any] = {"name": name, "__module__": base.__module__, "__doc__": base.__doc__}
    if options.own:
        fields["options"] = _own(name, base, options.own)
    changes = options.sandbox_changes
    if not (options.system_prompt or changes):
        return type(base.__name__, (base,), fields)
    if not issubclass(base, SandboxedEnvironment):
        raise InputError(
            f"environments.{name}: {base.name} has no system prompt and no sandbox to change",
            hint="remove system_prompt, python and sandbox",
        )
    if refused := changes - base.sandbox_options:
        allowed = ", ".join(sorted(base.sandbox_options)) or "nothing"
        raise InputError(
            f"environments.{name}: {base.name} does not allow another {' or '.join(sorted(refused))}",
            hint=f"allowed changes of its sandboxes: {allowed}",
        )

    def sandbox_spec(self: SandboxedEnvironment[Any], task: Task) -> SandboxSpec:
        return options.applied(base.sandbox_spec(self, task))

    if options.system_prompt:
        fields["system_prompt"] = options.system_prompt
    if options.image is not None:
        fields["image"] = options.image
    if options.python is not None:
        fields["python"] = PythonEngine(options.python)
        if PYTHON not in base.sandbox_tools:
            fields["sandbox_tools"] = (*base.sandbox_tools, PYTHON)
    return type(base.__name__, (base,), {**fields, "sandbox_spec": sandbox_spec})


def _own(name: str, base: type[Environment[Any]], values: Mapping[str, Any]) -> BaseModel:
    where = f"environments.{name}.options"
    if base.options_type is None:
        raise InputError(f"{where}: {base.name} has no options", hint="remove them")
    try:
        return base.options_type.model_validate(dict(values))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join((where, *(str(part) for part in first["loc"])))
        known = ", ".join(base.options_type.model_fields)
        raise InputError(
            f"{place}: {first['msg']}", hint=f"the options of {base.name} are: {known}"
        ) from error
