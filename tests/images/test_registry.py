"""Pulls from a real registry (docker-registry), of images that umoci made and skopeo pushed."""

import asyncio
import base64
import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from prorl_envs.errors import InputError, SandboxError
from prorl_envs.images.layers import LayerStore
from prorl_envs.images.registry.client import RegistryRefused, RegistrySettings
from prorl_envs.images.registry.documents import INDEXES, MANIFESTS, ImageRefused
from prorl_envs.images.registry.puller import ImagePuller, PullSettings
from prorl_envs.sandbox.base import SandboxSpec
from prorl_envs.sandbox.drivers.select import LAYERED_DRIVERS, make_driver
from prorl_envs.sandbox.filesystem.layered import LayeredImage, LayerTree, is_whiteout, read_layered
from tests.cli.test_image import run as image_command
from tests.images.registry_server import (
    PASSWORD,
    USER,
    docker_registry,
    push,
    write_layered_layout,
)
from tests.support.overlay import show_overlay
from tests.support.sandbox_entry import SCRIPT_TEMPLATES, run_script

pytestmark = pytest.mark.anyio


@dataclass(frozen=True)
class Registry:
    """Registry with the images `made:gzip`, `made:zstd` and the index `made:many`; `unpacked` is their
    content."""

    host: str
    unpacked: Path


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory, rootfs: Path) -> Iterator[Registry]:
    folder = tmp_path_factory.mktemp("registry")
    with docker_registry(folder / "server") as host:
        layout = write_layered_layout(folder, rootfs)
        push(layout, f"{host}/team/made:gzip")
        push(layout, f"{host}/team/made:zstd", "--dest-compress-format", "zstd", "--dest-compress")
        push_index(host)
        yield Registry(host, folder / "bundle" / "rootfs")


def manifest_of(host: str) -> httpx.Response:
    url = f"http://{host}/v2/team/made/manifests/gzip"
    return httpx.get(url, headers={"Accept": ", ".join(MANIFESTS)})


def push_index(host: str) -> None:
    """Push an index that has the image for amd64 and arm64, and an attestation without a platform."""
    got = manifest_of(host)
    entry = {"mediaType": got.headers["Content-Type"], "size": len(got.content)}
    entry["digest"] = f"sha256:{hashlib.sha256(got.content).hexdigest()}"
    entries = [{**entry, "platform": {"os": "unknown", "architecture": "unknown"}}]
    entries += [{**entry, "platform": {"os": "linux", "architecture": name}} for name in ("amd64", "arm64")]
    index = {"schemaVersion": 2, "mediaType": INDEXES[0], "manifests": entries}
    url = f"http://{host}/v2/team/made/manifests/many"
    put = httpx.put(url, content=json.dumps(index), headers={"Content-Type": INDEXES[0]})
    assert put.status_code == 201, put.text


def puller(
    store: Path, host: str, *, environ: Mapping[str, str] | None = None, **settings: object
) -> ImagePuller:
    registries = RegistrySettings(insecure=(host,), attempts=2)
    values = PullSettings(registry=registries, **settings)  # type: ignore[arg-type]
    return ImagePuller(LayerStore(store), values, environ=environ or {})


def listing(root: Path) -> dict[str, str]:
    """Return each entry of a tree with its kind and content."""
    found = {}
    for path in sorted(root.rglob("*")):
        mode = path.lstat().st_mode
        if stat.S_ISLNK(mode):
            content = str(path.readlink())
        elif stat.S_ISREG(mode):
            content = f"{mode & 0o777 | 0o600:o} {hashlib.sha256(path.read_bytes()).hexdigest()}"
        else:
            content = f"directory {mode & 0o777 | 0o700:o}"
        found[str(path.relative_to(root))] = content
    return found


def mounted_listing(image: LayeredImage) -> dict[str, str]:
    """Return the listing of a real overlay of the layers, as an ordinary user mounts it."""
    program = (
        "import json; from pathlib import Path; from tests.images.test_registry import listing\n"
        "print(json.dumps(listing(Path('/mnt'))))"
    )
    return show_overlay(image.layers, program)


