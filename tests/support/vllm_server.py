"""Real vLLM on the CPU, in a separate Python environment, with a small local model.

`scripts/setup-vllm.sh` creates the environment.
"""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from prorl_envs.errors import ProrlError

#: Seconds that a busy machine may need to load a server.
STARTS_S = 900.0
_ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # pause, resume, other weights
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
_OPTIONS: tuple[str, ...] = ("--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager")
#: The route that names weight versions; cached tokens; log-probabilities after temperature.
_OPTIONS += ("--enable-scale-out", "--enable-prompt-tokens-details", "--logprobs-mode", "processed_logprobs")


@dataclass(frozen=True, slots=True)
class VllmServer:
    """Running vLLM server.

    Args:
        url: its base URL.
    """

    url: str

    def load(self, model: Path | str) -> None:
        """Replace the model's weights, as a trainer on this machine would.

        Args:
            model: a folder that the server sees too, or a name on the Hub.

        Raises:
            httpx.HTTPError: the request failed.
        """
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(model)}}
        httpx.post(f"{self.url}/collective_rpc", json=body, timeout=120).raise_for_status()

    def metric(self, name: str) -> float:
        """Return the sum of a metric's values."""
        lines = httpx.get(f"{self.url}/metrics", timeout=30).text.splitlines()
        values = [line.rpartition(" ")[2] for line in lines if line.startswith((f"{name}{{", f"{name} "))]
        return sum(map(float, values))


def free_port() -> int:
    """Return a free TCP port on the loopback interface."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    return port


@contextmanager
def vllm_server(
    python: Path, model: Path, log: Path, *, max_model_len: int = 4096, max_num_seqs: int = 16
) -> Iterator[VllmServer]:
    """Start a vLLM with this model; it is killed at the end of the block.

    Args:
        python: Python of the environment that has vLLM.
        model: folder of the model.
        log: its log file.
        max_model_len: longest context, in tokens.
        max_num_seqs: largest number of concurrent sequences.

    Raises:
        ProrlError: it did not start.
    """
    port = free_port()
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", *_OPTIONS]
    command += ["--model", str(model), "--served-model-name", "tiny", "--port", str(port)]
    command += ["--max-model-len", str(max_model_len), "--max-num-seqs", str(max_num_seqs)]
    environment = {**os.environ, **_ENVIRONMENT}
    with process(command, log, environment) as running:
        url = f"http://127.0.0.1:{port}"
        wait_until_healthy(url, running, log)
        yield VllmServer(url)


@contextmanager
def process(
    command: Sequence[str], log: Path, environment: dict[str, str]
) -> Iterator["subprocess.Popen[bytes]"]:
    """Start a process; it is killed with all its children at the end of the block."""
    with log.open("wb") as output:
        running = subprocess.Popen(
            command, stdout=output, stderr=output, env=environment, start_new_session=True
        )
    try:
        yield running
    finally:
        if running.poll() is None:
            os.killpg(running.pid, signal.SIGTERM)
        try:
            running.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)
            running.wait()


def wait_until_healthy(url: str, running: "subprocess.Popen[bytes]", log: Path) -> None:
    """Wait for a server's `/health`.

    Raises:
        ProrlError: the process exited, or took over `STARTS_S`.
    """
    ends = time.monotonic() + STARTS_S
    while running.poll() is None and time.monotonic() < ends:
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.5)
    raise ProrlError(f"{url} did not start:\n" + log.read_text(errors="replace")[-3000:])
