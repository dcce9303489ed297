"""Catalog of the offered environments, by name: families of this process, and NeMo Gym resources servers.

    family = Catalog.of(load_settings(path))["weather"]

Without `environments` in the settings, every registered family is offered, also with each built-in agent.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from prorl_envs.config import (
    AgentSettings,
    EnvironmentSettings,
    HarnessSettings,
    LimitSettings,
    NemoSettings,
    SandboxSettings,
    Settings,
)
from prorl_envs.env.agents import BUILT_IN, Offer, Offers, with_tools
from prorl_envs.env.base import Environment, Task
from prorl_envs.env.harness.family import with_harness, without_harness
from prorl_envs.env.harness.recipe import Install, Recipe
from prorl_envs.env.harness.recipes import RECIPES
from prorl_envs.env.options import Options, with_options
from prorl_envs.env.registry import environments, examples_of, known
from prorl_envs.env.rows import read_tasks, rows
from prorl_envs.errors import InputError, NoExampleData, name_hint
from prorl_envs.remote.environment import NemoEnvironment, nemo_family
from prorl_envs.remote.servers import ResourcesServer
from prorl_envs.sandbox.base import Network, SandboxLimits

type Family = type[Environment[Any]]

_LIMITS = frozenset(SandboxSettings.model_fields) - {"allow", "image"}


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogEntry:
    """An offered environment.

    Args:
        name: its offered name: `ENVIRONMENT`, or `ENVIRONMENT@AGENT`.
        environment: its key in the settings.
        settings: settings of the environment; those of its agent override them.
        offers: the agent's tools; None for the family's own tools.
        where: prefix of error messages about a wrong tool.
        harness: external agent that replaces the service's own loop, or None.
    """

    name: str
    environment: str
    settings: EnvironmentSettings
    offers: Offers | None = None
    where: str = ""
    harness: Recipe | None = None


def entries(settings: Settings) -> Iterator[CatalogEntry]:
    """Yield the offered environments of the settings, each with each of its agents.

    Raises:
        InputError: an entry contradicts itself, or names an unknown agent.
    """
    for name, given in (settings.environments or {}).items():
        _check(name, given)
        agent_of = {name: given.agent} | {f"{name}@{agent}": agent for agent in given.agents}
        for offered_name, agent in agent_of.items():
            if offered_name != name and offered_name in (settings.environments or {}):
                raise InputError(f"environments.{offered_name}: is also {name} with the agent {agent}")
            entry = CatalogEntry(name=offered_name, environment=name, settings=given)
            yield entry if agent is None else _with_agent(entry, agent, settings.agents)


def _with_agent(entry: CatalogEntry, agent: str, agents: Mapping[str, AgentSettings]) -> CatalogEntry:
    """Return `entry` with the settings of an agent applied."""
    if agent not in agents and agent not in BUILT_IN and agent not in RECIPES:
        hint = name_hint(agent, {*agents, *BUILT_IN, *RECIPES})
        raise InputError(f"environments.{entry.environment}: no agent is called {agent!r}", hint=hint)
    agent_settings = agents.get(agent, AgentSettings())
    offers = BUILT_IN.get(agent) if agent not in agents else None
    if agent_settings.tools is not None:
        offers = {
            name: Offer(**{**tool.model_dump(), "tool": tool.tool or name})
            for name, tool in agent_settings.tools.items()
        }
    harness = RECIPES.get(agent) if agent not in agents else None
    if agent_settings.harness is not None:
        harness = recipe_of(agent_settings.harness, f"agents.{agent}.harness")
    if harness is not None and (offers is not None or agent_settings.system_prompt is not None):
        raise InputError(
            f"agents.{agent}: a harness has tools and a system prompt of its own",
            hint="remove tools and system_prompt; `instruction` sets the harness's prompt",
        )
    if entry.settings.nemo is not None and harness is not None:
        raise InputError(
            f"environments.{entry.environment}: a harness cannot work on a resources server's tasks"
        )
    if entry.settings.nemo is not None and (offers is not None or agent_settings.system_prompt is not None):
        raise InputError(
            f"environments.{entry.environment}: rows, not the agent {agent}, define the prompt and the tools",
            hint="the agent of a resources server can only set limits and sampling",
        )
    before = entry.settings
    changes = {
        "system_prompt": agent_settings.system_prompt or before.system_prompt,
        "limits": {**before.limits, **agent_settings.limits},
        "sampling": {**before.sampling, **agent_settings.sampling},
    }
    settings = before.model_copy(update=changes)
    return replace(entry, settings=settings, offers=offers, where=f"agents.{agent}.tools", harness=harness)


def recipe_of(given: HarnessSettings, where: str) -> Recipe:
    """Return the harness that settings describe.

    Raises:
        InputError: the recipe is unknown, or there is neither recipe nor command.
    """
    if given.recipe and given.recipe not in RECIPES:
        hint = name_hint(given.recipe, RECIPES)
        raise InputError(f"{where}: no recipe is called {given.recipe!r}", hint=hint)
    if not given.recipe and not given.command:
        raise InputError(f"{where}: a recipe or a command is required", hint="set one of them")
    base = RECIPES.get(given.recipe) or Recipe(name="command", command=given.command)
    install = base.install
    if given.packages:
        registry = (
            install.registry if install and "registry" not in given.model_fields_set else given.registry
        )
        install = Install(registry=registry, packages=given.packages, node=registry == "npm")
    return replace(
        base,
        install=install,
        command=given.command or base.command,
        env={**base.env, **given.env},
        files={**base.files, **given.files},
        instruction=given.instruction or base.instruction,
        stdin=given.stdin or base.stdin,
        exits=frozenset(given.exits) or base.exits,
    )


class Catalog(Mapping[str, Family]):
    """Environment classes by name.

    Args:
        families: the classes.
        any_agent: settings with which each class is also offered as `NAME@AGENT`, with each built-in agent.
    """

    def __init__(self, families: Mapping[str, Family], *, any_agent: Settings | None = None) -> None:
        self._families = families
        self._any_agent = any_agent
        self._with_agents: dict[str, Family] = {}

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """Return the catalog of the settings.

        Raises:
            InputError: an entry is wrong.
        """
        if settings.environments is None:
            return cls(environments(), any_agent=settings)
        families: dict[str, Family] = {}
        for entry in entries(settings):
            name = entry.name
            if entry.settings.nemo is not None:
                families[name] = nemo_family(name, _server(name, entry.settings.nemo))
            else:
                base = _base(entry.environment, entry.settings)
                family = with_options(name, base, _options(entry.settings, settings.limits))
                if entry.harness is not None:
                    family = with_harness(family, entry.harness, f"environments.{name}")
                families[name] = with_tools(family, entry.offers, entry.where) if entry.offers else family
        return cls(families)

    def __getitem__(self, name: str) -> Family:
        if self._any_agent is None or name in self._families:
            return self._families[name]
        environment, _, agent = name.partition("@")
        if environment not in self._families or agent not in BUILT_IN:
            raise KeyError(name)
        if name not in self._with_agents:
            asked = {"environments": {environment: EnvironmentSettings(agents=(agent,))}}
            self._with_agents[name] = Catalog.of(self._any_agent.model_copy(update=asked))[name]
        return self._with_agents[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._families)

    def __len__(self) -> int:
        return len(self._families)

    def family(self, name: str) -> Family:
        """Return the environment called `name`.

        Raises:
            InputError: there is none; the hint names the closest.
        """
        environment, _, agent = name.partition("@")
        if agent and name not in self and environment in self:
            hint = f"add it to the settings: environments: {{{environment}: {{agents: [{agent}]}}}}"
            raise InputError(f"{environment} is not offered with the agent {agent!r}", hint=hint)
        return known(self, name)

    def tasks(self, name: str, data: Path | None) -> list[Task]:
        """Return the tasks of a data file, or of the environment's own examples.

        Raises:
            InputError: no such environment, a row is wrong, or the environment ships no examples.
        """
        return read_tasks(self.family(name).load, self.data(name, data))

    def rows(self, name: str, data: Path | None) -> list[tuple[dict[str, Any], Task]]:
        """Return each row of a data file, or of the environment's own examples, with its task.

        Raises:
            InputError: no such environment, a row is wrong, or the environment ships no examples.
        """
        path = self.data(name, data)
        return [(row, task) for (_, row), task in zip(rows(path), self.tasks(name, path), strict=True)]

    def data(self, name: str, data: Path | None) -> Path:
        """Return `data`, or the path of the environment's own examples.

        Raises:
            NoExampleData: the environment ships no examples.
        """
        if data is not None:
            return data
        family = self.family(name)
        if issubclass(family, NemoEnvironment):
            raise NoExampleData(
                f"environment {name!r} ships no example data",
                hint="give a data file; those of NeMo Gym are in resources_servers/NAME/data",
            )
        return examples_of(name, family)

    def without_harness(self, name: str) -> "Catalog":
        """Return a catalog with only the environment called `name`, without its harness.

        Callers that drive the episodes themselves use it.
        """
        return Catalog({name: without_harness(self.family(name))})


def _check(name: str, entry: EnvironmentSettings) -> None:
    where = f"environments.{name}"
    if not name or len(name) > 100:
        raise InputError("environments: a name has 1 to 100 characters")
    if entry.nemo is None:
        return
    for key, value in {
        "family": entry.family,
        "system_prompt": entry.system_prompt,
        "python": entry.python,
        "sandbox": entry.sandbox,
        "options": entry.options or None,
    }.items():
        if value is not None:
            hint = (
                "name one of them" if key == "family" else "a resources server has its own rows and sandboxes"
            )
            raise InputError(f"{where}: {key} and nemo exclude each other", hint=hint)


def _server(name: str, nemo: NemoSettings) -> ResourcesServer:
    bounds = nemo.model_dump(exclude={"url", "on_error"})
    return ResourcesServer(url=_url(name, nemo.url), fail_on_500=nemo.on_error == "fail", **bounds)


def _url(name: str, url: str) -> str:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable or parts.query or parts.fragment or parts.username:
        raise InputError(f"environments.{name}.nemo.url: {url!r} is no base URL", hint="http://HOST:PORT")
    return url.rstrip("/")


def _base(name: str, entry: EnvironmentSettings) -> Family:
    try:
        return known(environments(), entry.family or name)
    except InputError as error:
        key = f"environments.{name}" + (".family" if entry.family else "")
        raise InputError(
            f"{key}: {error.message}", hint=f"{error.hint}; or nemo: for a resources server"
        ) from error


def _options(entry: EnvironmentSettings, node: LimitSettings) -> Options:
    sandbox = entry.sandbox or SandboxSettings()
    given = sandbox.model_fields_set
    common = {key: getattr(node, key) for key in _LIMITS}
    return Options(
        system_prompt=entry.system_prompt,
        limits={key: getattr(sandbox, key) for key in sorted(_LIMITS & given)},
        default_limits=SandboxLimits(**common),
        network=Network(allow=sandbox.allow) if "allow" in given else None,
        image=sandbox.image,
        python=entry.python,
        own=entry.options,
    )
