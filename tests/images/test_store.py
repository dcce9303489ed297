"""The cache of images: additions, damaged entries, eviction. No builder is needed."""

import os
from pathlib import Path

import pytest

from prorl_envs.errors import SandboxError
from prorl_envs.images.eviction import choose_unused
from prorl_envs.images.store import ImageStore, StoredImage

DAY_S = 86_400


def add(store: ImageStore, tmp_path: Path, name: str, size: int = 1000) -> StoredImage:
    built = tmp_path / "built"
    built.write_bytes(os.urandom(size))
    return store.add(built, key=f"{name:0<64}", name=name, version="1", source="test", content={})


def age(store: ImageStore, entry: StoredImage, days: float) -> None:
    path = store.image(entry).with_name("used")
    then = path.stat().st_mtime - days * DAY_S
    os.utime(path, (then, then))


def test_an_added_image_is_found(store: ImageStore, tmp_path: Path) -> None:
    assert store.find("a" + "0" * 63) is None
    assert store.entries() == []
    entry = add(store, tmp_path, "a")
    assert store.find(entry.key) == entry
    assert store.use(entry).read_bytes() == (tmp_path / "built").read_bytes()
    assert store.find("a" + "0" * 62 + "1") is None  # the name has only a prefix of the key
    assert list((store.root / "incoming").iterdir()) == []


def test_the_newest_image_of_a_key_is_used_and_the_older_kept(store: ImageStore, tmp_path: Path) -> None:
    first, second = add(store, tmp_path, "a"), add(store, tmp_path, "a")
    assert store.find(first.key) == second
    assert store.image(first).exists()


def test_damaged_entries_are_ignored(store: ImageStore, tmp_path: Path) -> None:
    cut, unreadable, half, whole = (add(store, tmp_path, name) for name in "abcd")
    os.truncate(store.image(cut), 10)
    store.image(unreadable).with_name("entry.json").write_text("{}")
    store.image(half).with_name("entry.json").unlink()
    assert store.entries() == [whole]
    assert store.find(cut.key) is None


def test_a_failing_addition_leaves_no_file(store: ImageStore, tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match="cannot write the image cache"):
        store.add(tmp_path / "absent", key="a" * 64, name="a", version="", source="", content={})
    assert list((store.root / "incoming").iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(SandboxError, match="cannot write") as caught:
        add(ImageStore(tmp_path / "file"), tmp_path, "a")
    assert "image_cache" in caught.value.hint


def test_the_images_unused_for_longest_are_removed_first(store: ImageStore, tmp_path: Path) -> None:
    old, older, fresh = (add(store, tmp_path, name) for name in "abc")
    age(store, old, 5)
    age(store, older, 9)
    assert store.prune(3000) == []
    assert store.prune(2000) == [older]
    assert store.prune(0) == [old]
    assert store.entries() == [fresh]  # used today: it may be in use
    assert store.prune(0, unused_s=-1.0) == [fresh]
    assert list((store.root / "entries").iterdir()) == list((store.root / "incoming").iterdir()) == []


def test_using_an_image_keeps_it(store: ImageStore, tmp_path: Path) -> None:
    first, second = add(store, tmp_path, "a"), add(store, tmp_path, "b")
    age(store, first, 9)
    age(store, second, 5)
    store.use(first)
    assert store.prune(1000) == [second]


def test_files_of_killed_builders_are_removed_after_a_day(store: ImageStore, tmp_path: Path) -> None:
    add(store, tmp_path, "a")
    (store.root / "locks").mkdir()
    for folder in ("incoming", "locks"):
        for name in ("old", "new"):
            (store.root / folder / name).touch()
        then = (store.root / folder / "old").stat().st_mtime - 2 * DAY_S
        os.utime(store.root / folder / "old", (then, then))
    store.prune(1 << 40)
    assert [path.name for path in (store.root / "incoming").iterdir()] == ["new"]
    assert [path.name for path in (store.root / "locks").iterdir()] == ["new"]


def test_pruning_a_missing_cache_creates_none(store: ImageStore) -> None:
    assert store.prune(0) == []
    assert not store.root.exists()


def test_a_path_that_is_too_long_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match="too long"):
        ImageStore(tmp_path / ("a/" * 1600))


def test_eviction_stops_as_soon_as_the_rest_fits() -> None:
    used = [(3.0, 5, "a"), (1.0, 5, "b"), (2.0, 5, "c")]
    assert choose_unused(used, max_bytes=10, keep_after=9.0) == ["b"]
    assert choose_unused(used, max_bytes=4, keep_after=9.0) == ["b", "c", "a"]
    assert choose_unused(used, max_bytes=0, keep_after=2.0) == ["b", "c"]
