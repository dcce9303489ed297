"""`prorl-envs check-llm` against servers that do it right, in part, and not at all."""

import json
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from prorl_envs.cli.checking import checked
from prorl_envs.rollout.server import answering
from prorl_envs.testing.scripted import ScriptBook
from prorl_envs.testing.server import ScriptedServer
from prorl_envs.testing.tokenizer import builtin_renderer

pytestmark = pytest.mark.anyio

RENDERER = builtin_renderer()
BOOK = ScriptBook.from_tapes({"List the files.": [[{"tool": "bash", "arguments": {"command": "ls"}}]]})


async def findings(url: str, folder: Path, *, pause: bool = False) -> tuple[bool, dict[str, Any]]:
    report = folder / "findings.json"
    good = await checked(url, RENDERER, None, pause=pause, timeout_s=30.0, report=report)
    return good, {each["id"]: each for each in json.loads(report.read_text())}


@pytest.mark.parametrize(
    ("protocol", "lacks"),
    [("vllm", {"L5", "L10"}), ("sglang", {"L5", "L10"}), ("llamacpp", {"L5", "L8", "L9", "L10"})],
)
async def test_a_server_of_any_kind_is_found_good(
    protocol: str, lacks: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with ScriptedServer(BOOK, protocol=protocol) as server:
        good, found = await findings(server.url, tmp_path, pause=True)
    assert good, found
    assert {name for name, each in found.items() if each["state"] == "absent"} == lacks, found
    shown = capsys.readouterr().out
    assert "L1" in shown and "tool calls: hermes" in shown


async def test_a_server_without_ids_is_told_apart_at_once(tmp_path: Path) -> None:
    async def text_only(scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        models = {"data": [{"id": "m"}]}
        answer = {"choices": [{"text": "Hi.", "finish_reason": "stop"}]}
        reply = models if request.url.path.endswith("models") else answer
        await JSONResponse(reply)(scope, receive, send)

    async with answering(text_only) as url:
        good, found = await findings(url, tmp_path)
    assert not good
    assert list(found) == ["L1"]
    assert "token ids" in found["L1"]["reason"]


async def test_a_server_that_goes_on_after_the_limit_or_the_stop_is_broken(tmp_path: Path) -> None:
    async def careless(scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        if request.method == "GET":
            await JSONResponse({"data": [{"id": "m"}]})(scope, receive, send)
            return
        count = min(3, json.loads(await request.body())["max_tokens"])
        choice = {
            "token_ids": [7] * count,
            "finish_reason": "length",
            "logprobs": {"token_logprobs": [-1.0] * count},
        }
        await JSONResponse({"choices": [choice]})(scope, receive, send)

    async with answering(careless) as url:
        good, found = await findings(url, tmp_path)
    assert not good
    assert {name for name, each in found.items() if each["state"] == "broken"} == {"L2", "L3"}
    assert {name for name, each in found.items() if each["state"] == "absent"} == {"L5", "L7", "L8"}
