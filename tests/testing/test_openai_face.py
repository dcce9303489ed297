"""The scripted model with OpenAI's interfaces, over real HTTP."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from prorl_envs.env.base import ReferenceCall, Task
from prorl_envs.testing.openai_face import DONE_TEXT
from tests.support.openai_server import scripted_openai

LIST = ReferenceCall(tool="bash", arguments={"command": "ls"})
COUNT = ReferenceCall(tool="bash", arguments={"command": "ls | wc -l"})
TASKS = (
    Task(id="list", instruction="List the files.", reference=(LIST,)),
    Task(id="count", instruction="List the files. Then count them.", reference=(LIST, COUNT)),
)


@pytest.fixture
def url() -> Iterator[str]:
    with scripted_openai(TASKS) as url:
        yield url


def respond(url: str, items: list[dict[str, Any]]) -> dict[str, Any]:
    answer = httpx.post(f"{url}/responses", json={"model": "reference", "input": items})
    answer.raise_for_status()
    (item,) = answer.json()["output"]
    assert isinstance(item, dict)
    return item


def ask(instruction: str) -> list[dict[str, Any]]:
    return [{"role": "system", "content": "You work."}, {"role": "user", "content": instruction}]


def play(url: str, instruction: str) -> list[str]:
    """Return the arguments of each call and the closing text, until the script is finished."""
    items = ask(instruction)
    said: list[str] = []
    for _ in range(5):
        item = respond(url, items)
        if item["type"] == "message":
            return [*said, item["content"][0]["text"]]
        said.append(item["arguments"])
        items += [item, {"type": "function_call_output", "call_id": item["call_id"], "output": "ok"}]
    return said


def arguments(*calls: ReferenceCall) -> list[str]:
    return [json.dumps(call.arguments) for call in calls]


def test_the_reference_is_played_call_by_call(url: str) -> None:
    assert play(url, TASKS[0].instruction) == [*arguments(LIST), DONE_TEXT]


def test_the_longest_instruction_in_the_prompt_is_the_task(url: str) -> None:
    prompt = f"Your task: {TASKS[1].instruction} Go."
    assert play(url, prompt) == [*arguments(LIST, COUNT), DONE_TEXT]


def test_content_may_be_a_list_of_parts(url: str) -> None:
    parts = [{"type": "input_text", "text": TASKS[0].instruction}]
    assert respond(url, [{"role": "user", "content": parts}])["arguments"] == arguments(LIST)[0]


def test_chat_completions_play_the_same(url: str) -> None:
    messages = ask(TASKS[0].instruction)
    body = {"model": "reference", "messages": messages}
    first = httpx.post(f"{url}/chat/completions", json=body).json()["choices"][0]
    (call,) = first["message"]["tool_calls"]
    assert (first["finish_reason"], call["function"]["arguments"]) == ("tool_calls", arguments(LIST)[0])
    messages += [first["message"], {"role": "tool", "tool_call_id": call["id"], "content": "ok"}]
    last = httpx.post(f"{url}/chat/completions", json=body).json()["choices"][0]
    assert (last["finish_reason"], last["message"]["content"]) == ("stop", DONE_TEXT)


def test_a_prompt_without_a_known_instruction_is_refused(url: str) -> None:
    body = {"model": "reference", "input": "Something else."}
    assert httpx.post(f"{url}/responses", json=body).status_code == 400


@pytest.mark.parametrize("body", [b"{", b"[]"])
def test_a_body_that_is_not_an_object_is_refused(url: str, body: bytes) -> None:
    assert httpx.post(f"{url}/responses", content=body).status_code == 400
