"""Overhead of a rollout's model endpoint per call: three API formats, histories of several lengths.

python -m bench.endpoint

A harness's conversation grows turn by turn over one persistent connection. The model answers without delay in
this process, so only the endpoint is measured. In alternation, a bare server of the same kind receives the
same bytes and returns the same answer without parsing them; the difference is the endpoint's overhead. The
service's own loop also does part of this work (parsing the answer, bridging to the next turn). The bench
measures this part separately.

Use the wall time on an idle machine, and the CPU time on a busy machine.
"""

import argparse
import json
import socket
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from bench.__main__ import machine
from prorl_envs.cli.run_loop import run
from prorl_envs.clock import SystemClock
from prorl_envs.listener.listener import HttpListener
from prorl_envs.model.http.client import ModelHttpClient
from prorl_envs.model.types import Sampled, Sampling
from prorl_envs.rollout.agent.agent_loop import Agent, Transcript
from prorl_envs.rollout.api.types import AgentLimits
from prorl_envs.rollout.endpoint.app import EndpointApp
from prorl_envs.rollout.endpoint.harness_run import INSIDE
from prorl_envs.rollout.endpoint.session import ModelSession
from prorl_envs.testing.scripted import as_message
from prorl_envs.testing.tokenizer import builtin_renderer

SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}}
OBSERVATION = "total 0\n-rw-r--r-- 1 agent agent 12 Jan 1 00:00 file.txt\n" * 4
SAID = "look at the file and say more "
#: Context sizes; the last turn has about this many tokens.
TOKENS = (1_000, 8_000, 32_000)


class Instant:
    """Model that answers without delay with one tool call."""

    def __init__(self) -> None:
        self._renderer = renderer = builtin_renderer()
        call = {"tool": "bash", "arguments": {"command": "ls -l"}, "content": "I look."}
        self._ids = tuple(renderer.assistant(as_message([call])))

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str) -> Sampled:
        return Sampled(self._ids, (-0.1,) * len(self._ids), "stop", "1", "here")

    def own_turn(self) -> None:
        """Do the work of the service's own loop in one turn, except for the model call."""
        sampled = Sampled(self._ids, (-0.1,) * len(self._ids), "stop", "1", "here")
        call = self._renderer.parse(sampled.ids).tool_calls[0]
        self._renderer.bridge(sampled, [{"role": "tool", "tool_call_id": call.id, "content": OBSERVATION}])

    async def aclose(self) -> None:
        pass


class Bare:
    """Server that reads a request and returns a prepared answer."""

    answer = b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive()).get("more_body", False):
            pass
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(self.answer))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": self.answer})


def chat(history: list[Any], answer: Any) -> None:
    """Append an answer and its result to a conversation, as a harness does."""
    answer_message = answer["choices"][0]["message"]
    call = answer_message["tool_calls"][0]["id"]
    history += [answer_message, {"role": "tool", "tool_call_id": call, "content": OBSERVATION}]


def responses(history: list[Any], answer: Any) -> None:
    call = next(item for item in answer["output"] if item["type"] == "function_call")
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": OBSERVATION}
    history += [*answer["output"], output]


def messages(history: list[Any], answer: Any) -> None:
    call = next(block for block in answer["content"] if block["type"] == "tool_use")
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": OBSERVATION}
    history += [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": [result]}]


SHAPES: dict[str, tuple[str, str, Any, Callable[[list[Any], Any], None]]] = {
    "Chat Completions": (
        "/v1/chat/completions",
        "messages",
        [{"type": "function", "function": {"name": "bash", "parameters": SCHEMA}}],
        chat,
    ),
    "Responses": (
        "/v1/responses",
        "input",
        [{"type": "function", "name": "bash", "parameters": SCHEMA}],
        responses,
    ),
    "Messages": ("/v1/messages", "messages", [{"name": "bash", "input_schema": SCHEMA}], messages),
}


@dataclass(slots=True)
class Spent:
    """Wall time and CPU time of each call, in seconds."""

    passed: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    @asynccontextmanager
    async def counting(self) -> AsyncIterator[None]:
        began, cpu = time.perf_counter(), time.process_time()
        yield
        self.cpu.append(time.process_time() - cpu)
        self.passed.append(time.perf_counter() - began)


@asynccontextmanager
async def linked(app: ASGIApp, key: str = "") -> AsyncIterator[ModelHttpClient]:
    """Serve an application as in a sandbox, and connect to it."""
    listener = HttpListener(app, socket.create_server(("127.0.0.1", 0)), INSIDE)
    link = ModelHttpClient(f"http://127.0.0.1:{listener.port}", api_key=key)
    try:
        yield link
    finally:
        await link.aclose()
        await listener.aclose()


async def measured(shape: str, tokens: int, turns: int) -> tuple[Spent, Spent, Spent, int]:
    """Return the times of each call but the first at the endpoint, at the bare server and in the service's
    own loop, and the length of the last context in tokens."""
    path, name, tools, take = SHAPES[shape]
    model, transcript, bare = Instant(), Transcript(), Bare()
    limits = AgentLimits(max_turns=1000, max_tokens=1_000_000)
    agent = Agent(builtin_renderer(), model, SystemClock())
    session = ModelSession(agent, transcript, limits, Sampling(max_tokens=500), "s")
    app = EndpointApp(lambda key: session if key == session.key else None)
    history: list[Any] = [{"role": "user", "content": SAID * (tokens // 7)}]
    ours, theirs, own = Spent(), Spent(), Spent()
    async with linked(app, session.key) as link, linked(bare, session.key) as other:
        for turn in range(turns + 1):
            body = json.dumps({"model": "m", "max_tokens": 500, name: history, "tools": tools}).encode()
            async with ours.counting():
                answer = await link.request("POST", path, body)
            bare.answer = answer
            async with theirs.counting():
                await other.request("POST", path, body)
            async with own.counting():
                model.own_turn()
            if not turn:
                ours, theirs, own = Spent(), Spent(), Spent()
            take(history, json.loads(answer))
    (row,) = [row for row in [session.recording.trajectory()] if row is not None]
    assert len(row.turns) == turns + 1 and not session.recording.forks and row.drift == 0
    return ours, theirs, own, len(row.ids)


def _added(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    return [(mine - other) * 1e3 for mine, other in zip(ours, theirs, strict=True)]


async def main(turns: int) -> None:
    print(f"{machine()}\n")
    print("| shape | context, tokens | added CPU, ms | of it the loop's own | added time, ms | its p95 |")
    print("|---|---|---|---|---|---|")
    for tokens in TOKENS:
        for shape in SHAPES:
            ours, theirs, own, length = await measured(shape, tokens, turns)
            cpu, passed = _added(ours.cpu, theirs.cpu), _added(ours.passed, theirs.passed)
            loop, p95 = statistics.median(own.cpu) * 1e3, statistics.quantiles(passed, n=20)[-1]
            numbers = [statistics.median(cpu), loop, statistics.median(passed), p95]
            print(f"| {shape} | {length:,} | " + " | ".join(f"{number:.2f}" for number in numbers) + " |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m bench.endpoint", description=__doc__)
    parser.add_argument("--turns", type=int, default=30, help="measured calls per conversation")
    sys.exit(run(main(parser.parse_args().turns)))
