"""Store of layers: each layer is made once and completely, and evicted only if it is not in use."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_envs.errors import SandboxError
from prorl_envs.images.eviction import choose_unused
from prorl_envs.images.layers import LayerStore
from prorl_envs.sandbox.filesystem.layered import LayeredImage

pytestmark = pytest.mark.anyio

MAKER = """\
import asyncio, sys
from pathlib import Path
from prorl_envs.images.layers import LayerStore

async def make():
    async with LayerStore(Path(sys.argv[1])).making(sys.argv[2]) as place:
        if place is None:
            print("exists", flush=True)
            return
        (place / "part").write_text("text")
        print("making", flush=True)
        await asyncio.to_thread(sys.stdin.readline)

asyncio.run(make())
"""
HOLDER = """\
import sys
from pathlib import Path
from prorl_envs.sandbox.filesystem.layer_leases import LayerLease

lease = LayerLease([Path(sys.argv[1])])
print("holding", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def layers(tmp_path: Path) -> LayerStore:
    return LayerStore(tmp_path / "store")


async def make(store: LayerStore, key: str, size: int = 100) -> Path:
    async with store.making(key) as place:
        if place is not None:
            (place / "file").write_bytes(b"x" * size)
    layer = store.layer(key)
    assert layer is not None
    return layer


def unused(store: LayerStore, key: str, seconds: float) -> None:
    """Make the last use of a layer older by some seconds."""
    path = store.root / "leases" / key
    when = path.stat().st_mtime - seconds
    os.utime(path, (when, when))


def start(program: str, *arguments: str | Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def output_line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


async def test_a_layer_appears_when_it_is_complete(layers: LayerStore) -> None:
    async with layers.making("a") as place:
        assert place is not None
        (place / "file").touch()
        assert layers.layer("a") is None
    layer = layers.layer("a")
    assert layer is not None
    assert [path.name for path in layer.iterdir()] == ["file"]
    async with layers.making("a") as place:
        assert place is None
    assert list((layers.root / "incoming").iterdir()) == []
    assert list((layers.root / "locks").iterdir()) == []


async def test_a_failed_maker_leaves_nothing(layers: LayerStore) -> None:
    with pytest.raises(RuntimeError):
        async with layers.making("a") as place:
            assert place is not None
            (place / "file").touch()
            raise RuntimeError
    assert layers.layer("a") is None
    assert list((layers.root / "incoming").iterdir()) == []
    assert await make(layers, "a")


async def test_concurrent_makers_make_a_layer_once(layers: LayerStore) -> None:
    made = []

    async def one() -> None:
        async with layers.making("a") as place:
            made.append(place)

    await asyncio.gather(*(one() for _ in range(5)))
    assert sum(place is not None for place in made) == 1


def test_two_processes_make_a_layer_once(layers: LayerStore) -> None:
    with start(MAKER, layers.root, "a") as first:
        assert output_line(first) == "making"
        with start(MAKER, layers.root, "a") as second:
            first.communicate("\n")
            assert output_line(second) == "exists"
    assert (layers.root / "layers" / "a" / "part").read_text() == "text"


async def test_files_of_a_killed_maker_are_removed_and_the_layer_is_made_again(layers: LayerStore) -> None:
    with start(MAKER, layers.root, "a") as maker:
        assert output_line(maker) == "making"
        layers.sweep()
        assert len(list((layers.root / "incoming").iterdir())) == 2, (
            "its place and its lock stay while it lives"
        )
        maker.send_signal(signal.SIGKILL)
    assert layers.layer("a") is None
    layers.sweep()
    assert list((layers.root / "incoming").iterdir()) == []
    layer = await make(layers, "a")
    assert [path.name for path in layer.iterdir()] == ["file"]


async def test_eviction_takes_the_least_recently_used(layers: LayerStore) -> None:
    for number, key in enumerate("abcd"):
        await make(layers, key, 1 << 20)
        unused(layers, key, 1000 - 100 * number)
    assert layers.evict(max_bytes=2 * layers.size("c")) == ["a", "b"]
    assert layers.evict(max_bytes=3 << 20, unused_s=0) == []
    layers.layer("c")  # used again
    assert layers.evict(max_bytes=layers.size("c")) == ["d"]
    assert layers.evict(max_bytes=0, unused_s=3600) == []
    assert layers.evict(max_bytes=0) == ["c"]
    assert [list((layers.root / name).iterdir()) for name in ("layers", "leases", "sizes", "incoming")] == [
        []
    ] * 4


async def test_eviction_skips_a_layer_in_use_by_another_process(layers: LayerStore) -> None:
    layer = await make(layers, "a")
    with start(HOLDER, layer) as holder:
        assert output_line(holder) == "holding"
        assert layers.evict(max_bytes=0) == []
        holder.send_signal(signal.SIGKILL)
    assert layers.evict(max_bytes=0) == ["a"]


async def test_a_held_layer_was_not_evicted(layers: LayerStore) -> None:
    layer = await make(layers, "a")
    with layers.holding([layer]):
        assert layers.evict(max_bytes=0) == []
    assert layers.evict(max_bytes=0) == ["a"]
    with pytest.raises(SandboxError, match="was evicted"), layers.holding([layer]):
        pass


async def test_an_image_is_removed_with_its_layers(layers: LayerStore) -> None:
    kept, lost = await make(layers, "kept", 1 << 20), await make(layers, "lost", 1 << 20)
    layers.write_image("one", LayeredImage(layers=(kept,)))
    layers.write_image("two", LayeredImage(layers=(kept, lost)))
    unused(layers, "lost", 100)
    assert layers.evict(max_bytes=layers.size("kept")) == ["lost"]
    assert [path.name for path in layers.images()] == ["one.layers.json"]
    assert layers.image("one") is not None
    assert layers.image("two") is None


async def test_the_last_use_of_an_image_is_the_last_use_of_its_layers(layers: LayerStore) -> None:
    layers.write_image("one", LayeredImage(layers=(await make(layers, "a"),)))
    unused(layers, "a", 100)
    assert layers.image("one") is not None
    assert layers.evict(max_bytes=0, unused_s=50) == []


@pytest.mark.parametrize("key", ["", "..", "a/b", "A", "a" * 129, ".hidden", "a\0"])
async def test_a_key_is_a_plain_name(layers: LayerStore, key: str) -> None:
    with pytest.raises(SandboxError, match="not a layer's key"):
        layers.layer(key)
    with pytest.raises(SandboxError, match="not an image's name"):
        layers.image(f"{key}/../x")


def test_a_download_is_resumed_until_it_is_complete(layers: LayerStore) -> None:
    with layers.downloading("d", 10) as file:
        file.write(b"12345")
        with pytest.raises(SandboxError, match="another process"), layers.downloading("d", 10):
            pass
    with layers.downloading("d", 10) as file:
        assert file.read() == b"12345"
        file.write(b"67890")
    assert list((layers.root / "downloads").iterdir()) == []


def test_an_old_download_is_removed(layers: LayerStore) -> None:
    for name in ("new", "old"):
        with layers.downloading(name, 10) as file:
            file.write(b"12345")
    os.utime(layers.root / "downloads" / "old", (1, 1))
    layers.sweep()
    assert [path.name for path in (layers.root / "downloads").iterdir()] == ["new"]


async def test_a_store_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SandboxError, match="cannot write the store of layers"):
        async with LayerStore(tmp_path / "file").making("a"):
            pass


@given(
    used=st.lists(st.tuples(st.floats(0, 100), st.integers(0, 100)), max_size=8),
    max_bytes=st.integers(0, 400),
    keep_after=st.floats(0, 100),
)
def test_the_choice_of_layers(used: list[tuple[float, int]], max_bytes: int, keep_after: float) -> None:
    found = [(when, size, str(number)) for number, (when, size) in enumerate(used)]
    removed = set(choose_unused(found, max_bytes=max_bytes, keep_after=keep_after))
    rest = [entry for entry in found if entry[2] not in removed]
    assert all(when <= keep_after for when, _, key in found if key in removed)
    movable = [entry for entry in rest if entry[0] <= keep_after]
    assert not movable or sum(size for _, size, _ in rest) <= max_bytes
