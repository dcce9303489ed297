"""Installation of harnesses: one at a time, and without remains after a kill or a failure."""

import asyncio
import zipfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler
from pathlib import Path

import pytest

from prorl_envs.env.harness.install import install, place_of
from prorl_envs.env.harness.recipe import Install, Recipe
from prorl_envs.errors import EnvironmentFault
from tests.http_server import answering

pytestmark = [pytest.mark.anyio, pytest.mark.thorough]


def wheel(directory: Path, name: str = "little") -> Path:
    """A package that needs no registry."""
    path = directory / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as packed:
        packed.writestr(f"{name}.py", "")
        packed.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        packed.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        packed.writestr(f"{info}/RECORD", "")
    return path


@contextmanager
def index(directory: Path) -> Iterator[tuple[str, Counter[str]]]:
    """Serve a package index of the files in `directory`; yield its URL and the requests per path."""
    sent: Counter[str] = Counter()

    class Handler(SimpleHTTPRequestHandler):
        def end_headers(self) -> None:
            sent[self.path] += 1
            if self.path.endswith(".whl"):  # as on PyPI, whose files never change
                self.send_header("Cache-Control", "max-age=365000000, immutable, public")
            super().end_headers()

        def log_message(self, *args: object) -> None:
            return

    with answering(partial(Handler, directory=str(directory))) as place:
        yield f"http://{place}", sent


async def test_concurrent_installations_wait_and_remove_files_of_killed_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    packages = Install(registry="pypi", packages=(str(wheel(tmp_path)),))
    recipe = Recipe(name="little", command=("python", "-m", "little"), install=packages)
    place = place_of(recipe, tmp_path)
    store = place.parent.parent
    (store / "incoming" / "left" / "lib").mkdir(parents=True)
    said: list[str] = []

    places = await asyncio.gather(*(install(recipe, tmp_path, said.append) for _ in range(2)))

    assert places == [place, place]
    assert sorted(text.split()[0] for text in said) == ["another", "installing"]
    assert [found.name for found in place.parent.iterdir()] == [place.name]
    assert list((store / "incoming").iterdir()) == list(store.glob("*.downloads")) == []
    assert list(place.glob("lib/python*/site-packages/little.py"))


async def test_a_failed_installation_is_resumed_with_its_downloads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("little", "late"):
        (tmp_path / "index" / name).mkdir(parents=True)
    wheel(tmp_path / "index" / "little")
    recipe = Recipe(
        name="two", command=("true",), install=Install(registry="pypi", packages=("little==1.0", "late==1.0"))
    )
    with index(tmp_path / "index") as (url, sent):
        monkeypatch.setenv("PIP_INDEX_URL", url)
        monkeypatch.setenv("PIP_TRUSTED_HOST", "127.0.0.1")
        for other in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_NO_INDEX"):
            monkeypatch.delenv(other, raising=False)
        output: list[str] = []
        with pytest.raises(EnvironmentFault, match="late") as caught:
            await install(recipe, tmp_path / "cache", output.append, output.append)
        assert "reuses the downloads" in caught.value.hint
        assert any(line.startswith("Collecting little==1.0") for line in output)
        wheel(tmp_path / "index" / "late", "late")
        place = await install(recipe, tmp_path / "cache", output.append, output.append)
    files = {path: count for path, count in sent.items() if path.endswith(".whl")}
    assert files == {"/little/little-1.0-py3-none-any.whl": 1, "/late/late-1.0-py3-none-any.whl": 1}
    assert [found.name for found in place.parent.iterdir()] == [place.name]
    assert list(place.parent.parent.glob("*.downloads")) == []
