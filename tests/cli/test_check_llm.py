"""`prorl-envs check-llm` with correct, partly correct and broken servers."""

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import trustme
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from prorl_envs.app.compose import Model, servers_of
from prorl_envs.cli.commands.check_llm_report import checked
from prorl_envs.config import load_settings
from prorl_envs.model.servers.probe import probe
from prorl_envs.model.types import Sampling
from prorl_envs.rollout.http.server import answering
from prorl_envs.testing.scripted import ScriptBook
from prorl_envs.testing.tokenizer import builtin_renderer
from tests.support.scripted_servers import scripted_server
from tests.support.timed_server import TimedServer
from tests.support.tls import tls_front

pytestmark = pytest.mark.anyio

RENDERER = builtin_renderer()
BOOK = ScriptBook.from_tapes({"List the files.": [[{"tool": "bash", "arguments": {"command": "ls"}}]]})


type Findings = Callable[..., Awaitable[tuple[bool, dict[str, Any]]]]


@pytest.fixture
def findings(capsys: pytest.CaptureFixture[str]) -> Findings:
    """Check a server. Return whether the command found nothing broken, and the findings by id."""

    async def check(url: str, *, pause: bool = False) -> tuple[bool, dict[str, Any]]:
        good = await checked(url, RENDERER, None, pause=pause, timeout_s=30.0, as_json=True)
        return good, {each["id"]: each for each in json.loads(capsys.readouterr().out)}

    return check


@pytest.mark.parametrize(
    ("protocol", "lacks"),
    [("vllm", {"L5", "L10"}), ("sglang", {"L5", "L10"}), ("llamacpp", {"L5", "L8", "L9", "L10"})],
)
async def test_correct_servers_of_any_kind_pass(protocol: str, lacks: set[str], findings: Findings) -> None:
    async with scripted_server(protocol, BOOK) as server:
        good, found = await findings(server.url, pause=True)
    assert good, found
    assert {name for name, each in found.items() if each["state"] == "absent"} == lacks, found


async def test_servers_with_a_certificate_of_a_private_authority(tmp_path: Path) -> None:
    """A check, a service and its first probe use the setting `model.ca_file`."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    ca_file = load_settings(None, {"PRORL_MODEL__CA_FILE": str(tmp_path / "ca.pem")}).model.ca_file
    async with TimedServer(BOOK) as server, tls_front(server.url, authority) as url:
        assert await checked(url, RENDERER, None, pause=False, timeout_s=30.0, ca_file=ca_file)
        assert (await probe(url, ca_file=ca_file)).ok
        distrusted = await probe(url)
        assert distrusted.unavailable and "model.ca_file" in distrusted.problem
        model = Model(servers=[url], renderer=RENDERER, ca_file=ca_file)
        client = servers_of(model).connect(url)
        prompt = RENDERER.prompt([{"role": "user", "content": "List the files."}])
        assert (await client.generate(prompt, Sampling(max_tokens=512), session="s")).ids
        await client.aclose()


async def test_findings_are_a_table_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    async with TimedServer(BOOK) as server:
        assert await checked(server.url, RENDERER, None, pause=False, timeout_s=30.0)
    shown = capsys.readouterr().out
    assert "L1" in shown and "tool calls: hermes" in shown


async def test_a_server_without_ids_is_identified_at_once(findings: Findings) -> None:
    async def text_only(scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        models = {"data": [{"id": "m"}]}
        answer = {"choices": [{"text": "Hi.", "finish_reason": "stop"}]}
        reply = models if request.url.path.endswith("models") else answer
        await JSONResponse(reply)(scope, receive, send)

    async with answering(text_only) as url:
        good, found = await findings(url)
    assert not good
    assert list(found) == ["L1"]
    assert "token ids" in found["L1"]["reason"]


async def test_a_server_that_ignores_limit_or_stop_ids_is_broken(findings: Findings) -> None:
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
        good, found = await findings(url)
    assert not good
    assert {name for name, each in found.items() if each["state"] == "broken"} == {"L2", "L3"}
    assert {name for name, each in found.items() if each["state"] == "absent"} == {"L5", "L7", "L8"}
