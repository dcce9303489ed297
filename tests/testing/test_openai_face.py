"""The scripted model with OpenAI's interfaces, over real HTTP."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from prorl_envs.env.base import ReferenceCall, Task
from prorl_envs.testing.openai_face import DONE_TEXT, UNKNOWN_TOOL, FakeBehaviour
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


def respond(url: str, model: str, items: list[dict[str, Any]]) -> dict[str, Any]:
    answer = httpx.post(f"{url}/responses", json={"model": model, "input": items})
    answer.raise_for_status()
    (item,) = answer.json()["output"]
    assert isinstance(item, dict)
    return item


def ask(instruction: str) -> list[dict[str, Any]]:
    return [{"role": "system", "content": "You work."}, {"role": "user", "content": instruction}]


def play(url: str, model: str, instruction: str, most: int = 5) -> list[str]:
    """Return the arguments of each call and the closing text, until the script is finished."""
    items = ask(instruction)
    said: list[str] = []
    for _ in range(most):
        item = respond(url, model, items)
        if item["type"] == "message":
            return [*said, item["content"][0]["text"]]
        said.append(item["arguments"])
        items += [item, {"type": "function_call_output", "call_id": item["call_id"], "output": "ok"}]
    return said


def arguments(*calls: ReferenceCall) -> list[str]:
    return [json.dumps(call.arguments) for call in calls]


def test_the_reference_is_played_call_by_call(url: str) -> None:
    assert play(url, "reference", TASKS[0].instruction) == [*arguments(LIST), DONE_TEXT]


def test_the_longest_instruction_in_the_prompt_is_the_task(url: str) -> None:
    prompt = f"Your task: {TASKS[1].instruction} Go."
    assert play(url, "reference", prompt) == [*arguments(LIST, COUNT), DONE_TEXT]


def test_each_behaviour_has_the_described_answers(url: str) -> None:
    instruction = TASKS[0].instruction
    assert play(url, "nothing", instruction) == [DONE_TEXT]
    assert play(url, "endless", instruction, most=4) == arguments(LIST, LIST, LIST, LIST)
    first, *rest = play(url, "malformed", instruction)
    with pytest.raises(ValueError):
        json.loads(first)
    assert rest == [*arguments(LIST), DONE_TEXT]
    assert respond(url, "unknown", ask(instruction))["name"] == UNKNOWN_TOOL


def test_content_may_be_a_list_of_parts(url: str) -> None:
    parts = [{"type": "input_text", "text": TASKS[0].instruction}]
    assert respond(url, "reference", [{"role": "user", "content": parts}])["arguments"] == arguments(LIST)[0]


def test_chat_completions_play_the_same(url: str) -> None:
    messages = ask(TASKS[0].instruction)
    body = {"model": "reference", "messages": messages}
    first = httpx.post(f"{url}/chat/completions", json=body).json()["choices"][0]
    (call,) = first["message"]["tool_calls"]
    assert (first["finish_reason"], call["function"]["arguments"]) == ("tool_calls", arguments(LIST)[0])
    messages += [first["message"], {"role": "tool", "tool_call_id": call["id"], "content": "ok"}]
    last = httpx.post(f"{url}/chat/completions", json=body).json()["choices"][0]
    assert (last["finish_reason"], last["message"]["content"]) == ("stop", DONE_TEXT)


@pytest.mark.parametrize(
    ("model", "instruction", "status"),
    [
        ("error", "List the files.", 500),
        ("reference", "Something else.", 400),
        ("gpt", "List the files.", 404),
    ],
)
def test_an_unsupported_request_is_an_http_error(url: str, model: str, instruction: str, status: int) -> None:
    answer = httpx.post(f"{url}/responses", json={"model": model, "input": instruction})
    assert answer.status_code == status


@pytest.mark.parametrize("body", [b"{", b"[]"])
def test_a_body_that_is_not_an_object_is_refused(url: str, body: bytes) -> None:
    assert httpx.post(f"{url}/responses", content=body).status_code == 400


def test_behaviours_are_listed_as_models(url: str) -> None:
    listed = httpx.get(f"{url}/models").json()["data"]
    assert [model["id"] for model in listed] == [str(behaviour) for behaviour in FakeBehaviour]