@pytest.mark.parametrize("tag", ["gzip", "zstd", "many"])
async def test_a_mounted_pulled_image_equals_the_pushed_one(
    registry: Registry, tmp_path: Path, tag: str
) -> None:
    image = await puller(tmp_path, registry.host).pull(f"docker://{registry.host}/team/made:{tag}")
    assert len(image.layers) == 3
    assert mounted_listing(image) == listing(registry.unpacked)
    tree = LayerTree(image.layers)
    assert tree.read("/data/kept", 100) == "kept\n"
    assert tree.find("/data/removed") is None
    assert tree.find("/data/tree/old") is None


@pytest.mark.parametrize("driver_name", LAYERED_DRIVERS)
async def test_a_sandbox_starts_from_a_pulled_image(
    registry: Registry, tmp_path: Path, run_dir: Path, driver_name: str
) -> None:
    image = await puller(tmp_path, registry.host).resolve(f"{registry.host}/team/made:gzip")
    driver = make_driver(driver_name, templates=SCRIPT_TEMPLATES)
    try:
        sandbox = await driver.start(SandboxSpec(image=image))
        script = "cat /etc/image; ls /data /data/tree; rm /data/kept; echo new > /data/kept; cat /data/kept"
        assert await run_script(sandbox, script) == (
            "from the image\n/data:\nhard\nkept\nprogram\ntree\n\n/data/tree:\nnew\nnew\n"
        )
        assert LayerStore(tmp_path).evict(max_bytes=0) == [], "a running sandbox keeps its layers"
        await sandbox.close()
    finally:
        await driver.aclose()
    assert len(LayerStore(tmp_path).evict(max_bytes=0)) == 3


