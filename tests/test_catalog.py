"""Environments in the settings: valid entries work, invalid ones are refused with a reason."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from prorl_envs.app.compose import request_defaults
from prorl_envs.catalog import Catalog
from prorl_envs.config import Settings, load_settings
from prorl_envs.env.registry import environments
from prorl_envs.env.sandboxed import SandboxedEnvironment
from prorl_envs.errors import InputError
from prorl_envs.rollout.api.types import AgentLimits, GroupRequest
from prorl_envs.sandbox.base import Network, SandboxSpec
from prorl_envs.sandbox.filesystem.python_runtime import python_spec
from prorl_envs.tools.client.python import PythonEngine
from tests.support.toy import empty_node

DOCS = Path(__file__).parent.parent / "docs"


def settings(tmp_path: Path, entries: Any) -> Settings:
    path = tmp_path / "settings.yaml"
    path.write_text(yaml.safe_dump({"environments": entries}))
    return load_settings(path)


def test_by_default_every_registered_family_is_offered() -> None:
    assert list(Catalog.of(Settings())) == list(environments())


def test_by_default_every_family_is_offered_with_each_built_in_agent(tmp_path: Path) -> None:
    offered = Catalog.of(Settings())
    listed = Catalog.of(settings(tmp_path, {"bash": {"agents": ["codeact"]}}))
    task = offered.tasks("bash@codeact", None)[0]
    found, expected = (catalog["bash@codeact"](empty_node()) for catalog in (offered, listed))
    assert found.prompt(task) == expected.prompt(task)
    assert "none@codeact" not in offered and "bash@none" not in offered
    with pytest.raises(InputError, match="the agent 'claude'") as refused:
        offered.family("bash@claude")
    assert "environments: {bash: {agents: [claude]}}" in refused.value.hint
    with pytest.raises(InputError, match="not offered with the agent 'codeact'"):
        Catalog.of(settings(tmp_path, {"bash": None})).family("bash@codeact")


def test_an_entry_offers_a_family_under_a_name(tmp_path: Path) -> None:
    offered = Catalog.of(settings(tmp_path, {"bash": None, "easy": {"family": "bash"}}))
    assert sorted(offered) == ["bash", "easy"]
    assert offered["easy"].name == "easy" and issubclass(offered["easy"], environments()["bash"])
    assert [task.id for task in offered.tasks("easy", None)] == [
        task.id for task in offered.tasks("bash", None)
    ]


def test_an_entry_may_set_its_own_system_prompt_and_sandbox(tmp_path: Path) -> None:
    sandbox = {"memory_bytes": 1 << 30, "allow": ["pypi.org"]}
    entry = {"family": "bash", "system_prompt": "Be quick.", "sandbox": sandbox}
    offered = Catalog.of(settings(tmp_path, {"quick": entry}))
    environment, task = offered["quick"](empty_node()), offered.tasks("quick", None)[0]
    assert environment.prompt(task).messages[0] == {"role": "system", "content": "Be quick."}
    spec = environment.sandbox_spec(task)  # type: ignore[attr-defined]
    assert spec.limits.memory_bytes == 1 << 30 and spec.limits.processes == 2048  # the node's, not ours
    assert spec.network == Network(allow=("pypi.org",))
    plain = environments()["bash"](empty_node()).sandbox_spec(task)  # type: ignore[attr-defined]
    assert plain.limits is None and plain.network == Network()


def test_an_entry_may_run_python_cells_in_a_jupyter_kernel(tmp_path: Path) -> None:
    image = {"family": "ipython", "python": "kernel", "sandbox": {"image": str(tmp_path)}}
    entries = {"bash": {"python": "kernel"}, "ipython": {"python": "kernel"}, "image": image}
    offered = Catalog.of(settings(tmp_path, entries))

    def spec(name: str) -> Any:
        environment = offered[name](empty_node())
        assert isinstance(environment, SandboxedEnvironment)
        assert environment.python is PythonEngine.KERNEL
        return environment.sandbox_spec(offered.tasks(name, None)[0])

    assert [tool.name for tool in offered["bash"](empty_node()).tools] == [
        "bash", "str_replace_editor", "ipython", "finish",
    ]  # fmt: skip
    assert [tool.name for tool in offered["ipython"](empty_node()).tools] == ["ipython", "finish"]
    spec("bash")
    assert spec("ipython") == python_spec()  # the packages of this interpreter
    assert spec("image") == SandboxSpec(image=tmp_path)  # the packages of the image's


def test_a_request_overrides_an_entrys_defaults(tmp_path: Path) -> None:
    entry = {"limits": {"max_turns": 5, "run_s": 60}, "sampling": {"temperature": 0.5}}
    defaults = request_defaults(settings(tmp_path, {"bash": entry}))["bash"]
    asked = {"id": "g", "environment": "bash", "task": {}, "limits": {"max_turns": 9}}
    settled = defaults.applied(GroupRequest.model_validate(asked))
    assert (settled.limits.max_turns, settled.limits.run_s) == (9, 60)
    assert settled.limits.max_tokens == AgentLimits().max_tokens and settled.sampling.temperature == 0.5


@pytest.mark.parametrize(
    ("entries", "says", "hint"),
    [
        ({"bsh": None}, "environments.bsh: no environment is called 'bsh'", "did you mean bash?"),
        ({"x": {"family": "ipyton"}}, "environments.x.family", "did you mean ipython?"),
        ({"x": {"famly": "bash"}}, "unknown setting environments.x.famly", "environments.x.family"),
        ({"x": {"nemo": {"ulr": "http://h"}}}, "unknown setting environments.x.nemo.ulr", "nemo.url?"),
        ({"x": {"nemo": {}}}, "environments.x.nemo.url: '' is no base URL", "http://HOST:PORT"),
        ({"x": {"nemo": {"url": "h:80"}}}, "is no base URL", "http://HOST:PORT"),
        ({"x": {"nemo": {"url": "http://u:p@h"}}}, "is no base URL", ""),
        ({"x": {"family": "bash", "nemo": {"url": "http://h"}}}, "family and nemo exclude", ""),
        ({"x": {"system_prompt": "s", "nemo": {"url": "http://h"}}}, "system_prompt and nemo", ""),
        ({"swebench": {"sandbox": {"allow": ["pypi.org"]}}}, "does not allow another network", "limits"),
        ({"bash": {"sandbox": {"image": "/x.sif"}}}, "does not allow another image", "limits, network"),
        ({"terminal": {"python": "kernel"}}, "does not allow another python", "limits"),
        ({"x": {"python": "kernel", "nemo": {"url": "http://h"}}}, "python and nemo exclude", ""),
        ({"bash": {"python": "jupyter"}}, "environments.bash.python", ""),
        (
            {"bash": {"sandbox": {"memory": 1}}},
            "unknown setting environments.bash.sandbox.memory",
            "memory_bytes",
        ),
        (
            {"bash": {"limits": {"max_turn": 3}}},
            "environments.bash.limits.max_turn",
            "did you mean max_turns?",
        ),
        ({"bash": {"limits": {"max_turns": 0}}}, "environments.bash.limits.max_turns: ", ""),
        ({"bash": {"sampling": {"top_k": 3}}}, "environments.bash.sampling.top_k", "did you mean top_p?"),
        ({"bash": 3}, "setting environments.bash", ""),
        (["bash"], "setting environments", ""),
    ],
)
def test_a_wrong_entry_is_named(tmp_path: Path, entries: Any, says: str, hint: str) -> None:
    with pytest.raises(InputError) as caught:
        loaded = settings(tmp_path, entries)
        request_defaults(loaded)
        Catalog.of(loaded)
    assert says in caught.value.message and hint in caught.value.hint


def test_the_settings_in_the_documentation_are_right(tmp_path: Path) -> None:
    text = (DOCS / "nemo-gym.md").read_text()
    (block,) = [part for part in text.split("```yaml\n")[1:] if part.startswith("environments:")]
    path = tmp_path / "documented.yaml"
    path.write_text(block.partition("```")[0])
    loaded = load_settings(path)
    offered = Catalog.of(loaded)
    assert set(request_defaults(loaded)) == set(offered) == {"bash", "quick-shell", "quiz", "weather"}
