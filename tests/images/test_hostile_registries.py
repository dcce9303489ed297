"""Pulls from registries that fail, lie or hang, and pulls that are killed or run out of disk."""

import asyncio
import base64
import gzip
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from prorl_envs.clock import SystemClock
from prorl_envs.errors import SandboxError
from prorl_envs.images.layers import LayerStore
from prorl_envs.images.registry.client import RegistryError, RegistryRefused, RegistrySettings
from prorl_envs.images.registry.documents import ImageRefused
from prorl_envs.images.registry.puller import ImagePuller, PullSettings
from prorl_envs.images.unpack import LayerRefused, UnpackLimits
from prorl_envs.sandbox.filesystem.layered import LAYER_LIMIT
from tests.http_server import answering
from tests.images.conftest import blob, container
from tests.images.test_unpack import FILE, entry, tar_of

pytestmark = pytest.mark.anyio

LAYER = tar_of(entry("a/file", FILE, "text"), entry("noise", FILE, os.urandom(1_500_000).hex()))


class HastyClock(SystemClock):
    """Clock that records its waits and returns without delay."""

    def __init__(self) -> None:
        self.waits: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        await asyncio.sleep(0)


@dataclass
class Behaviour:
    """Content of a registry, and how it answers.

    Args:
        manifest, blobs: what it serves.
        answer: replaces the answer to a request if it returns True; gets the handler and the number of the
            earlier requests of this path.
        requests: path and Range header of each request.
    """

    manifest: bytes
    blobs: dict[str, bytes]
    answer: Callable[[Any, int], bool] = lambda handler, count: False
    requests: list[tuple[str, str]] = field(default_factory=list)
    closing: Event = field(default_factory=Event)

    @classmethod
    def of(cls, layer: bytes, plain: bytes | None = None) -> "Behaviour":
        """Serve one layer; `plain` is its decompressed tar, if it is compressed."""
        config, manifest, _ = container(plain or layer)
        if plain is not None:
            document = json.loads(manifest)
            document["layers"] = [blob(layer, "application/vnd.oci.image.layer.v1.tar+gzip")]
            manifest = json.dumps(document).encode()
        return cls(manifest, {f"sha256:{hashlib.sha256(data).hexdigest()}": data for data in (layer, config)})


