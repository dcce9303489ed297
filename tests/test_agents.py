"""Agents: tools, names, prompt and limits of a model in an environment."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from prorl_envs.app.compose import request_defaults
from prorl_envs.catalog import Catalog
from prorl_envs.config import Settings, load_settings
from prorl_envs.env.audit.episodes import play
from prorl_envs.env.base import Environment
from prorl_envs.env.node import Node
from prorl_envs.errors import InputError
from prorl_envs.rollout.api.types import AgentLimits
from prorl_envs.tools.types import ToolCall
from tests.support.toy import empty_node

PAGE = Path(__file__).parent.parent / "docs" / "agents.md"
ROW = {
    "id": "greet",
    "instruction": "Greet.",
    "checks": [{"type": "file_equals", "path": "a", "text": "hello\n"}],
    "reference": [
        {"tool": "bash", "arguments": {"command": "echo hello > a"}},
        {"tool": "finish", "arguments": {"answer": "done"}},
    ],
}


def settings(tmp_path: Path, agents: Any, environments: Any) -> Settings:
    path = tmp_path / "settings.yaml"
    path.write_text(yaml.safe_dump({"agents": agents, "environments": environments}, sort_keys=False))
    return load_settings(path)


def names(environment: type[Environment[Any]]) -> list[str]:
    return [tool.name for tool in environment(empty_node()).tools]


def test_the_page_has_settings_that_work(tmp_path: Path) -> None:
    path = tmp_path / "documented.yaml"
    path.write_text(PAGE.read_text().split("```yaml\n")[1].partition("```")[0])
    offered, defaults = Catalog.of(load_settings(path)), request_defaults(load_settings(path))
    assert set(offered) == set(defaults) == {"bash", "bash@careful", "bash@codeact", "ipython"}
    assert names(offered["bash"]) == ["bash", "submit"]
    assert names(offered["bash@careful"]) == ["execute_bash", "apply_patch", "think", "done"]
    assert names(offered["bash@codeact"]) == ["execute_bash", "think", "finish", "str_replace_editor"]
    assert names(offered["ipython"]) == ["think", "finish", "execute_ipython_cell"]
    assert defaults["bash"].limits == {"max_turns": 20, "max_tokens": 16384, "max_repeats": 4}
    assert (offered["bash"].finish_tool, offered["bash@careful"].finish_tool) == ("submit", "done")
    task = offered["bash"].load(ROW)
    assert (
        offered["bash"](empty_node())
        .prompt(task)
        .messages[0]["content"]
        .endswith("Call submit when you are done.")
    )


def test_the_page_has_every_limit_with_its_default() -> None:
    rows = re.findall(r"^\| (`.*?`) \| (.*?) ?\| .+ \|$", PAGE.read_text(), re.MULTILINE)
    described: dict[str, Any] = {}
    for named, shown in rows:
        limits = re.findall(r"`(\w+)`", named)
        given = [yaml.safe_load(part) for part in shown.split(", ")]
        described |= dict(zip(limits, given, strict=True))
    assert described == AgentLimits().model_dump()


def test_arguments_are_offered_under_other_names(tmp_path: Path) -> None:
    tool = {"tool": "finish", "arguments": {"message": "answer", "task_completed": None}}
    agent = {"tools": {"done": tool, "bash": None}}
    offered = Catalog.of(settings(tmp_path, {"a": agent}, {"ipython": {}, "bash": {"agent": "a"}}))
    done = offered["bash"](empty_node()).tools[0].to_openai()["function"]["parameters"]
    assert list(done["properties"]) == ["message", "task_completed"] and done["required"] == []
    reference = offered["bash"].load(ROW).reference
    assert [(call.tool, call.arguments) for call in reference] == [
        ("bash", {"command": "echo hello > a"}),
        ("done", {"message": "done"}),
    ]


@pytest.mark.parametrize(
    ("agent", "environment", "says", "hint"),
    [
        ({}, {"agent": "tarse"}, "environments.bash: no agent is called 'tarse'", "did you mean terse?"),
        ({}, {"agents": ["codact"]}, "no agent is called 'codact'", "did you mean codeact?"),
        ({"tools": ["bsh"]}, {"agent": "terse"}, "agents.terse.tools.bsh: bash has no such tool", "bash"),
        ({"tools": {"x": {"tul": "bash"}}}, {}, "unknown setting agents.terse.tools.x.tul", "tool"),
        ({"tools": [1]}, {}, "setting agents.terse.tools", ""),
        ({"tools": {"x": {"tool": "bash", "arguments": {"c": "cmd", "d": "command"}}}}, {"agent": "terse"},
         "agents.terse.tools.x.arguments: bash takes no 'cmd'", "command"),
        ({"tools": {"x": {"tool": "bash", "arguments": {"input": "is_input"}}}}, {"agent": "terse"},
         "agents.terse.tools.x.arguments: bash needs 'command'", ""),
        ({"limits": {"max_turn": 3}}, {"agent": "terse"}, "environments.bash.limits.max_turn", "max_turns"),
        ({"prompt": "x"}, {}, "unknown setting agents.terse.prompt", "system_prompt"),
        ({"tools": ["bash"]}, {"nemo": {"url": "http://h"}, "agent": "terse"}, "define the prompt", "limits"),
    ],
)  # fmt: skip
def test_a_wrong_agent_is_named(tmp_path: Path, agent: Any, environment: Any, says: str, hint: str) -> None:
    with pytest.raises(InputError) as caught:
        loaded = settings(tmp_path, {"terse": agent}, {"bash": environment})
        request_defaults(loaded)
        Catalog.of(loaded)
    assert says in caught.value.message and hint in caught.value.hint


@pytest.mark.anyio
async def test_an_agents_tools_run_and_are_graded_like_the_familys(tmp_path: Path) -> None:
    offered = Catalog.of(settings(tmp_path, {}, {"bash": {"agent": "codeact"}}))["bash"]
    task = offered.load(ROW)
    async with Node.local() as node:
        played = await play(offered, node, task, task.reference)
        assert (played.grade.reward, played.refused) == (1.0, ())
        async with offered(node) as environment:
            await environment.init(task)

            async def call(name: str, **arguments: Any) -> tuple[bool, str]:
                result = await environment.call(ToolCall("c", name, arguments))
                return result.ok, result.text.strip()

            assert await call("execute_bash", command="cat", is_input="false") != (True, "")
            assert (await call("execute_bash", command="C-c", is_input="true"))[0]
            assert await call("execute_bash", command="echo hi") == (True, "hi")
            assert await call("think", thought="so") == (True, "Noted.")
            wrong: list[tuple[str, dict[str, Any], str]] = [
                ("bash", {"command": "ls"}, "There is no tool 'bash'. The tools are: execute_bash, think"),
                (
                    "execute_bash",
                    {"cmd": "ls"},
                    "execute_bash: unknown argument 'cmd'; it takes: command, is_input",
                ),
                ("execute_bash", {"command": "ls", "restart": True}, "unknown argument 'restart'"),
                ("execute_bash", {"command": "ls", "is_input": "perhaps"}, "must be true or false"),
                ("think", {}, "think: the argument 'thought' is missing"),
                ("finish", {"answer": "x"}, "finish: unknown argument 'answer'"),
            ]
            for name, arguments, says in wrong:
                ok, text = await call(name, **arguments)
                assert not ok and says in text, json.dumps(text)
            assert await call("finish", message=42, task_completed=["any"]) == (True, "Finished.")
            assert not (await call("execute_bash", command="ls"))[0]
