"""A harness of NeMo Gym, OpenCode, in our sandbox: the documented configuration, with the real program."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nemo_gym", reason="run by scripts/test-nemo.sh in an environment of its own")

from fastapi import FastAPI, Request, Response

from prorl_envs.env.base import Task
from prorl_envs.nemo.examples import EXAMPLE, read_jsonl
from prorl_envs.nemo.root import gym_root
from prorl_envs.testing.openai_face import DONE_TEXT
from tests.nemo.gym import CHECKOUT, HAS_MANIFESTS, Gym, evaluate, model_flags, server_folder, started
from tests.support.openai_server import face
from tests.support.serving import served

pytestmark = [
    pytest.mark.nemo,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not HAS_MANIFESTS, reason="NeMo Gym 0.4 has no harness that runs in a sandbox"),
]

STRICT = "+error_on_agent_without_environment_server=true"
PACKAGE = "opencode-linux-x64@1.17.11"
#: The call that OpenCode's model makes, and its result. Nothing but the model can be reached.
COMMAND = "echo $(((18 * 7 - 6) / 3)); (: >/dev/tcp/192.0.2.1/80) 2>/dev/null || echo closed"
RESULT = "40\nclosed\n"


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder into which OpenCode is installed, as documented."""
    npm, folder = shutil.which("npm"), tmp_path_factory.mktemp("tools")
    if npm is None or os.uname().machine != "x86_64":
        pytest.skip("OpenCode needs npm and x86-64")
    done = subprocess.run(
        [npm, "install", "--prefix", folder, PACKAGE], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"OpenCode cannot be installed: {done.stderr[-500:]}")
    return folder


def model(instruction: str) -> FastAPI:
    """Return the scripted model: one call, then the answer, with tokens as vLLM reports them."""
    call = {"tool": "bash", "arguments": {"command": COMMAND, "description": "Calculates"}}
    app = face([Task.model_validate({"id": "a", "instruction": instruction, "reference": [call]})])

    @app.middleware("http")
    async def with_tokens(request: Request, call_next: Any) -> Response:
        answered = await call_next(request)
        body = b"".join([chunk async for chunk in answered.body_iterator])
        if request.url.path.endswith("/chat/completions") and answered.status_code == 200:
            answer = json.loads(body)
            start = 20 * int(answer["id"].removeprefix("chatcmpl-"))
            message = answer["choices"][0]["message"]
            message |= {"prompt_token_ids": [*range(start + 10)], "generation_log_probs": [-0.5] * 5}
            message["generation_token_ids"] = [*range(start + 10, start + 15)]
            body = json.dumps(answer).replace(DONE_TEXT, r"It is \\boxed{40}.").encode()
        return Response(body, answered.status_code, media_type="application/json")

    return app


def documented(tools: Path) -> str:
    """Return the configuration that the page shows: of the provider and of OpenCode."""
    page = (CHECKOUT / "docs" / "nemo-gym.md").read_text()
    blocks = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (sandbox,) = (str(block) for block in blocks if block.startswith("sandbox:"))
    (opencode,) = (str(block) for block in blocks if block.startswith("opencode:"))
    assert PACKAGE in opencode
    return sandbox.partition("my_agent:")[0] + opencode.replace("~/gym/tools/", f"{tools}/")


@pytest.fixture(scope="module")
def running(tools: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gym]:
    root = gym_root(tmp_path_factory.mktemp("gym"))
    (root.path / "opencode.yaml").write_text(documented(tools))
    selection = ["--resources-server", "prorl_math/single_agent_turn", "--config", "opencode.yaml", STRICT]
    row = read_jsonl(server_folder(root, "math") / EXAMPLE)[0]
    tokens = "++policy_model.responses_api_models.vllm_model.return_token_id_information=true"
    capture = ["++token_id_capture.enabled=true", f"++token_id_capture.dir={root.path / 'tokens'}"]
    with (
        served(model(row["responses_create_params"]["input"][-1]["content"])) as url,
        (tmp_path_factory.mktemp("log") / "gym.log").open("w") as log,
    ):
        flags = [*selection, "--model-type", "vllm_model", *model_flags(f"{url}/v1"), tokens, *capture]
        with started(root, log, *flags) as gym:
            yield gym


def test_opencode_solves_a_task_and_its_tokens_are_recorded(running: Gym, tmp_path: Path) -> None:
    row = read_jsonl(server_folder(running.root, "math") / EXAMPLE)[0]
    prompt = [item for item in row["responses_create_params"]["input"] if item["role"] == "user"]
    rows = [row | {"responses_create_params": {"input": prompt}}]
    (result,) = evaluate(running, "opencode", rows, tmp_path / "rollouts.jsonl")
    assert (result["reward"], result["mask_sample"], result["opencode_failed"]) == (1.0, False, False)
    assert RESULT in [item.get("output") for item in result["response"]["output"]]
    (recorded,) = (running.root.path / "tokens").glob("*.jsonl")
    assert [(call["prompt_token_ids"], call["generation_token_ids"]) for call in read_jsonl(recorded)] == [
        ([*range(10)], [*range(10, 15)]),
        ([*range(30)], [*range(30, 35)]),
    ]