@contextmanager
def registry(behaviour: Behaviour) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            count = sum(path == self.path for path, _ in behaviour.requests)
            behaviour.requests.append((self.path, self.headers.get("Range", "")))
            if not behaviour.answer(self, count):
                body = behaviour.manifest
                if "/blobs/" in self.path:
                    body = behaviour.blobs[self.path.rpartition("/")[2]]
                self.reply(body)

        def do_POST(self) -> None:
            self.do_GET()

        def reply(self, body: bytes, status: int = 200, length: int | None = None, **headers: str) -> None:
            found = re.match(r"bytes=(\d+)-", self.headers.get("Range", ""))
            if status == 200 and found and "/blobs/" in self.path:
                start, status = int(found[1]), 206
                headers["Content_Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
                body = body[start:]
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.send_header("Content-Length", str(len(body) if length is None else length))
            self.end_headers()
            try:
                self.wfile.write(body)
            except ConnectionError:
                self.close_connection = True

        def log_message(self, format: str, *args: object) -> None:
            pass

    with answering(Handler) as place:
        try:
            yield place
        finally:
            behaviour.closing.set()


def puller(store: Path, host: str, clock: HastyClock | None = None, **settings: Any) -> ImagePuller:
    registries = RegistrySettings(insecure=(host,), attempts=3, read_s=settings.pop("read_s", 20.0))
    values = PullSettings(registry=registries, **settings)
    environ = {"APPTAINER_DOCKER_USERNAME": "user", "APPTAINER_DOCKER_PASSWORD": "secret"}
    return ImagePuller(LayerStore(store), values, clock=clock or HastyClock(), environ=environ)


def unfinished(store: Path) -> list[str]:
    """Return the files in the store's directory for unfinished work, which must be empty."""
    return sorted(str(path.relative_to(store)) for path in store.rglob("*") if not path.is_dir())


async def refuse(
    tmp_path: Path, behaviour: Behaviour, kind: type[SandboxError], says: str, **settings: Any
) -> None:
    """Check the error of a pull, and that the pull leaves no files."""
    with registry(behaviour) as host, pytest.raises(kind, match=says) as caught:
        await puller(tmp_path, host, **settings).pull(f"{host}/image:1")
    assert caught.value.hint
    assert unfinished(tmp_path) == []


@pytest.mark.parametrize("part", ["layer", "config", "manifest"])
async def test_a_wrong_digest(tmp_path: Path, part: str) -> None:
    behaviour = Behaviour.of(LAYER)
    layer, config = behaviour.blobs
    if part == "manifest":
        other = {"schemaVersion": 2, "manifests": [{"digest": layer, "size": 1, "platform": platform()}]}
        behaviour.manifest = json.dumps(other).encode()
    else:
        name = layer if part == "layer" else config
        behaviour.blobs[name] = b"x" * len(behaviour.blobs[name])
    await refuse(tmp_path, behaviour, RegistryRefused, "other content than sha256:")


def platform() -> dict[str, str]:
    return {"os": "linux", "architecture": {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine]}


async def test_a_wrong_diff_id(tmp_path: Path) -> None:
    behaviour = Behaviour.of(gzip.compress(LAYER), LAYER + b"\0" * 512)
    await refuse(tmp_path, behaviour, LayerRefused, "has the digest")


async def test_a_bomb(tmp_path: Path) -> None:
    plain = tar_of(entry("zeros", FILE, "\0" * 8_000_000))
    behaviour = Behaviour.of(gzip.compress(plain), plain)
    limits = UnpackLimits(ratio=10, ratio_from=1 << 20)
    await refuse(tmp_path, behaviour, LayerRefused, "10 times its size", limits=limits)


async def test_a_layer_that_claims_to_be_too_large(tmp_path: Path) -> None:
    behaviour = Behaviour.of(LAYER)
    document = json.loads(behaviour.manifest)
    document["layers"][0]["size"] = 1 << 60
    behaviour.manifest = json.dumps(document).encode()
    await refuse(tmp_path, behaviour, RegistryRefused, "a layer has 1152921504606846976 bytes")


async def test_more_bytes_than_announced(tmp_path: Path) -> None:
    behaviour = Behaviour.of(LAYER)
    layer = next(iter(behaviour.blobs))
    behaviour.blobs[layer] += b"more"
    await refuse(tmp_path, behaviour, RegistryRefused, "sent more than")


@pytest.mark.parametrize("silent", ["/manifests/", "/blobs/"])
async def test_a_registry_that_hangs(tmp_path: Path, silent: str) -> None:
    behaviour = Behaviour.of(LAYER)

    def hang(handler: Any, count: int) -> bool:
        if silent in handler.path:
            behaviour.closing.wait()
            handler.close_connection = True
            return True
        return False

    behaviour.answer = hang
    await refuse(tmp_path, behaviour, RegistryError, "does not answer in time, 3 times", read_s=0.05)


async def test_a_registry_that_sends_without_end(tmp_path: Path) -> None:
    behaviour = Behaviour.of(LAYER)

    def trickle(handler: Any, count: int) -> bool:
        handler.send_response(200)
        handler.end_headers()
        while not behaviour.closing.wait(0.01):
            try:
                handler.wfile.write(b" ")
            except ConnectionError:
                break
        handler.close_connection = True
        return True

    behaviour.answer = trickle
    await refuse(tmp_path, behaviour, RegistryError, "took more than 0.3 s", seconds=0.3)


async def test_a_document_without_end(tmp_path: Path) -> None:
    behaviour = Behaviour.of(LAYER)
    behaviour.manifest = b" " * (5 << 20)
    await refuse(tmp_path, behaviour, RegistryRefused, "a document of more than")


@pytest.mark.parametrize(
    ("manifest", "says"),
    [
        (b"<html>", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "damaged part"),
        (b'{"schemaVersion": 1}', "schema 1"),
        (b'{"config": {}, "layers": 3}', "not a manifest"),
        (b'{"config": {}, "layers": []}', "has 0 layers"),
        (json.dumps({"config": {}, "layers": [{}] * (LAYER_LIMIT + 1)}).encode(), "has 121 layers"),
        (b'{"config": {"digest": "sha256:../../x", "size": 1}, "layers": [{}]}', "digest of an unknown kind"),
        (b'{"config": {"digest": "sha256:%064d", "size": -1}, "layers": [{}]}' % 0, "unknown size"),
        (b'{"manifests": {}}', "not a list"),
        (b'{"manifests": [3, {}, {"platform": 4}]}', "no variant"),
    ],
)
async def test_documents_that_are_damaged(tmp_path: Path, manifest: bytes, says: str) -> None:
    behaviour = Behaviour.of(LAYER)
    behaviour.manifest = manifest
    with registry(behaviour) as host, pytest.raises(ImageRefused, match=says):
        await puller(tmp_path, host).pull(f"{host}/image:1")
    assert unfinished(tmp_path) == []


@pytest.mark.parametrize("ranges", [True, False], ids=["with ranges", "without"])
async def test_an_interrupted_download_is_resumed(tmp_path: Path, ranges: bool) -> None:
    behaviour = Behaviour.of(LAYER)
    layer = next(iter(behaviour.blobs))

    def cut(handler: Any, count: int) -> bool:
        if not handler.path.endswith(layer):
            return False
        if not ranges:
            del handler.headers["Range"]
        if count > 0 and not (count == 1 and ranges):
            return False
        start = count << 20
        if count:
            assert handler.headers["Range"] == f"bytes={start}-"
        handler.send_response(206 if count else 200)
        handler.send_header("Content-Length", str(len(LAYER) - start))
        if count:
            handler.send_header("Content-Range", f"bytes {start}-{len(LAYER) - 1}/{len(LAYER)}")
        handler.end_headers()
        handler.wfile.write(LAYER[start : start + (1 << 20)])
        handler.close_connection = True
        return True

    behaviour.answer = cut
    with registry(behaviour) as host:
        image = await puller(tmp_path, host).pull(f"{host}/image:1")
    assert (image.layers[0] / "a" / "file").read_text() == "text"
    assert [ranged for path, ranged in behaviour.requests if path.endswith(layer)][1] == f"bytes={1 << 20}-"


async def test_transient_failures_are_repeated_with_growing_waits(tmp_path: Path) -> None:
    behaviour, clock = Behaviour.of(LAYER), HastyClock()

    def busy(handler: Any, count: int) -> bool:
        if count < 2:
            status = (503, 429)[count]
            handler.reply(b"", status, **({"Retry_After": "7"} if status == 429 else {}))
        return count < 2

    behaviour.answer = busy
    with registry(behaviour) as host:
        assert (await puller(tmp_path, host, clock).pull(f"{host}/image:1")).layers
    assert clock.waits == [1.0, 7.0] * 3
    behaviour.answer = lambda handler, count: handler.reply(b"", 500) or True
    await refuse(tmp_path / "other", behaviour, RegistryError, "answers 500, 3 times in a row")


@pytest.mark.parametrize(
    ("status", "says"), [(404, "has no image/manifests/1"), (403, "denies access"), (418, "answers 418")]
)
async def test_refusals_are_final(tmp_path: Path, status: int, says: str) -> None:
    behaviour = Behaviour.of(LAYER, None)
    behaviour.answer = lambda handler, count: handler.reply(b"", status) or True
    await refuse(tmp_path, behaviour, RegistryRefused, says)
    assert len(behaviour.requests) == 1


def asks_for_a_token(token: bytes, realm: str = "http://{host}/token") -> Callable[[Any, int], bool]:
    def answer(handler: Any, count: int) -> bool:
        if handler.path.startswith("/token"):
            handler.reply(token)
            return True
        if handler.headers.get("Authorization") == "Bearer abc":
            return False
        challenge = f'Bearer realm="{realm}",service="s",scope="repository:image:pull"'
        handler.reply(b"", 401, WWW_Authenticate=challenge.format(host=handler.headers["Host"]))
        return True

    return answer


@pytest.mark.parametrize("name", ["token", "access_token"])
async def test_a_token_service(tmp_path: Path, name: str) -> None:
    behaviour, logins = Behaviour.of(LAYER), []
    inner = asks_for_a_token(json.dumps({name: "abc"}).encode())

    def answer(handler: Any, count: int) -> bool:
        if handler.path.startswith("/token"):
            logins.append((handler.headers["Authorization"], handler.path))
        return inner(handler, count)

    behaviour.answer = answer
    with registry(behaviour) as host:
        assert (await puller(tmp_path, host).pull(f"{host}/image:1")).layers
    encoded = base64.b64encode(b"user:secret").decode()
    assert logins == [(f"Basic {encoded}", "/token?service=s&scope=repository%3Aimage%3Apull")]


@pytest.mark.parametrize(
    ("token", "says"),
    [
        (b"{}", "denies a token"),
        (b"x", "sends no token"),
        (b"[]", "sends no token"),
        (b'{"token": "a\\r\\nb"}', "denies a token"),
        (b'{"token": "wrong"}', "denies access"),
        (b" " * (5 << 20), "a document of more than"),
    ],
)
async def test_a_token_service_that_fails(tmp_path: Path, token: bytes, says: str) -> None:
    behaviour = Behaviour.of(LAYER)
    behaviour.answer = asks_for_a_token(token)
    await refuse(tmp_path, behaviour, RegistryRefused, says)


@pytest.mark.parametrize("realm", ["file:///etc/passwd", "", "ftp://{host}/"])
async def test_a_token_service_whose_address_is_not_http(tmp_path: Path, realm: str) -> None:
    behaviour = Behaviour.of(LAYER)
    behaviour.answer = asks_for_a_token(b"{}", realm)
    await refuse(tmp_path, behaviour, RegistryRefused, "no safe token service")


async def test_redirects(tmp_path: Path) -> None:
    behaviour, target = Behaviour.of(LAYER), Behaviour.of(LAYER)
    received: list[str] = []

    def serve(handler: Any, count: int) -> bool:
        received.append(handler.headers.get("Authorization", ""))
        return False

    target.answer = serve
    inner = asks_for_a_token(b'{"token": "abc"}')
    with registry(target) as elsewhere, registry(behaviour) as host:

        def redirect(handler: Any, count: int) -> bool:
            if inner(handler, count):
                return True
            if "/blobs/" in handler.path:
                handler.reply(b"", 307, Location=f"http://{elsewhere}{handler.path}")
                return True
            return False

        behaviour.answer = redirect
        assert (await puller(tmp_path, host).pull(f"{host}/image:1")).layers
    assert set(received) == {""}, "another host gets no login"
    behaviour.answer = lambda handler, count: handler.reply(b"", 302, Location=handler.path) or True
    await refuse(tmp_path / "other", behaviour, RegistryRefused, "redirects in a loop")


PULL = """\
import asyncio, sys
from pathlib import Path
from prorl_envs.images.layers import LayerStore
from prorl_envs.images.registry.client import RegistrySettings
from prorl_envs.images.registry.puller import ImagePuller, PullSettings

host = sys.argv[2]
settings = PullSettings(registry=RegistrySettings(insecure=(host,)))
print(asyncio.run(ImagePuller(LayerStore(Path(sys.argv[1])), settings).resolve(f"{host}/image:1")))
"""


def wait_for_size(path: Path, size: int) -> None:
    while not path.is_file() or path.stat().st_size < size:
        pass


async def test_a_killed_pull_is_resumed(tmp_path: Path) -> None:
    behaviour = Behaviour.of(LAYER)
    layer = next(iter(behaviour.blobs))
    sent = asyncio.Event()
    loop = asyncio.get_running_loop()

    def stop_in_the_middle(handler: Any, count: int) -> bool:
        if not handler.path.endswith(layer) or count:
            return False
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(LAYER)))
        handler.end_headers()
        handler.wfile.write(LAYER[: 2 << 20])
        loop.call_soon_threadsafe(sent.set)
        behaviour.closing.wait()
        handler.close_connection = True
        return True

    behaviour.answer = stop_in_the_middle
    store = tmp_path / "store"
    with registry(behaviour) as host:
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", PULL, store, host)
        await sent.wait()
        part = store / "downloads" / layer.removeprefix("sha256:")
        await asyncio.to_thread(wait_for_size, part, 2 << 20)
        process.kill()
        await process.wait()
        behaviour.closing.set()
        assert list((store / "layers").iterdir()) == []
        image = await puller(store, host).pull(f"{host}/image:1")
    assert behaviour.requests[-1] == (f"/v2/image/blobs/{layer}", f"bytes={2 << 20}-")
    assert (image.layers[0] / "a" / "file").read_text() == "text"
    LayerStore(store).sweep()
    assert [list((store / name).iterdir()) for name in ("incoming", "downloads", "locks")] == [[], [], []]