def test_the_command_pulls_lists_and_prunes(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRORL_DRIVER", "bubblewrap")
    monkeypatch.setenv("PRORL_IMAGES__LAYERS_DIR", str(tmp_path / "layers"))
    monkeypatch.setenv("PRORL_IMAGES__INSECURE", f"[{registry.host!r}]")
    pulled = image_command(tmp_path, "pull", f"docker://{registry.host}/team/made:zstd")
    assert pulled.returncode == 0, pulled.stderr
    path = Path(pulled.stdout.strip())
    assert len(read_layered(path).layers) == 3
    listed = json.loads(image_command(tmp_path, "list", "--json").stdout)
    assert listed == [{"id": path.name, "path": str(path)}]
    pruned = image_command(tmp_path, "prune", "--keep-gib", "0", "--unused-days", "0")
    assert "3 layers removed" in pruned.stderr
    assert not path.exists()
    monkeypatch.setenv("PRORL_IMAGES__BASES", json.dumps({"ubuntu:24.04": str(registry.unpacked)}))
    assert image_command(tmp_path, "pull", "docker://ubuntu:24.04").stdout.strip() == str(registry.unpacked)


async def test_whiteouts_and_modes(registry: Registry, tmp_path: Path) -> None:
    image = await puller(tmp_path, registry.host).pull(f"{registry.host}/team/made:gzip")
    first, second, _ = image.layers
    assert is_whiteout((second / "data" / "removed").lstat())
    assert (first / "data" / "program").stat().st_mode & 0o7777 == 0o755
    assert (first / "data" / "hard").samefile(first / "data" / "kept")
    assert {path.lstat().st_uid for path in first.rglob("*")} == {os.geteuid()}


async def test_the_settings_of_the_image(registry: Registry, tmp_path: Path) -> None:
    config = (await puller(tmp_path, registry.host).pull(f"{registry.host}/team/made:gzip")).config
    assert config.env["A"] == "b=c"
    assert config.workdir == "/data"
    assert (config.entrypoint, config.command) == (("/bin/sh",), ("-c",))


async def test_an_earlier_pull_needs_no_registry(tmp_path: Path, rootfs: Path) -> None:
    with docker_registry(tmp_path / "server") as host:
        push(write_layered_layout(tmp_path, rootfs), f"{host}/made:1")
        pulled = await puller(tmp_path / "store", host).resolve(f"{host}/made:1")
    assert pulled == await puller(tmp_path / "store", host).resolve(f"{host}/made:1")
    assert len(read_layered(pulled).layers) == 3
    with pytest.raises(SandboxError, match="cannot be reached"):
        await puller(tmp_path / "store", host).resolve(f"{host}/made:1", refresh=True)


async def test_a_digest_names_the_image(registry: Registry, tmp_path: Path) -> None:
    digest = hashlib.sha256(manifest_of(registry.host).content).hexdigest()
    image = await puller(tmp_path, registry.host).pull(f"{registry.host}/team/made@sha256:{digest}")
    assert len(image.layers) == 3
    with pytest.raises(RegistryRefused, match="has no"):
        await puller(tmp_path, registry.host).pull(f"{registry.host}/team/made@sha256:{'0' * 64}")


async def test_a_platform_that_the_image_lacks(registry: Registry, tmp_path: Path) -> None:
    pulling = puller(tmp_path, registry.host)
    assert (await pulling.pull(f"{registry.host}/team/made:many", platform="linux/arm64")).layers
    with pytest.raises(ImageRefused, match=r"no variant for linux/s390x.*linux/amd64, linux/arm64"):
        await pulling.pull(f"{registry.host}/team/made:many", platform="linux/s390x")


@pytest.mark.parametrize("form", ["auth", "username", "variables"])
async def test_a_login(tmp_path: Path, rootfs: Path, form: str) -> None:
    with docker_registry(tmp_path / "server", password=True) as host:
        layout = write_layered_layout(tmp_path, rootfs)
        push(layout, f"{host}/secret:1", "--dest-creds", f"{USER}:{PASSWORD}")
        encoded = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        logins = {
            "auth": {"auth": encoded},
            "username": {"username": USER, "password": PASSWORD},
            "variables": {},
        }
        (tmp_path / "auth.json").write_text(json.dumps({"auths": {host: logins[form]}}))
        environ = {"REGISTRY_AUTH_FILE": str(tmp_path / "auth.json")}
        if form == "variables":
            environ |= {"APPTAINER_DOCKER_USERNAME": USER, "APPTAINER_DOCKER_PASSWORD": PASSWORD}
        image = await puller(tmp_path / "store", host, environ=environ).pull(f"{host}/secret:1")
        assert len(image.layers) == 3
        with pytest.raises(RegistryRefused, match="asks for a login"):
            await puller(tmp_path / "other", host).pull(f"{host}/secret:1")


async def test_a_mirror_comes_first_and_the_registry_after_it(registry: Registry, tmp_path: Path) -> None:
    for mirrors in ((f"{registry.host}/team",), ("127.0.0.1:1", f"{registry.host}/team")):
        settings = RegistrySettings(
            mirrors={"registry.invalid": mirrors}, insecure=(registry.host, "127.0.0.1:1"), attempts=1
        )
        pulling = ImagePuller(LayerStore(tmp_path), PullSettings(registry=settings), environ={})
        assert len((await pulling.pull("registry.invalid/made:gzip")).layers) == 3


async def test_two_pulls_at_once_make_each_layer_once(registry: Registry, tmp_path: Path) -> None:
    lines: list[str] = []
    settings = PullSettings(registry=RegistrySettings(insecure=(registry.host,)))
    pulls = [ImagePuller(LayerStore(tmp_path), settings, progress=lines.append, environ={}) for _ in range(3)]
    images = await asyncio.gather(*(one.pull(f"{registry.host}/team/made:gzip") for one in pulls))
    assert images[0] == images[1] == images[2]
    assert sum(line.startswith("unpacking") for line in lines) == 3


async def test_a_base_alias_comes_before_any_registry(tmp_path: Path, rootfs: Path) -> None:
    pulling = puller(tmp_path, "127.0.0.1:1", bases={"ubuntu:24.04": rootfs})
    assert await pulling.resolve("docker://docker.io/library/ubuntu:24.04") == rootfs
    assert (await pulling.pull("ubuntu:24.04")).layers == (rootfs,)
    sif = puller(tmp_path, "127.0.0.1:1", bases={"ubuntu:24.04": tmp_path / "base.sif"})
    with pytest.raises(InputError, match="has no layers"):
        await sif.pull("ubuntu:24.04")
