"""A real vLLM on the CPU, with a tiny model made on the spot. `make test-vllm` sets up its environment."""

import json
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2s
from pathlib import Path

import httpx
import pytest

from prorl_envs.policy.types import Sampled
from prorl_envs.testing.drift import TOOL
from prorl_envs.testing.tokenizer import END_OF_TEXT, builtin_renderer, save_tokenizer

_RECIPE = Path(__file__).with_name("make_model.py")
_WORDS = ("the", "agent", "reads", "a", "task", "and", "looks", "at", "files", "then", "it", "runs", "tests")
#: Seconds a busy machine may take to load a server.
_STARTS = 900.0
VERSIONS = ("one", "two")


@dataclass(frozen=True, slots=True)
class RealServer:
    """A vLLM that answers.

    Args:
        url: its base URL.
        models: a folder with the versions of its model; the first is loaded.
    """

    url: str
    models: Path

    def load(self, version: str) -> None:
        """Put the weights of a version in the place of those there are, as a trainer on this machine
        would."""
        path = str(self.models / version)
        body = {"method": "reload_weights", "kwargs": {"weights_path": path}}
        httpx.post(f"{self.url}/collective_rpc", json=body, timeout=120).raise_for_status()

    def metric(self, name: str) -> float:
        """The sum of a metric's values."""
        lines = httpx.get(f"{self.url}/metrics", timeout=30).text.splitlines()
        values = [line.rpartition(" ")[2] for line in lines if line.startswith((f"{name}{{", f"{name} "))]
        return sum(map(float, values))


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def python() -> Path:
    """The Python of vLLM's environment."""
    named = os.environ.get("PRORL_VLLM_PYTHON")
    if not named:
        pytest.skip("no vLLM: make test-vllm sets one up")
    return Path(named)


@pytest.fixture(scope="session")
def models(python: Path) -> Path:
    """Both versions of the model, kept beside vLLM's environment for the next time."""
    name = blake2s(_RECIPE.read_bytes() + Path(__file__).read_bytes(), digest_size=6).hexdigest()
    folder = python.parent.parent / f"models-{name}"
    if not (folder / VERSIONS[-1] / "tokenizer.json").exists():
        _write_conversations(folder)
        subprocess.run([python, _RECIPE, folder], check=True, env=_environment())
    return folder


@pytest.fixture(scope="session")
def server(python: Path, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """vLLM with the first version loaded, which ends with the tests; or the one PRORL_VLLM_URL names."""
    if running := os.environ.get("PRORL_VLLM_URL"):
        yield RealServer(running, models)
        return
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("vllm") / "server.log"
    options = ["--model", str(models / VERSIONS[0]), "--served-model-name", "tiny", "--host", "127.0.0.1"]
    options += ["--port", str(port), "--dtype", "float32", "--max-model-len", "4096", "--max-num-seqs", "16"]
    options += ["--enforce-eager", "--enable-scale-out", "--enable-prompt-tokens-details"]
    options += ["--logprobs-mode", "processed_logprobs"]
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", *options]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=_environment(), start_new_session=True
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait(url, process, log)
        yield RealServer(url, models)
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _environment() -> dict[str, str]:
    ours = {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return {**os.environ, **ours}


def _wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    ends = time.monotonic() + _STARTS
    while process.poll() is None and time.monotonic() < ends:
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(1)
    pytest.fail("vLLM did not start:\n" + log.read_text(errors="replace")[-3000:])


def _write_conversations(folder: Path) -> None:
    """Token ids to train on: whatever is asked, the answer is a call with the version's own command."""
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
    # Another end of text than the end of turn: a call without stop ids goes on for as long as it is asked to.
    eos_id = renderer.tokenizer.token_to_id(END_OF_TEXT)
    config = folder / "tokenizer" / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "eos_token": END_OF_TEXT}))
    given = {"versions": versions, "vocab_size": renderer.vocab_size, "eos_id": eos_id}
    (folder / "conversations.json").write_text(json.dumps(given))