ON_A_SMALL_DISK = """\
mount -t tmpfs -o size=$1 none /mnt
"$2" -c "$3" /mnt/store "$4" && exit 9
find /mnt/store -not -type d
"""


@pytest.mark.parametrize("size", ["1m", "4m"], ids=["while downloading", "while unpacking"])
async def test_a_full_disk(tmp_path: Path, size: str) -> None:
    with registry(Behaviour.of(LAYER)) as host:
        process = await asyncio.create_subprocess_exec(
            "unshare", "-Urm", "sh", "-c", ON_A_SMALL_DISK, "sh", size, sys.executable, PULL, host,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        out, errors = await process.communicate()
    assert b"No space left on device" in errors
    assert b"SandboxError" in errors
    assert out == b""


async def test_a_cancelled_pull_leaves_nothing(tmp_path: Path) -> None:
    behaviour, started = Behaviour.of(LAYER), asyncio.Event()
    loop = asyncio.get_running_loop()

    def hang(handler: Any, count: int) -> bool:
        if "/blobs/" not in handler.path or count:
            return False
        loop.call_soon_threadsafe(started.set)
        behaviour.closing.wait()
        handler.close_connection = True
        return True

    behaviour.answer = hang
    with registry(behaviour) as host:
        pulling = asyncio.create_task(puller(tmp_path, host).pull(f"{host}/image:1"))
        await started.wait()
        pulling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pulling
        assert unfinished(tmp_path) == []
