"""Pulls from a small registry on loopback that requires a password."""

import base64
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from prorl_envs.errors import SandboxError
from prorl_envs.images.builder import ImageBuilder
from prorl_envs.images.modes import ImageMode
from prorl_envs.images.store import ImageStore
from prorl_envs.images.template import ImageTemplate
from prorl_envs.sandbox.filesystem.sif import labels
from tests.cli.test_image import run as image_command
from tests.http_server import answering
from tests.images.conftest import container

pytestmark = pytest.mark.anyio

USER, PASSWORD = "somebody", "a password"


@contextmanager
def registry(layer: bytes) -> Iterator[tuple[str, list[str]]]:
    """Serve one container as `/image:1` by the protocol of the OCI distribution specification.

    Yields:
        host and port, and the paths that were served.
    """
    config, manifest, _ = container(layer)
    blobs = {f"sha256:{hashlib.sha256(data).hexdigest()}": data for data in (layer, config)}
    served: list[str] = []
    wanted = "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.headers["Authorization"] != wanted:
                self.answer(401, b"", "text/plain")
            elif "/manifests/" in self.path:
                served.append(self.path)
                self.answer(200, manifest, "application/vnd.oci.image.manifest.v1+json")
            elif "/blobs/" in self.path:
                self.answer(200, blobs[self.path.rpartition("/")[2]], "application/octet-stream")
            else:
                self.answer(200, b"{}", "application/json")

        do_HEAD = do_GET

        def answer(self, status: int, body: bytes, kind: str) -> None:
            self.send_response(status)
            if status == 401:
                self.send_header("WWW-Authenticate", 'Basic realm="registry"')
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with answering(Handler) as place:
        yield place, served


def environ(apptainer: str, home: Path, **more: str) -> dict[str, str]:
    path = f"{Path(apptainer).parent}:/usr/bin:/bin:/usr/sbin"
    return {"PATH": path, "HOME": str(home), "APPTAINER_NOHTTPS": "1", "SINGULARITY_NOHTTPS": "1", **more}


async def test_an_image_is_pulled_once_with_the_users_credentials(
    apptainer: str, store: ImageStore, scratch: Path, layer: bytes, tmp_path: Path
) -> None:
    credentials = {"APPTAINER_DOCKER_USERNAME": USER, "APPTAINER_DOCKER_PASSWORD": PASSWORD}
    credentials |= {name.replace("APPTAINER", "SINGULARITY"): text for name, text in credentials.items()}
    builder = ImageBuilder(store, scratch=scratch, environ=environ(apptainer, tmp_path, **credentials))
    with registry(layer) as (host, served):
        first = await builder.resolve(f"docker://{host}/image:1")
        count = len(served)
        assert first is not None and count > 0
        assert await builder.resolve(f"docker://{host}/image:1", ImageMode.VERSION) == first
        assert len(served) == count
        assert await builder.resolve(f"docker://{host}/image:1", ImageMode.REBUILD) != first
        assert len(served) > count
        definition = (
            f"Bootstrap: docker\nRegistry: {host}\nFrom: image:1\n\n%post\n    echo made > /etc/made\n"
        )
        built = await builder.resolve(ImageTemplate(name="t", version="7", definition=definition))
    assert built is not None
    assert labels(built)["prorl.version"] == "7"
    assert len(store.entries()) == 3
    assert {entry.source for entry in store.entries()} == {f"docker://{host}/image:1", "template t 7"}


async def test_without_credentials_the_error_names_the_variables_to_set(
    apptainer: str, store: ImageStore, scratch: Path, layer: bytes, tmp_path: Path
) -> None:
    builder = ImageBuilder(store, scratch=scratch, environ=environ(apptainer, tmp_path))
    with registry(layer) as (host, _), pytest.raises(SandboxError) as caught:
        await builder.resolve(f"docker://{host}/image:1")
    assert "APPTAINER_DOCKER_PASSWORD" in caught.value.hint


async def test_without_a_network_the_error_gives_the_reason(
    apptainer: str, store: ImageStore, scratch: Path, tmp_path: Path
) -> None:
    with registry(b"") as (host, _):
        pass  # no process listens there any more
    builder = ImageBuilder(store, scratch=scratch, environ=environ(apptainer, tmp_path))
    with pytest.raises(SandboxError) as caught:
        await builder.resolve(f"docker://{host}/image:1")
    assert "cannot reach the registry" in caught.value.hint


@pytest.mark.thorough
def test_the_command_pulls_once_and_lists_images(
    apptainer: str, layer: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    credentials = {"APPTAINER_DOCKER_USERNAME": USER, "APPTAINER_DOCKER_PASSWORD": PASSWORD}
    for name, value in {**environ(apptainer, tmp_path), **credentials}.items():
        monkeypatch.setenv(name, value)
        monkeypatch.setenv(name.replace("APPTAINER", "SINGULARITY"), value)
    monkeypatch.setenv("PRORL_DRIVER", "apptainer")
    with registry(layer) as (host, served):
        first = image_command(tmp_path, "pull", f"docker://{host}/image:1")
        assert first.returncode == 0, first.stderr
        count = len(served)
        assert image_command(tmp_path, "pull", f"docker://{host}/image:1").stdout == first.stdout
        assert len(served) == count
        assert image_command(tmp_path, "pull", "--refresh", f"docker://{host}/image:1").returncode == 0
        assert len(served) > count
    listed = json.loads(image_command(tmp_path, "list", "--json").stdout)
    assert [entry["source"] for entry in listed] == [f"docker://{host}/image:1"] * 2
