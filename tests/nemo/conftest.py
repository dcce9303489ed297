"""Fixtures for the tests of NeMo Gym's servers."""

# mypy: disable-error-code="import-not-found,import-untyped"

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

from prorl_envs.env.registry import example_path
from prorl_envs.nemo.rows import blank, nemo_row
from tests.sandbox.rootfs import PROGRAMS, write_rootfs

COMMAND = Path(sys.executable).with_name("prorl-envs")
SERVICE_TOKEN = "a-token-of-sixteen-characters"


@contextmanager
def command(ready: str, *arguments: str, **environ: str) -> Iterator[str]:
    """Run `prorl-envs` in the background; yield the first line that contains `ready`."""
    with background(ready, str(COMMAND), *arguments, **environ) as (_, line):
        yield line


@contextmanager
def background(ready: str, *arguments: str, **environ: str) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """Run a command in the background; yield its process and the first line that contains `ready`."""
    process = subprocess.Popen(
        arguments,
        env={**os.environ, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with process:
        try:
            assert process.stdout is not None
            said = []
            for line in process.stdout:
                said.append(line)
                if ready in line:
                    break
            else:
                pytest.fail("".join(said))
            drain = threading.Thread(target=process.stdout.read)
            drain.start()
            yield process, line
        finally:
            process.send_signal(signal.SIGINT)
            drain.join()


def rows() -> list[dict[str, Any]]:
    tasks = [json.loads(line) for line in example_path("bash").read_text().splitlines()]
    return [nemo_row(blank("bash"), task) for task in tasks]


def server_client() -> Any:
    """Return the client that NeMo Gym gives to its servers, without other servers."""
    from nemo_gym.config_types import BaseServerConfig
    from nemo_gym.server_utils import ServerClient
    from omegaconf import OmegaConf

    head = BaseServerConfig(host="127.0.0.1", port=0)
    return ServerClient(head_server_config=head, global_config_dict=OmegaConf.create({}))


async def start(provider: Any, **spec: Any) -> Any:
    """Start a sandbox of `provider`, which stays open."""
    from nemo_gym.sandbox import AsyncSandbox, SandboxSpec

    if "owns_provider" in signature(AsyncSandbox).parameters:
        return await AsyncSandbox(provider, SandboxSpec(**spec), owns_provider=False).start()
    return await AsyncSandbox(_Shared(provider), SandboxSpec(**spec)).start()


class _Shared:
    """Wrapper that does not close its provider, for NeMo Gym 0.4."""

    def __init__(self, provider: Any) -> None:
        self._provider = provider

    def __getattr__(self, name: str) -> Any:
        return getattr(self._provider, name)

    async def aclose(self) -> None:
        pass


@pytest.fixture(scope="module")
async def provider(run_dir: Path) -> AsyncIterator[Any]:
    """Sandbox provider for all tests of the module, so that its driver stays warm."""
    from nemo_gym.sandbox import SandboxSpec
    from nemo_gym.sandbox.providers import create_provider

    provider = create_provider({"prorl": {}})
    await provider.close(await provider.create(SandboxSpec()))
    yield provider
    await provider.aclose()


@pytest.fixture
async def box(provider: Any) -> AsyncIterator[Any]:
    async with await start(provider) as sandbox:
        yield sandbox


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Rollout service with a scripted model and a token; yields the URL."""
    environ = {"PRORL_RUN_DIR": str(tmp_path_factory.mktemp("run")), "PRORL_SERVER__TOKEN": SERVICE_TOKEN}
    with command("--llm", "scripted-model", "bash", "--mix", "solve=1") as options:
        port = free_port()
        arguments = ["serve", *options.split(), "--port", port, "--store", "memory"]
        with command("Ctrl-C stops it", *arguments, **environ):
            yield f"http://127.0.0.1:{port}"


@pytest.fixture(scope="module")
def base_image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Base image of the terminal family's examples, made from this machine's own programs."""
    root = write_rootfs(tmp_path_factory.mktemp("base") / "root", (*PROGRAMS, "base64"))
    with pytest.MonkeyPatch.context() as environ:
        environ.setenv("PRORL_IMAGES__BASES", json.dumps({"debian:12-slim": str(root)}))
        yield


@pytest.fixture(scope="module")
def loops_own_pipe() -> None:
    """NeMo Gym's event loop opens one pipe per process, at its first use: not a leak."""
    import uvloop  # type: ignore[import-not-found, unused-ignore]  # comes with NeMo Gym

    async def nothing() -> None:
        pass

    uvloop.run(nothing())
