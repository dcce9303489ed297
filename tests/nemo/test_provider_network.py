"""Networks and ports of our sandboxes behind NeMo Gym's sandbox API."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

pytest.importorskip("nemo_gym", reason="run by scripts/test-nemo.sh in an environment of its own")

# mypy: disable-error-code="import-not-found,import-untyped"
from nemo_gym.sandbox import SandboxSpec
from nemo_gym.sandbox.providers import base as nemo
from nemo_gym.sandbox.providers import create_provider
from nemo_gym.sandbox.providers.base import SandboxCreateError

from prorl_envs.errors import InputError, SandboxError
from tests.nemo.conftest import start
from tests.nemo.gym import CHECKOUT, SITE
from tests.support.leaks import OpenResources, leaks_since

pytestmark = [pytest.mark.nemo, pytest.mark.anyio]
HAS_PORTS = hasattr(nemo, "SupportsSandboxNetwork")
since_0_7 = pytest.mark.skipif(not HAS_PORTS, reason="NeMo Gym 0.4 has no ports")

FETCH = "exec 3<>/dev/tcp/{0}/{1} && printf 'GET / HTTP/1.0\\r\\n\\r\\n' >&3 && tail -n 1 <&3"
#: A web server that answers with its name and the address of its client.
SERVE = f"""exec {sys.executable} -Ic '
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write((sys.argv[2] + " for " + self.client_address[0]).encode())
http.server.ThreadingHTTPServer((sys.argv[3], int(sys.argv[1])), Handler).serve_forever()' """


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Image with an /etc of its own and the host's programs, as fields of a spec."""
    root = tmp_path_factory.mktemp("image")
    for folder in ("etc", "tmp", "proc", "dev", "run", "home", "opt", "usr"):
        (root / folder).mkdir()
    for link in ("bin", "lib", "lib64", "sbin"):
        (root / link).symlink_to(f"usr/{link}")
    return {"image": str(root), "provider_options": {"binds": ["/usr:/usr"], "host_python": True}}


