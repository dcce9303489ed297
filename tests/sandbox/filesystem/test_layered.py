"""Layered images: their file format, and the view of their layers, which equals a real overlay."""

import json
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prorl_envs.errors import SandboxError
from prorl_envs.sandbox.filesystem.layered import (
    LAYER_LIMIT,
    OPAQUE_ATTRIBUTE,
    ImageConfig,
    LayeredImage,
    LayerTree,
    read_layered,
)
from tests.support.overlay import show_overlay

CONFIG = ImageConfig(
    env={"A": "b"}, workdir="/w", entrypoint=("e",), command=("c", "d"), shell=("sh", "-c"),
    healthcheck={"Test": ["CMD"]},
)  # fmt: skip


def whiteout(path: Path) -> None:
    os.mknod(path, stat.S_IFCHR | 0o600, 0)


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    (tmp_path / "store" / "a").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    image = LayeredImage(layers=(tmp_path / "store" / "a", tmp_path / "elsewhere"), config=CONFIG)
    image.write(tmp_path / "store" / "x.layers.json")
    assert read_layered(tmp_path / "store" / "x.layers.json") == image
    assert [path.name for path in (tmp_path / "store").iterdir()] in (
        ["a", "x.layers.json"],
        ["x.layers.json", "a"],
    )


def test_a_store_can_be_moved_with_its_images(tmp_path: Path) -> None:
    (tmp_path / "old" / "a").mkdir(parents=True)
    LayeredImage(layers=(tmp_path / "old" / "a",)).write(tmp_path / "old" / "x.layers.json")
    (tmp_path / "old").rename(tmp_path / "new")
    assert read_layered(tmp_path / "new" / "x.layers.json").layers == (tmp_path / "new" / "a",)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "cannot read the image"),
        ("[" * 100_000, "cannot read the image"),
        ("[]", "is not a layered image"),
        ('{"format": 1}', "has format 1"),
        ('{"format": 2, "layers": ["a"], "config": {"other": 1}}', "is not a layered image"),
        ('{"format": 2, "layers": ["a"], "config": 3}', "is not a layered image"),
        ('{"format": 2, "layers": ["b"], "config": {}}', "has lost its layer b"),
        ('{"format": 2, "layers": [], "config": {}}', "has 0 layers"),
        (json.dumps({"format": 2, "layers": ["a"] * (LAYER_LIMIT + 1), "config": {}}), "has 121 layers"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "x.layers.json").write_text(text)
    with pytest.raises(SandboxError, match=says):
        read_layered(tmp_path / "x.layers.json")


def test_links_stay_inside(tmp_path: Path) -> None:
    for name, target in (("up", "../../../etc/passwd"), ("root", "/etc/passwd"), ("loop", "loop")):
        (tmp_path / name).symlink_to(target)
    tree = LayerTree([tmp_path])
    assert tree.resolve("/up") == tree.resolve("/root") == "/etc/passwd"
    assert tree.read("/up", 1 << 20) is None
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "passwd").write_text("inside")
    assert tree.read("/up", 1 << 20) == tree.read("/root", 1 << 20) == "inside"
    assert tree.read("/up", 5) is None, "longer than the limit"
    with pytest.raises(SandboxError, match="forms a loop"):
        tree.resolve("/loop/x")


NAMES = ("a", "b")
KINDS = ("file", "link", "whiteout", "directory", "opaque")
LAYERS = st.lists(
    st.dictionaries(
        st.lists(st.sampled_from(NAMES), min_size=1, max_size=3).map(tuple), st.sampled_from(KINDS)
    ),
    min_size=1,
    max_size=4,
)


def write_layer(layer: Path, entries: dict[tuple[str, ...], str]) -> None:
    layer.mkdir()
    for parts, kind in sorted(entries.items()):
        path = layer.joinpath(*parts)
        if any(parent.exists(follow_symlinks=False) and not is_directory(parent) for parent in path.parents):
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        if kind in ("directory", "opaque"):
            path.mkdir()
        elif kind == "file":
            path.write_text(f"{layer.name}\n")
        elif kind == "link":
            path.symlink_to("/b")
        else:
            whiteout(path)
        if kind == "opaque":
            os.setxattr(path, OPAQUE_ATTRIBUTE, b"y")


def is_directory(path: Path) -> bool:
    return stat.S_ISDIR(path.lstat().st_mode)


#: A directory of one layer only is listed with its whiteouts, which do not exist all the same.
SHOW = """\
import json, os
found = {}
for folder, folders, files in os.walk("/mnt"):
    for name in folders + files:
        path = os.path.join(folder, name)
        if os.path.islink(path):
            found[path.removeprefix("/mnt")] = os.readlink(path)
        elif os.path.exists(path):
            found[path.removeprefix("/mnt")] = "directory" if os.path.isdir(path) else open(path).read()
print(json.dumps(found))
"""


@settings(max_examples=25)
@given(entries=LAYERS)
def test_the_view_is_that_of_a_real_overlay(entries: list[dict[tuple[str, ...], str]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        layers = [Path(folder) / str(number) for number in range(len(entries))]
        (Path(folder) / "base").mkdir()
        for layer, found in zip(layers, entries, strict=True):
            write_layer(layer, found)
        tree = LayerTree([Path(folder) / "base", *layers])
        shown = show_overlay(tree.layers, SHOW)
        paths = {"/" + "/".join(parts) for layer in entries for parts in layer} | set(shown)
        assert {path: describe(tree, path) for path in paths} == {path: shown.get(path) for path in paths}


def describe(tree: LayerTree, path: str) -> str | None:
    found = tree.find(path)
    if found is None:
        return None
    if found.is_symlink():
        return str(found.readlink())
    return "directory" if found.is_dir() else found.read_text()


@pytest.fixture
def ordinary_user() -> Iterator[None]:
    """Remove root's right to enter every directory."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(65534)
    yield
    os.seteuid(before)


@pytest.mark.usefixtures("ordinary_user")
@pytest.mark.parametrize(
    ("path", "resolved", "kind"),
    [
        ("/closed/in/file", "/closed/in/file", stat.S_IFREG),
        ("/closed/in/link", "/closed/in/file", stat.S_IFREG),
        ("/closed/in/none", "/closed/in/none", 0),
        ("/closed/in", "/closed/in", stat.S_IFDIR),
    ],
)
def test_entries_below_directories_without_permissions_are_found(path: str, resolved: str, kind: int) -> None:
    """The emulated root of a sandbox may remove permissions of directories. Their modes do not change."""
    with tempfile.TemporaryDirectory(prefix="prt-") as layer:
        closed = [Path(layer, "closed"), Path(layer, "closed", "in")]
        closed[1].mkdir(parents=True)
        (closed[1] / "file").write_text("f")
        (closed[1] / "link").symlink_to("file")
        for place in reversed(closed):
            place.chmod(0)
        tree = LayerTree([Path(layer)])
        found = tree.locate(path)
        assert (found.path, found.kind) == (resolved, kind)
        assert tree.read(path, 10) == ("f" if kind == stat.S_IFREG else None)
        for place in closed:
            assert stat.S_IMODE(place.stat().st_mode) == 0
            place.chmod(0o700)
