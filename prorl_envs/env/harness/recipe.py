"""What a harness is: how it is installed, started, told of its task and its model, and how it ends."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

#: Where an installed harness lies inside a sandbox, read-only.
INSTALLED = "/opt/harness"
#: What the model is called there; harnesses want a name, and any will do.
MODEL = "policy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Install:
    """Packages of a registry, put into a directory of their own.

    Args:
        registry: `pypi` makes a virtual environment, `npm` a `node_modules`.
        packages: with exact versions, as the registry's own client takes them.
        bare: further ones of `pypi`, without what they depend on.
        node: whether Node.js is needed to run it.
    """

    registry: Literal["pypi", "npm"]
    packages: tuple[str, ...]
    bare: tuple[str, ...] = ()
    node: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Spelling:
    """How the model calls the harness's shell, so that references can be played by the scripted model.

    Args:
        tool: name of the tool.
        argument: that takes the command.
        others: further arguments, as they are.
        as_list: whether the command goes as `["bash", "-lc", COMMAND]`.
        finish: a command that ends the episode; empty where an answer without a call does.
    """

    tool: str
    argument: str = "command"
    others: Mapping[str, object] = field(default_factory=dict)
    as_list: bool = False
    finish: str = ""

    def arguments(self, command: str) -> dict[str, object]:
        """Of a call that runs `command`."""
        return {self.argument: ["bash", "-lc", command] if self.as_list else command, **self.others}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A harness. In command, environment, files, instruction and stdin these stand for what is known when it
    starts: `{instruction}`, `{task}` (in the instruction alone), `{url}` (of the endpoint; OpenAI's
    interfaces are below `{url}/v1`), `{key}`, `{model}`, `{installed}`, `{home}`, `{workdir}`, `{arch}`
    (`x64` or `arm64`).

    Args:
        name: of the recipe.
        command: program and arguments.
        install: what has to be there; None where the sandbox has it all.
        env: variables beside those that every harness gets (`ENDPOINT`).
        files: text by absolute path, written before it starts.
        instruction: what the harness is told.
        stdin: what it reads.
        exits: exit statuses with which it ends in order. With another it has failed, unless a limit of the
            rollout was reached.
        spelling: None where nothing is known of its tools.
    """

    name: str
    command: tuple[str, ...]
    install: Install | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    instruction: str = "{task}"
    stdin: str = ""
    exits: frozenset[int] = frozenset({0})
    spelling: Spelling | None = None


#: How every harness is told of its model: the variables that the vendors' own clients read.
ENDPOINT: Mapping[str, str] = {
    "OPENAI_BASE_URL": "{url}/v1",
    "OPENAI_API_BASE": "{url}/v1",
    "OPENAI_API_KEY": "{key}",
    "ANTHROPIC_BASE_URL": "{url}",
    "ANTHROPIC_API_KEY": "{key}",
    "PRORL_MODEL_URL": "{url}",
    "PRORL_MODEL_KEY": "{key}",
    "NO_PROXY": "127.0.0.1,localhost",
    "no_proxy": "127.0.0.1,localhost",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """The model, as it is reached from inside a sandbox.

    Args:
        port: on loopback.
        key: of the rollout.
    """

    port: int
    key: str

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


def filled(text: str, values: Mapping[str, str]) -> str:
    """`text` with what the names in braces stand for. Other braces stay; what is put in is not looked at."""
    parts, rest = [], text
    while rest:
        at, name = min(
            ((found, name) for name in values if (found := rest.find(f"{{{name}}}")) >= 0),
            default=(len(rest), ""),
        )
        parts.append(rest[:at])
        if name:
            parts.append(values[name])
            rest = rest[at + len(name) + 2 :]
        else:
            rest = ""
    return "".join(parts)
