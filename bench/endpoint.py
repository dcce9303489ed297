"""What a rollout's model endpoint adds to a call: three shapes, and histories of several lengths.

python -m bench.endpoint

A harness's conversation grows turn by turn over one kept connection. The model answers at once, in this
process. What the service's own loop does in such a turn too (reading the answer, bridging to the next) is
measured beside it and taken off: the rest is what the endpoint adds, the HTTP of both sides included.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from bench.__main__ import machine
from prorl_envs.clock import SystemClock
from prorl_envs.policy.link import ServerLink
from prorl_envs.policy.types import Sampled, Sampling
from prorl_envs.rollout.agent import Agent, Transcript
from prorl_envs.rollout.endpoint.app import EndpointApp
from prorl_envs.rollout.endpoint.session import ModelSession
from prorl_envs.rollout.server import answering
from prorl_envs.rollout.types import AgentLimits
from prorl_envs.testing.scripted import as_message
from prorl_envs.testing.tokenizer import builtin_renderer

SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}}
OBSERVATION = "total 0\n-rw-r--r-- 1 agent agent 12 Jan 1 00:00 file.txt\n" * 4
TURNS = 30


class Instant:
    """A model that answers at once with one call."""

    def __init__(self) -> None:
        self._renderer = renderer = builtin_renderer()
        call = {"tool": "bash", "arguments": {"command": "ls -l"}, "content": "I look."}
        self._ids = tuple(renderer.assistant(as_message([call])))

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str) -> Sampled:
        return Sampled(self._ids, (-0.1,) * len(self._ids), "stop", "1", "here")

    def own_turn(self) -> None:
        """What the service's own loop does in a turn beside asking its model."""
        sampled = Sampled(self._ids, (-0.1,) * len(self._ids), "stop", "1", "here")
        call = self._renderer.parse(sampled.ids).tool_calls[0]
        self._renderer.bridge(sampled, [{"role": "tool", "tool_call_id": call.id, "content": OBSERVATION}])

    async def aclose(self) -> None:
        pass


def chat(history: list[Any], answer: Any) -> None:
    """Take an answer and its result into a conversation, as a harness does."""
    said = answer["choices"][0]["message"]
    call = said["tool_calls"][0]["id"]
    history += [said, {"role": "tool", "tool_call_id": call, "content": OBSERVATION}]


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


async def measured(shape: str, tokens: int) -> tuple[list[float], list[float], int]:
    """Seconds that each call but the first took, and of CPU, beside what the loop does too; and how long the
    context was at last."""
    path, field, tools, take = SHAPES[shape]
    model, transcript = Instant(), Transcript()
    limits = AgentLimits(max_turns=1000, max_tokens=1_000_000)
    agent = Agent(builtin_renderer(), model, SystemClock())
    session = ModelSession(agent, transcript, limits, Sampling(max_tokens=500), "s")
    app = EndpointApp(lambda key: session if key == session.key else None)
    history: list[Any] = [{"role": "user", "content": "look at the file and say more " * (tokens // 7)}]
    passed, used = [], []
    async with answering(app, log_level="critical") as url:
        link = ServerLink(url, api_key=session.key)
        for turn in range(TURNS + 1):
            body = json.dumps({"model": "m", "max_tokens": 500, field: history, "tools": tools}).encode()
            began, cpu = time.perf_counter(), time.process_time()
            answer = await link.request("POST", path, body)
            if turn:
                passed.append(time.perf_counter() - began)
                used.append(time.process_time() - cpu)
                began, cpu = time.perf_counter(), time.process_time()
                model.own_turn()
                passed[-1] -= time.perf_counter() - began
                used[-1] -= time.process_time() - cpu
            take(history, json.loads(answer))
        await link.aclose()
    (row,) = [row for row in [session.recording.trajectory()] if row is not None]
    assert len(row.turns) == TURNS + 1 and not session.recording.forks and row.drift == 0
    return passed, used, len(row.ids)


async def main() -> None:
    print(f"{machine()}\n")
    print("| shape | context, tokens | added CPU of a call, ms: median | added time: median | p95 |")
    print("|---|---|---|---|---|")
    for tokens in (1_000, 8_000, 32_000):
        for shape in SHAPES:
            passed, used, length = await measured(shape, tokens)
            p95 = statistics.quantiles(passed, n=20)[-1] * 1e3
            cpu, median = statistics.median(used) * 1e3, statistics.median(passed) * 1e3
            print(f"| {shape} | {length:,} | {cpu:.2f} | {median:.2f} | {p95:.2f} |")


if __name__ == "__main__":
    argparse.ArgumentParser(prog="python -m bench.endpoint", description=__doc__).parse_args()
    sys.exit(asyncio.run(main()))