@contextmanager
def web(host: str = "127.0.0.1") -> Iterator[int]:
    """Web server of the host that answers `hello`; yields its port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"hello")

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer((host, 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def in_gym(monkeypatch: pytest.MonkeyPatch, **blocks: Any) -> None:
    """Make this a process that NeMo Gym started with this configuration."""
    from nemo_gym import global_config
    from omegaconf import OmegaConf

    monkeypatch.setenv(global_config.NEMO_GYM_CONFIG_DICT_ENV_VAR_NAME, json.dumps(blocks))
    monkeypatch.setattr(global_config, "_GLOBAL_CONFIG_DICT", OmegaConf.create(blocks))


async def fetch(box: Any, host: str, port: int) -> str:
    done = await box.exec(FETCH.format(host, port))
    return str(done.stdout or done.stderr)


async def serve(box: Any, port: int, name: str, host: str = "0.0.0.0") -> None:
    await box.exec(f"{SERVE} {port} {name} {host} >log 2>&1 &")
    listening = f"until grep -q ':{port:04X} .* 0A' /proc/net/tcp; do sleep 0.02; done"
    assert (await box.exec(listening, timeout_s=20)).return_code == 0


async def test_a_named_server_is_reached_at_its_address_and_nothing_else(
    provider: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with web() as model, web() as other:
        model_block = {"responses_api_models": {"vllm_model": {"host": "0.0.0.0", "port": model}}}
        in_gym(monkeypatch, policy_model=model_block, sandbox={"prorl": {}})
        async with await start(provider, provider_options={"servers": "policy_model"}) as box:
            assert await asyncio.gather(*(fetch(box, "127.0.0.1", model) for _ in range(8))) == ["hello"] * 8
            assert "refused" in await fetch(box, "127.0.0.1", other)
            assert "unreachable" in await fetch(box, "192.0.2.1", 80)
        for name in ("policy", "sandbox", "http://", "ftp://127.0.0.1"):
            with pytest.raises(SandboxCreateError, match="server"):
                await start(provider, provider_options={"servers": [name]})


async def test_servers_elsewhere_and_allowed_hosts_are_reached_through_the_proxy(provider: Any) -> None:
    with web() as port:
        proxied = (
            f"{sys.executable} -Ic 'import sys, urllib.request as r; print(r.urlopen(sys.argv[1]).read())' "
        )
        options = {"host_python": True, "servers": ["http://model.example"], "allow": f"127.0.0.1:{port}"}
        async with await start(provider, provider_options=options) as box:
            env = {"no_proxy": "", "NO_PROXY": ""}
            assert (await box.exec(f"{proxied} http://127.0.0.1:{port}", env=env)).stdout == "b'hello'\n"
            assert "502" in (await box.exec(f"{proxied} http://model.example/v1")).stderr
            assert "403" in (await box.exec(f"{proxied} http://other.example")).stderr
    with pytest.raises(SandboxCreateError, match="allowed"):
        await start(provider, provider_options={"allow": ["https://pypi.org"]})


@pytest.mark.parametrize(
    ("kind", "creator"),
    [
        ("pi_sandboxed_agent", "mine"),
        ("anyswe_agent", "anyswe_agent"),
        ("opencode_sandboxed_agent", "swebench"),
    ],
)
async def test_a_harness_inside_without_a_server_is_refused(
    provider: Any, monkeypatch: pytest.MonkeyPatch, kind: str, creator: str
) -> None:
    agent = {"resources_server": {"name": "swebench"}}
    in_gym(monkeypatch, mine={"responses_api_agents": {kind: agent}}, other={"prorl": {}}, port=1)
    metadata = {"nemo_gym_agent": creator}
    with pytest.raises(SandboxCreateError, match=r"mine runs its harness.*servers: \[policy_model\]"):
        await start(provider, metadata=metadata)
    async with await start(provider, metadata=metadata, provider_options={"servers": []}) as box:
        assert (await box.exec("true")).return_code == 0
    async with await start(provider, metadata={"nemo_gym_agent": "another"}) as box:
        assert (await box.exec("true")).return_code == 0


@since_0_7
async def test_a_declared_port_has_an_endpoint_on_the_host(provider: Any, run_dir: Path) -> None:
    before = OpenResources.now(run_dir)
    async with await start(provider, ports=[8000, 9000], provider_options={"host_python": True}) as box:
        url = (await box.endpoint(8000)).endpoint
        with pytest.raises(OSError):
            await asyncio.to_thread(urlopen, url)
        await serve(box, 8000, "web", "127.0.0.1")
        assert (await asyncio.to_thread(lambda: urlopen(url).read())) == b"web for 127.0.0.1"
        assert (await box.endpoint(8000)).endpoint == url != (await box.endpoint(9000)).endpoint
        with pytest.raises(ValueError, match="not declared"):
            await box.endpoint(8001)
    with pytest.raises(OSError):
        await asyncio.to_thread(urlopen, url)
    assert not leaks_since(before, run_dir)


@since_0_7
async def test_sandboxes_reach_each_other_by_name_at_any_port(
    provider: Any, image: dict[str, Any], tmp_path: Path
) -> None:
    boxes = [await start(provider, **image) for _ in range(3)]
    first, second, apart = boxes
    handles = [box._require_handle() for box in boxes]
    try:
        names = ["first", "second", "apart"]
        hosts = {
            name: await provider.network_address(handle) for name, handle in zip(names, handles, strict=True)
        }
        for handle in handles[:2]:
            await provider.set_hosts(handle, {name: hosts[name] for name in names[:2]})
        assert "refused" in await fetch(first, "second", 80)
        await first.exec(f"(until ({FETCH.format('second', 80)}) >found; do sleep 0.05; done) 2>log &")
        await serve(second, 80, "second")
        found = tmp_path / "found"
        while not found.is_file() or not found.read_text():  # a program that waits also finds the new port
            await provider.download_file(handles[0], "found", found)
        assert found.read_text() == f"second for {hosts['first']}"
        await serve(second, 81, "private", "127.0.0.1")
        await serve(first, 8080, "first", hosts["first"])
        assert await fetch(first, "second", 80) == f"second for {hosts['first']}"
        assert await fetch(second, "first", 8080) == f"first for {hosts['second']}"
        assert await fetch(first, "first", 8080) == f"first for {hosts['first']}"
        assert "refused" in await fetch(first, "second", 81)
        assert "unreachable" in await fetch(apart, hosts["second"], 80)
        with pytest.raises(InputError, match="no sandbox"):
            await provider.set_hosts(handles[0], {"x": "100.64.255.9"})
        await second.exec("pkill -f second")
        assert "second for" not in await fetch(first, "second", 80)  # reset, or closed before the request
    finally:
        for box in boxes:
            await box.stop()


@since_0_7
async def test_the_network_of_a_borrowed_sandbox_belongs_to_its_owner(provider: Any) -> None:
    async with await start(provider, ports=[80]) as box:
        borrower = create_provider({"prorl": {}})
        handle = await borrower.connect(await box.serialize())
        for call in (borrower.endpoint(handle, 80), borrower.network_address(handle)):
            with pytest.raises(SandboxError, match="another process"):
                await call
        await borrower.aclose()


COMPOSE = """
services:
  main:
    image: {image}
    command: [sleep, infinity]
    shm_size: 67108864
    depends_on: {{web: {{condition: service_healthy}}, side: {{condition: service_started}}}}
    ports: [{{target: 7000}}]
  web:
    image: {image}
    command: [sh, {script}, "80", web, "0.0.0.0"]
    expose: ["80"]
    healthcheck: {{test: [CMD, bash, -c, ": >/dev/tcp/127.0.0.1/80"], interval: 100ms, retries: 100}}
  side:
    image: {image}
    network_mode: service:web
    command: [sleep, infinity]
