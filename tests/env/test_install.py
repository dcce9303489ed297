"""Installing a harness: one at a time, and nothing stays of an installation that was killed."""

import asyncio
import zipfile
from pathlib import Path

import pytest

from prorl_envs.env.harness.install import install, place_of
from prorl_envs.env.harness.recipe import Install, Recipe

pytestmark = [pytest.mark.anyio, pytest.mark.thorough]


def wheel(directory: Path) -> Path:
    """A package that needs no registry."""
    path = directory / "little-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as packed:
        packed.writestr("little.py", "")
        packed.writestr(
            "little-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: little\nVersion: 1.0\n"
        )
        packed.writestr("little-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        packed.writestr("little-1.0.dist-info/RECORD", "")
    return path


async def test_of_two_installations_one_waits_and_what_a_killed_one_left_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    packages = Install(registry="pypi", packages=(str(wheel(tmp_path)),))
    recipe = Recipe(name="little", command=("python", "-m", "little"), install=packages)
    place = place_of(recipe, tmp_path)
    killed = place.with_name(f".{place.name}-left")
    (killed / "lib").mkdir(parents=True)
    said: list[str] = []

    places = await asyncio.gather(*(install(recipe, tmp_path, said.append) for _ in range(2)))

    assert places == [place, place]
    assert sorted(text.split()[0] for text in said) == ["installing", "somebody"]
    assert [found.name for found in place.parent.iterdir()] == [place.name]
    assert list(place.glob("lib/python*/site-packages/little.py"))
