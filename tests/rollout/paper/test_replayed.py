"""The recorded requests of the paper's clients, sent to a real service."""

import asyncio
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from prorl_envs.env.registry import example_path
from prorl_envs.envs.code.env import CodeEnvironment
from prorl_envs.envs.swebench.env import SwebenchEnvironment
from tests.rollout.paper.conftest import START_SERVER, model_of
from tests.rollout.paper.requests import (
    Body,
    Sent,
    code_rows,
    math_rows,
    script_requests,
    swe_row,
    trainer_requests,
)

pytestmark = pytest.mark.timeout(200)


@contextmanager
def service(folder: Path, variables: dict[str, str]) -> Iterator[str]:
    """Start the service as the scripts do; yield its URL."""
    command = [sys.executable, str(START_SERVER), "--port", "0", "--timeout", "500"]
    with subprocess.Popen(command, cwd=folder, env=variables, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            said = next(line for line in process.stderr if line.startswith("rollout service:"))
            yield said.split()[2]
        finally:
            process.terminate()


async def replay(url: str, sent: Iterable[Sent]) -> list[Body]:
    """Send the requests as the clients do; return the answers of `/process`."""
    requests = list(sent)
    async with httpx.AsyncClient(base_url=url, timeout=150) as http:

        async def post(path: str, body: Body | None) -> Any:
            response = await http.post(path, json=body)
            assert response.status_code == 200, response.text
            return response.json()

        first = next(i for i, (path, _) in enumerate(requests) if path == "/process")
        for path, body in requests[:first]:
            await post(path, body)
        answers = await asyncio.gather(*(post(*request) for request in requests[first:-1]))
        await post(*requests[-1])
        return answers


def check_tokens(answer: Body) -> None:
    """Read the tokens as a trainer does: messages before the first answer are the prompt; later answers have
    log-probabilities."""
    messages = answer["messages"]
    first = next(i for i, message in enumerate(messages) if message["role"] == "assistant")
    assert first > 0 and messages[-1]["role"] == "assistant"
    assert sum(len(message["token_ids"]) for message in messages[:first]) > 0
    for message in messages:
        sampled = message["role"] == "assistant"
        assert len(message["logprobs"] or []) == (len(message["token_ids"]) if sampled else 0)


def test_a_script_and_then_a_trainer(tmp_path: Path) -> None:
    rows = math_rows()
    with model_of(tmp_path, "math", rows) as (llm, variables), service(tmp_path, variables) as url:
        answers = asyncio.run(replay(url, script_requests(rows, llm)))
        assert sum(answer["resolved"] for answer in answers) == 4
        assert [answer["trajectory_id"] for answer in answers] == [0, 1, 2, 3]
        answers = asyncio.run(replay(url, trainer_requests(rows, llm, samples=2)))
    assert sum(answer["resolved"] for answer in answers) == 8
    assert Counter(answer["instance_id"] for answer in answers) == {f"row-{i}": 2 for i in range(4)}
    for answer in answers:
        check_tokens(answer)


def test_rows_of_code_and_of_repositories_are_accepted() -> None:
    for row, _ in code_rows():
        assert CodeEnvironment.load(row).tests.type == "stdio"
    row = json.loads(example_path("swebench").read_text(encoding="utf-8").splitlines()[0])
    task, expected = SwebenchEnvironment.load(swe_row(row)), SwebenchEnvironment.load(row)
    assert task == expected and task.environment is not None
