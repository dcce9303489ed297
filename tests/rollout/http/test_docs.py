"""Run the examples of docs/http-api.md against a running service; every route has an example."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from prorl_envs.config import ServerSettings
from prorl_envs.model.routing.pool import ModelPool
from prorl_envs.model.tokens.rendering import TemplateRenderer
from prorl_envs.rollout.http.app import create_app
from prorl_envs.rollout.http.server import serving
from prorl_envs.rollout.service.service import RolloutService
from tests.support.toy import ToyModel, ToyWorld, empty_node

pytestmark = pytest.mark.anyio

PAGE = Path(__file__).parents[3] / "docs" / "http-api.md"
BLOCK = re.compile(r"^```http\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Example(NamedTuple):
    """One `http` block: a request with headers and body, an empty line, a status and the answer."""

    method: str
    path: str
    headers: dict[str, str]
    body: str
    status: int
    answer: str


def examples() -> Iterator[Example]:
    for block in BLOCK.findall(PAGE.read_text()):
        request, answer = block.split("\n\n", 1)
        first, *rest = request.split("\n")
        method, path = first.split(" ")
        headers = dict(line.split(": ", 1) for line in rest if re.match(r"^[A-Z][\w-]+: ", line))
        body = "\n".join(line for line in rest if not re.match(r"^[A-Z][\w-]+: ", line))
        status, _, content = answer.partition("\n")
        yield Example(method, path, headers, body, int(status), content.strip())


def shown_in(shown: Any, given: Any) -> bool:
    """Whether the answer contains everything that the page shows."""
    if isinstance(shown, dict):
        return isinstance(given, dict) and all(k in given and shown_in(v, given[k]) for k, v in shown.items())
    if isinstance(shown, list):
        return (
            isinstance(given, list)
            and len(given) >= len(shown)
            and all(shown_in(*pair) for pair in zip(shown, given, strict=False))
        )
    if isinstance(shown, str) and shown.endswith("..."):
        return isinstance(given, str) and given.startswith(shown.removesuffix("..."))
    return bool(shown == given)


def new_service(renderer: TemplateRenderer) -> RolloutService:
    pool = ModelPool(lambda _: ToyModel(renderer, lambda *_: [{"tool": "finish", "arguments": {}}]))
    pool.add("http://127.0.0.1:8000")  # no traffic is sent to the address
    return RolloutService(empty_node(), {"bash": ToyWorld().family()}, renderer, pool)


async def test_every_example_is_answered_as_on_the_page(renderer: TemplateRenderer) -> None:
    open_to_all = ServerSettings(port=0, generate_token=False)
    async with serving(new_service(renderer), open_to_all) as url, httpx.AsyncClient(base_url=url) as client:
        for example in examples():
            headers = {"Content-Type": "application/json", **example.headers}
            response = await client.request(
                example.method, example.path, headers=headers, content=example.body, timeout=60
            )
            what = f"{example.method} {example.path}: {response.status_code} {response.text[:2000]}"
            assert response.status_code == example.status, what
            assert shown_in(json.loads(example.answer), response.json()), what


def test_every_route_has_an_example(renderer: TemplateRenderer) -> None:
    document = create_app(new_service(renderer), ServerSettings()).openapi()
    shown = [(example.method, example.path.partition("?")[0]) for example in examples()]
    del document["paths"]["/metrics"]  # not JSON; see operating.md
    for path, operations in document["paths"].items():
        pattern = re.compile(re.sub(r"\\\{.*?\\\}", r"[^?]+", re.escape(path)) + "$")
        for method in operations:
            known = any(m == method.upper() and pattern.match(p) for m, p in shown)
            assert known, f"{PAGE.name} has no example of {method.upper()} {path}"
