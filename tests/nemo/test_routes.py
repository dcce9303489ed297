"""Tool calls with the name of a server route, without NeMo Gym, on a server with the same routes."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request, Response
from fastapi.responses import PlainTextResponse
from pydantic import BaseModel, ConfigDict

from prorl_envs.nemo.routes import separate_tool_calls
from tests.nemo.test_sessions import ROW, House

pytestmark = pytest.mark.anyio

OWN = ("verify", "reset", "step", "seed_session", "aggregate_metrics")
BODY = {"verifier_metadata": {"task": ROW}}
EASY = {"verifier_metadata": {"task": ROW | {"expected": "easy"}}}


class _Body(BaseModel):
    model_config = ConfigDict(extra="allow")

    verifier_metadata: dict[str, Any]


@asynccontextmanager
async def serving(root: Path) -> AsyncIterator[tuple[House, httpx.AsyncClient]]:
    """A server whose own routes answer `own: NAME`, and whose tool calls answer `tool: NAME, BODY`."""
    house = House(root)
    app = FastAPI()

    def add(name: str) -> None:
        async def own(body: _Body, request: Request) -> str:
            assert await request.body()
            return f"own: {name}, {body.verifier_metadata['task']['expected']}"

        app.post(f"/{name}")(own)

    async def call_tool(request: Request, tool: str) -> Response:
        return PlainTextResponse(f"tool: {tool}, {(await request.body()).decode()}")

    for name in OWN:
        add(name)

    @app.post("/close_session")
    async def close(body: dict[str, str]) -> str:
        return f"own: close {body['resources_session_id']}"

    separate_tool_calls(
        app,
        sessions=house.sessions,
        session_id=lambda request: request.headers["session"],
        call_tool=call_tool,
    )
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(
        transport=transport, base_url="http://gym", headers={"session": "s"}
    ) as agent:
        yield house, agent
        await house.sessions.aclose()


@pytest.mark.parametrize("state", ["open", "graded"])
@pytest.mark.parametrize("name", OWN)
async def test_a_models_call_of_a_route_of_the_server_is_a_tool_call(
    tmp_path: Path, name: str, state: str
) -> None:
    async with serving(tmp_path) as (house, agent):
        await house.sessions.open("s", ROW)
        if state == "graded":
            await house.sessions.grade("s")
        bodies: list[Any] = [{}, [], "verify", EASY, {"verifier_metadata": ROW}, {"verifier_metadata": None}]
        for text in map(json.dumps, bodies):
            answer = await agent.post(f"/{name}", content=text)
            assert (answer.status_code, answer.text) == (200, f"tool: {name}, {text}")
        assert (await agent.post(f"/{name}", content="{no JSON")).text == f"tool: {name}, {{no JSON"
        assert len(house.sessions) == (state == "open")


@pytest.mark.parametrize("name", OWN)
async def test_the_agents_own_requests_reach_their_routes(tmp_path: Path, name: str) -> None:
    async with serving(tmp_path) as (house, agent):
        assert (await agent.post(f"/{name}", json=EASY)).json() == f"own: {name}, easy"  # no episode yet
        assert (await agent.post(f"/{name}", json={})).status_code == 422
        await house.sessions.open("s", ROW)
        reordered = {"verifier_metadata": {"task": dict(reversed(ROW.items()))}}
        for body in (BODY, BODY | {"response": {}}, reordered):
            assert (await agent.post(f"/{name}", json=body)).json() == f"own: {name}, alpha"
        await house.sessions.grade("s")
        assert (await agent.post(f"/{name}", json=BODY)).json() == f"own: {name}, alpha"  # repeated


async def test_only_an_own_close_reaches_its_route(tmp_path: Path) -> None:
    """The model's requests belong to an open session, and the model does not know the session's id."""

    async def close(agent: httpx.AsyncClient, body: Any) -> str:
        return (await agent.post("/close_session", json=body)).text

    async with serving(tmp_path) as (house, agent):
        assert await close(agent, {"resources_session_id": "other"}) == '"own: close other"'
        await house.sessions.open("s", ROW)
        others: list[Any] = [{}, [], BODY, {"resources_session_id": "other"}, {"resources_session_id": ["s"]}]
        for forged in others:
            assert (await close(agent, forged)).startswith("tool: close_session, ")
        assert await close(agent, {"resources_session_id": "s"}) == '"own: close s"'
        await house.sessions.close("s")
        assert await close(agent, {"resources_session_id": "other"}) == '"own: close other"'


@pytest.mark.parametrize(
    ("path", "tool"),
    [
        ("/write", "write"),
        ("/verify/", "verify/"),
        ("/verify?a=b", "verify"),
        ("/%76erify", "verify"),
        ("//verify", "/verify"),
        ("/a/verify", "a/verify"),
        ("/openapi.json", "openapi.json"),
        ("/docs", "docs"),
        ("/Verify", "Verify"),
        ("/", ""),
    ],
)
async def test_every_other_path_is_a_tool_call(tmp_path: Path, path: str, tool: str) -> None:
    async with serving(tmp_path) as (house, agent):
        await house.sessions.open("s", ROW)
        answer = await agent.post(f"http://gym{path}", json={})
        assert (answer.status_code, answer.text) == (200, f"tool: {tool}, {{}}")
