"""Recipe of a harness: its installation, its start, its task and model settings, and its exit statuses."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

#: Directory of an installed harness inside a sandbox, read-only.
INSTALLED = "/opt/harness"
#: Model name in the sandbox; harnesses require a name, and accept any.
MODEL = "policy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Install:
    """Packages of a registry, installed into their own directory.

    Args:
        registry: `pypi` creates a virtual environment, `npm` a `node_modules`.
        packages: names with exact versions, in the syntax of the registry's own client.
        bare: further `pypi` packages, installed without their dependencies.
        node: the harness needs Node.js to run.
    """

    registry: Literal["pypi", "npm"]
    packages: tuple[str, ...]
    bare: tuple[str, ...] = ()
    node: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Spelling:
    """Format of a call of the harness's shell tool. The scripted model plays reference solutions with it.

    Args:
        tool: name of the tool.
        argument: name of the argument with the command.
        others: further arguments, the same in every call.
        finish: a command that finishes the episode; empty if an answer without a call does.
    """

    tool: str
    argument: str = "command"
    others: Mapping[str, object] = field(default_factory=dict)
    finish: str = ""

    def arguments(self, command: str) -> dict[str, object]:
        """Return the arguments of a call that runs `command`."""
        return {self.argument: command, **self.others}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Harness definition.

    Command, environment, files, instruction and stdin may hold placeholders, which are replaced before the
    start: `{instruction}`, `{task}` (in the instruction only), `{url}` (of the endpoint; OpenAI's interfaces
    are below `{url}/v1`), `{key}`, `{model}`, `{installed}`, `{home}`, `{workdir}`, `{arch}` (`x64` or
    `arm64`).

    Args:
        name: name of the recipe.
        command: program and arguments.
        install: required packages; None if the sandbox has everything.
        env: variables in addition to those of `ENDPOINT`, which every harness gets.
        files: texts by absolute path, written before the start.
        instruction: instruction for the harness.
        stdin: standard input of the harness.
        exits: exit statuses of success. Any other status is a failure, unless a limit of the rollout was
            reached.
        spelling: None if the tools of the harness are unknown.
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


#: Model settings of every harness: the variables that the vendors' own clients read.
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
    """Model endpoint as the programs inside a sandbox see it.

    Args:
        port: TCP port on the sandbox's loopback interface.
        key: key of the rollout.
    """

    port: int
    key: str

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


def filled(text: str, values: Mapping[str, str]) -> str:
    """Replace the names in braces in `text` by their values. Other braces stay; inserted values are not
    scanned."""
    names = "|".join(map(re.escape, values))
    return re.sub(rf"{{({names})}}", lambda match: values[match[1]], text)