"""


PATCHED = """
import os, sys
import nemo_gym
sys.path.insert(0, os.getcwd())  # NeMo Gym puts the installed agents first
from nemo_gym.sandbox.agent_tools import restricted_network_options as options
from nemo_gym.sandbox.providers import create_provider
from responses_api_agents.opencode_sandboxed_agent.app import restricted_network_options
from responses_api_agents.pi_sandboxed_agent.app import restricted_network_options

assert options(create_provider({"prorl": {}}), ["http://127.0.0.1:1"]) == {"servers": ["http://127.0.0.1:1"]}
for name, url in (("opensandbox", "http://model:1"), ("opensandbox", "http://127.0.0.1:1"), ("docker", "http://m:1")):
    try:
        print(options(type("Provider", (), {"name": name}), [url])["network_policy"]["egress"])
    except ValueError as error:
        print(error)
"""


@since_0_7
def test_the_patch_for_nemo_gym_lets_the_provider_restrict_the_network(tmp_path: Path) -> None:
    patch = CHECKOUT / "docs" / "upstream" / "nemo-gym-network-policy.patch"
    for part in ("nemo_gym", "responses_api_agents"):
        shutil.copytree(SITE / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(
        ["git", "apply", patch], cwd=tmp_path, check=True, env=os.environ | {"GIT_CEILING_DIRECTORIES": "/"}
    )
    done = subprocess.run(
        [sys.executable, "-c", PATCHED], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    allowed, loopback, docker = done.stdout.splitlines()
    assert allowed == "[{'action': 'allow', 'target': 'model'}]"
    assert "sandbox-reachable host" in loopback and "OpenSandbox" in docker


@since_0_7
@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ("cap_add: [SYS_PTRACE]", "requires cap_add SYS_PTRACE.*hint: root can listen"),
        (
            "shm_size: 536870912",
            "requires 536870912 bytes of /dev/shm, and has at most .*a quarter of the memory",
        ),
        ("volumes: [{type: volume, source: data, target: /data}]", "a volume at /data.*hint: .*binds"),
    ],
)
async def test_compose_services_with_unmet_requirements_are_refused(
    image: dict[str, Any], tmp_path: Path, fields: str, says: str
) -> None:
    from nemo_gym.sandbox import AsyncSandboxCompose

    file = tmp_path / "compose.yaml"
    main = f"image: {image['image']}\n    command: [sleep, infinity]\n    {fields}"
    file.write_text(f"services:\n  main:\n    {main}\nvolumes: {{data: {{}}}}\n")
    with pytest.raises(InputError, match=f"(?s){says}"):
        async with AsyncSandboxCompose({"prorl": {}}, file):
            raise AssertionError


@since_0_7
async def test_compose_services_run_with_names_health_and_a_shared_port(
    run_dir: Path, image: dict[str, Any], tmp_path: Path
) -> None:
    from nemo_gym.sandbox import AsyncSandboxCompose

    (tmp_path / "serve.sh").write_text(SERVE + '"$@"\n')
    file = tmp_path / "compose.yaml"
    file.write_text(COMPOSE.format(image=image["image"], script=tmp_path / "serve.sh"))
    options = image["provider_options"] | {"binds": ["/usr:/usr", f"{tmp_path}:{tmp_path}"]}
    specs = dict.fromkeys(("main", "web", "side"), SandboxSpec(provider_options=options))
    async with AsyncSandboxCompose({"prorl": {}}, file, service_specs=specs, poll_interval_s=0.05) as compose:
        main, side = compose.services["main"], compose.services["side"]
        assert (await fetch(main, "web", 80)).startswith("web for 100.64.")
        assert await fetch(side, "127.0.0.1", 80) == "web for 127.0.0.1"
        await serve(main, 7000, "main")
        url = (await main.endpoint(7000)).endpoint
        assert (await asyncio.to_thread(lambda: urlopen(url).read())) == b"main for 127.0.0.1"
