"""Images by every kind of name that NeMo Gym may use, with the variables that they set."""

import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nemo_gym", reason="run by scripts/test-nemo.sh in an environment of its own")

# mypy: disable-error-code="import-not-found,import-untyped"
from nemo_gym.sandbox import AsyncSandbox, SandboxSpec
from nemo_gym.sandbox.providers.base import SandboxCreateError

from tests.images.conftest import write_oci_archive
from tests.sandbox.rootfs import missing_for_sif, write_busybox_rootfs

pytestmark = [
    pytest.mark.nemo,
    pytest.mark.anyio,
    pytest.mark.skipif(bool(missing_for_sif()), reason=missing_for_sif()),
]

ENV = ("PATH=/opt/conda/bin:/usr/bin:/bin", "GREETING=two $words", "KEPT=image", "OVER=image")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PRORL_IMAGE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """Make an OCI archive with a program that only its own PATH finds."""
    busybox = shutil.which("busybox")
    if busybox is None:
        pytest.skip("busybox is not installed")
    root = write_busybox_rootfs(tmp_path / "root", busybox)
    (root / "opt/conda/bin").mkdir(parents=True)
    program = root / "opt/conda/bin/conda"
    program.write_text("#!/bin/sh\necho conda\n")
    program.chmod(0o755)
    with tarfile.open(tmp_path / "layer", "w") as layer:
        layer.add(root, ".")
    return write_oci_archive(tmp_path / "image.tar", (tmp_path / "layer").read_bytes(), ENV)


def the_one_in(cache: Path) -> Path:
    (built,) = cache.glob("entries/*/*.sif")
    return built


def sandbox(image: object, **spec: Any) -> Any:
    return AsyncSandbox({"prorl": {}}, SandboxSpec(image=str(image), **spec))


async def test_an_archive_becomes_an_image_with_its_own_variables(cache: Path, archive: Path) -> None:
    async with sandbox(archive, env={"OVER": "asked"}) as box:
        await box.start()
        assert (await box.exec("cat /etc/image; conda")).stdout == "from the image\nconda\n"
        assert (await box.exec('echo "$GREETING, $KEPT, $OVER"')).stdout == "two $words, image, asked\n"
    async with sandbox(the_one_in(cache), entrypoint=["sh", "-c", "conda > /tmp/said; sleep 1000"]) as box:
        await box.start()
        done = await box.exec("until [ -s /tmp/said ]; do sleep 0.01; done; cat /tmp/said")
        assert done.stdout == "conda\n"


async def test_a_definition_becomes_an_image(cache: Path, archive: Path, tmp_path: Path) -> None:
    definition = tmp_path / "task.def"
    definition.write_text("Bootstrap: localimage\nFrom: root\n\n%post\n    echo {{ word }} > /etc/image\n")
    async with sandbox(definition, provider_options={"image_variables": {"word": "built"}}) as box:
        await box.start()
        assert (await box.exec("cat /etc/image")).stdout == "built\n"


async def test_a_build_has_a_time_limit_of_its_own(
    cache: Path, archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRORL_IMAGE_BUILD_S", "0.001")
    box = sandbox(archive)
    with pytest.raises(SandboxCreateError, match="image_build_s"):
        await box.start()
    await box.stop()


async def test_an_archive_of_another_kind_is_not_an_image(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "x.tar").write_bytes(b"nothing")
    box = sandbox(tmp_path / "x.tar")
    with pytest.raises(SandboxCreateError, match="not an image"):
        await box.start()
    await box.stop()
