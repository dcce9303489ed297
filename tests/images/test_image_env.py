"""Variables of an image: from the container's configuration to a process in the sandbox."""

from pathlib import Path

import pytest

from prorl_envs.images.builder import ImageBuilder
from prorl_envs.sandbox.base import SandboxSpec
from prorl_envs.sandbox.drivers.bubblewrap import BubblewrapDriver
from tests.images.conftest import write_oci_archive
from tests.sandbox.rootfs import missing_for_sif
from tests.support.sandbox_entry import SCRIPT_TEMPLATES, run_script

pytestmark = pytest.mark.anyio

ENV = {
    "PATH": "/opt/x/bin:/usr/bin:/bin",
    "PLAIN": "simple",
    "QUOTES": "a\"b'c",
    "SHELL_S": "$HOME `id` $(id) ${A:-b}",
    "BACKSLASHES": r"a\b\\c\n",
    "LINES": "one\ntwo\ttab",
    "WORDS": "ümlaut \N{SNOWMAN} !",
    "EMPTY": "",
}


@pytest.mark.skipif(bool(missing_for_sif()), reason=missing_for_sif())
async def test_variables_of_the_definition_are_unchanged(
    builder: ImageBuilder, layer: bytes, tmp_path: Path, run_dir: Path
) -> None:
    env = [f"{name}={value}" for name, value in ENV.items()]
    image = await builder.resolve(write_oci_archive(tmp_path / "image.tar", layer, env))
    assert image is not None
    driver = BubblewrapDriver(templates=SCRIPT_TEMPLATES)
    try:
        found = await driver.image_env(image)
        assert found == ENV
        sandbox = await driver.start(SandboxSpec(image=image, env=found))
        for name, value in ENV.items():
            assert await run_script(sandbox, f'busybox printf "%s" "${name}"') == value
    finally:
        await driver.aclose()
