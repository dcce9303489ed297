"""Requirements of a task that this machine cannot meet are found before a process starts."""

import os
from typing import Any

import pytest

from prorl_envs.envs.terminal.env import TerminalEnvironment
from prorl_envs.envs.terminal.requirements import missing, resolved
from prorl_envs.errors import InputError

from .conftest import MakeRow

COMPOSE = "services:\n  main: {build: .}\n  db: {image: postgres}\n  cache: {image: redis}\n"


@pytest.mark.parametrize(
    ("files", "config", "reasons"),
    [
        ({}, "", ()),
        ({}, "[environment]\ngpus = 1\n", ("it needs a GPU",)),
        ({}, '[environment.tpu]\ntype = "v4"\ntopology = "2x2"\n', ("it needs a TPU",)),
        ({}, '[environment]\nos = "Windows"\n', ("its image is for windows",)),
        ({"environment/docker-compose.yaml": COMPOSE}, "", ()),
        ({}, '[[environment.mcp_servers]]\nname = "m"\nurl = "u"\n', ("it needs MCP servers: m",)),
        ({}, '[environment.env]\nA = "${KEY}"\nB = "${OTHER:-x}"\n', ("the variable KEY has no value",)),
        ({}, '[verifier.env]\nA = "${KEY}"\n', ("the variable KEY has no value",)),
        (
            {},
            'artifacts = [{source = "/a", service = "db"}]\n',
            ("it takes files from a service that it does not have: db",),
        ),
        ({"environment/Dockerfile": None}, "", ("environment/Dockerfile: missing",)),
        (
            {"environment/Dockerfile": "FROM base\nONBUILD RUN x\n"},
            "[environment]\ngpus = 2\n",
            ("it needs a GPU", "environment/Dockerfile:2: ONBUILD"),
        ),
    ],
)
def test_all_reasons_are_named(
    make_row: MakeRow, files: dict[str, Any], config: str, reasons: tuple[str, ...]
) -> None:
    task = TerminalEnvironment.load(make_row(files, config=config))
    found = missing(task, {})
    assert len(found) == len(reasons)
    assert all(text.startswith(reason) for text, reason in zip(found, reasons, strict=True)), found
    assert TerminalEnvironment.unavailable(task) == "; ".join(found)


def test_more_memory_than_the_machine_has(make_row: MakeRow) -> None:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for megabytes, count in (((total >> 20) - 1, 0), ((total >> 20) + 1, 1)):
        task = TerminalEnvironment.load(make_row(config=f"[environment]\nmemory_mb = {megabytes}\n"))
        assert len(missing(task, {})) == count


def test_variables_come_only_from_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY", "secret")
    env = {"A": "${KEY:-default}", "B": "literal ${KEY}", "C": "${OTHER:-}"}
    assert resolved(env, {}) == {"A": "default", "B": "literal ${KEY}", "C": ""}
    assert resolved(env, {"KEY": "given"})["A"] == "given"
    with pytest.raises(InputError, match="the variable KEY has no value"):
        resolved({"A": "${KEY}"}, {})
