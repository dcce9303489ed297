"""A real vLLM on the CPU, with a tiny model made for the tests. `make test-vllm` sets up its environment."""

import json
import os
import random
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2s
from pathlib import Path

import pytest

from prorl_envs.model.types import Sampled
from prorl_envs.testing.tokenizer import END_OF_TEXT, builtin_renderer, save_tokenizer
from tests.support.drift import TOOL
from tests.support.vllm_server import VllmServer, vllm_server

_RECIPE = Path(__file__).with_name("make_model.py")
_WORDS = ("the", "agent", "reads", "a", "task", "and", "looks", "at", "files", "then", "it", "runs", "tests")
VERSIONS = ("one", "two")


@dataclass(frozen=True, slots=True)
class RealServer(VllmServer):
    """A running vLLM.

    Args:
        models: a folder with the versions of its model; the first is loaded.
    """

    models: Path


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def python() -> Path:
    """Return the Python of vLLM's environment."""
    named = os.environ.get("TEST_VLLM_PYTHON")
    if not named:
        pytest.skip("no vLLM: make test-vllm sets one up")
    return Path(named)


@pytest.fixture(scope="session")
def models(python: Path) -> Path:
    """Both versions of the model, cached beside vLLM's environment."""
    name = blake2s(_RECIPE.read_bytes() + Path(__file__).read_bytes(), digest_size=6).hexdigest()
    folder = python.parent.parent / f"models-{name}"
    if not (folder / VERSIONS[-1] / "tokenizer.json").exists():
        _write_conversations(folder)
        subprocess.run([python, _RECIPE, folder], check=True)
    return folder


@pytest.fixture(scope="session")
def server(python: Path, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """A vLLM with the first version loaded, stopped after the tests; or the one that TEST_VLLM_URL names."""
    if running := os.environ.get("TEST_VLLM_URL"):
        yield RealServer(running, models)
        return
    log = tmp_path_factory.mktemp("vllm") / "server.log"
    with vllm_server(python, models / VERSIONS[0], log) as started:
        yield RealServer(started.url, models)


def _write_conversations(folder: Path) -> None:
    """Write token ids to train on: the answer to any prompt is a call with the version's command."""
    renderer, chance = builtin_renderer(), random.Random(0)
    save_tokenizer(folder / "tokenizer")

    def words() -> str:
        return " ".join(chance.choices(_WORDS, k=chance.randint(3, 40)))

    versions: dict[str, list[list[int]]] = {}
    for version in VERSIONS:
        function = {"name": "bash", "arguments": {"command": f"echo {version}"}}
        call = {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "function": function}]}
        answer = renderer.assistant(call)
        sampled = Sampled(tuple(answer), (0.0,) * len(answer), "stop", "", "")
        versions[version] = []
        for _ in range(64):
            ids = renderer.prompt([{"role": "user", "content": words()}], [TOOL])
            for _ in range(3):
                result = {"role": "tool", "tool_call_id": "c", "name": "bash", "content": words()}
                ids += [*answer, *renderer.bridge(sampled, [result])]
            versions[version].append([*ids, *answer])
    # Another end-of-text id than the end of turn: without stop ids, sampling continues up to the limit.
    eos_id = renderer.tokenizer.token_to_id(END_OF_TEXT)
    config = folder / "tokenizer" / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "eos_token": END_OF_TEXT}))
    given = {"versions": versions, "vocab_size": renderer.vocab_size, "eos_id": eos_id}
    (folder / "conversations.json").write_text(json.dumps(given))
