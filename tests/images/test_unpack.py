"""Layers become directories in overlayfs's format; hostile layers change no other files."""

import contextlib
import gzip
import hashlib
import io
import os
import stat
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_envs.errors import SandboxError
from prorl_envs.images.unpack import LayerRefused, UnpackLimits, unpack_layer
from prorl_envs.sandbox.filesystem.layered import is_opaque, is_whiteout

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

Entry = tuple[str, bytes, str]
FILE, FOLDER, LINK, HARD = tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE


def entry(name: str, kind: bytes = FILE, target: str = "") -> Entry:
    """Entry of a layer; `target` is the content of a file or the target of a link."""
    return name, kind, target


def tar_of(*entries: Entry, mode: int = 0o755, pax: dict[str, str] | None = None) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, kind, target in entries:
            member = tarfile.TarInfo(name)
            member.type, member.mode, member.uid, member.mtime = kind, mode, 1234, 1_000_000
            member.pax_headers = dict(pax or {})
            content = target.encode() if kind == FILE else b""
            member.size, member.linkname = len(content), "" if kind == FILE else target
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


@pytest.fixture
def place(tmp_path: Path) -> Path:
    path = tmp_path / "store" / "layer"
    path.mkdir(parents=True)
    return path


def unpack(place: Path, data: bytes, limits: UnpackLimits | None = None, diff_id: str = "") -> str:
    return unpack_layer(io.BytesIO(data), place, limits=limits, diff_id=diff_id)


@pytest.mark.parametrize("compress", [bytes, gzip.compress, zstd.compress], ids=["plain", "gzip", "zstd"])
def test_every_compression_gives_the_same(place: Path, compress: Callable[[bytes], bytes]) -> None:
    data = tar_of(entry("a/b", FILE, "text"))
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
    assert unpack(place, compress(data), diff_id=digest) == digest
    assert (place / "a" / "b").read_text() == "text"


def test_another_digest_is_refused(place: Path) -> None:
    with pytest.raises(LayerRefused, match="has the digest"):
        unpack(place, tar_of(entry("a")), diff_id=f"sha256:{'0' * 64}")


def test_modes_owners_and_times(place: Path) -> None:
    unpack(place, tar_of(entry("d", FOLDER), entry("d/f"), mode=0o7000))
    for path, mode in ((place / "d", 0o1700), (place / "d" / "f", 0o600)):
        status = path.stat()
        assert (stat.S_IMODE(status.st_mode), status.st_uid) == (mode, os.geteuid())
        assert status.st_mtime == 1_000_000


def test_whiteouts(place: Path) -> None:
    unpack(place, tar_of(entry("d/.wh.gone"), entry("e/.wh..wh..opq"), entry("e/new"), entry(".wh..wh.plnk")))
    assert is_whiteout((place / "d" / "gone").lstat())
    assert is_opaque(place / "e")
    assert not is_opaque(place / "d")
    assert sorted(path.name for path in place.iterdir()) == ["d", "e"]


@pytest.mark.parametrize("first", ["whiteout", "directory"])
def test_a_directory_with_a_whiteout_of_its_name_hides_the_lower_one(place: Path, first: str) -> None:
    entries = [entry(".wh.d"), entry("d/new")]
    unpack(place, tar_of(*(entries if first == "whiteout" else reversed(entries))))
    assert is_opaque(place / "d")
    assert (place / "d" / "new").is_file()


@pytest.mark.parametrize("first", ["whiteout", "file"])
def test_a_file_with_a_whiteout_of_its_name_stays(place: Path, first: str) -> None:
    entries = [entry(".wh.f"), entry("f", FILE, "new")]
    unpack(place, tar_of(*(entries if first == "whiteout" else reversed(entries))))
    assert (place / "f").read_text() == "new"


def test_links(place: Path) -> None:
    layer = tar_of(
        entry("f", FILE, "x"), entry("hard", HARD, "f"), entry("soft", LINK, "/etc/passwd"),
        entry("both", HARD, "/soft"),
    )  # fmt: skip
    unpack(place, layer)
    assert (place / "hard").samefile(place / "f")
    assert (place / "soft").readlink() == (place / "both").readlink() == Path("/etc/passwd")


def test_devices_are_left_out_and_pipes_kept(place: Path) -> None:
    unpack(
        place,
        tar_of(entry("null", tarfile.CHRTYPE), entry("sda", tarfile.BLKTYPE), entry("p", tarfile.FIFOTYPE)),
    )
    assert [path.name for path in place.iterdir()] == ["p"]
    assert stat.S_ISFIFO((place / "p").lstat().st_mode)


def test_only_attributes_of_users_are_kept(place: Path) -> None:
    names = ("user.kept", "user.overlay.opaque", "user.overlay.redirect", "security.capability", "trusted.x")
    unpack(place, tar_of(entry("d", FOLDER), pax={f"SCHILY.xattr.{name}": "y" for name in names}))
    assert os.listxattr(place / "d") == ["user.kept"]


def test_links_among_parents_are_followed_inside(place: Path) -> None:
    unpack(place, tar_of(entry("usr/lib", FOLDER), entry("lib", LINK, "/usr/lib"), entry("lib/a", FILE, "x")))
    assert (place / "usr" / "lib" / "a").read_text() == "x"


OUTSIDE = "outside"


@pytest.mark.parametrize(
    "entries",
    [
        [entry(f"../{OUTSIDE}/new")],
        [entry("..", FOLDER)],
        [entry("d/../..", FOLDER)],
        [entry(f"d/../../{OUTSIDE}/new")],
        [entry("l", LINK, f"../{OUTSIDE}"), entry("l/new")],
        [entry("l", LINK, "{outside}"), entry("l/new")],
        [entry("l", LINK, "{outside}"), entry("l", FOLDER)],
        [entry("d", FOLDER), entry("d/l", LINK, f"../../{OUTSIDE}"), entry("d/l/.wh.victim")],
        [entry("l", LINK, "{outside}"), entry("l/.wh..wh..opq")],
        [entry("l", LINK, "{outside}/victim"), entry("l", FILE, "changed")],
        [entry("l", LINK, "{outside}"), entry("hard", HARD, "l/victim"), entry("hard", FILE, "changed")],
        [entry("hard", HARD, f"../{OUTSIDE}/victim"), entry("hard", FILE, "changed")],
        [entry("{outside}/victim", FILE, "changed")],
        [entry(f".wh.../{OUTSIDE}/victim")],
        [entry(".wh...")],
        [entry(".wh.")],
        # Times of directories are set last, when a link may have taken the place of a parent.
        [entry("d/sub", FOLDER), entry("d", LINK, "{outside}")],
        [entry("d/sub", FOLDER), entry("d", FILE), entry("d", LINK, "{outside}")],
        [entry("a", LINK, "b"), entry("b", LINK, "a"), entry("a/x")],
        [entry("a\0b"), entry("l", LINK, "x" * 5000)],
    ],
)  # fmt: skip
def test_no_entry_changes_files_outside(place: Path, entries: list[Entry]) -> None:
    outside = place.parent / OUTSIDE
    (outside / "sub").mkdir(parents=True)
    (outside / "victim").write_text("unchanged")
    os.utime(outside / "sub", (5, 5))
    os.utime(outside, (5, 5))
    os.utime(place.parent, (5, 5))
    made = [
        (name.format(outside=outside), kind, target.format(outside=outside)) for name, kind, target in entries
    ]
    try:
        unpack(place, tar_of(*made))
    except SandboxError as error:
        assert error.message
    assert (outside / "victim").read_text() == "unchanged"
    assert (outside / "victim").stat().st_nlink == 1
    assert [path.stat().st_mtime for path in (outside, outside / "sub", place.parent)] == [5, 5, 5]
    assert os.listxattr(outside) == []


@pytest.mark.parametrize(
    ("limits", "says"),
    [
        (UnpackLimits(unpacked_bytes=100_000), "more than 100000 bytes"),
        (UnpackLimits(ratio=10, ratio_from=10_000), "10 times its size"),
    ],
)
@pytest.mark.parametrize("compress", [gzip.compress, zstd.compress], ids=["gzip", "zstd"])
def test_a_bomb(place: Path, limits: UnpackLimits, says: str, compress: Callable[[bytes], bytes]) -> None:
    with pytest.raises(LayerRefused, match=says):
        unpack(place, compress(tar_of(entry("zeros", FILE, "\0" * 4_000_000))), limits)
    assert sum(path.stat().st_size for path in place.rglob("*")) <= 2 << 20


def test_a_bomb_after_the_end_of_the_tar(place: Path) -> None:
    with pytest.raises(LayerRefused, match="more than"):
        unpack(
            place, gzip.compress(tar_of(entry("a")) + b"\0" * 4_000_000), UnpackLimits(unpacked_bytes=100_000)
        )


def test_a_sparse_file_counts_with_its_apparent_size(place: Path, tmp_path: Path) -> None:
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    subprocess.run(["tar", "-C", tmp_path, "-cSf", tmp_path / "l.tar", "sparse"], check=True)
    with pytest.raises(LayerRefused, match="files have more than"):
        unpack(place, (tmp_path / "l.tar").read_bytes())


def test_entries_and_names_have_bounds(place: Path) -> None:
    with pytest.raises(LayerRefused, match="more than 3 entries"):
        unpack(place, tar_of(*(entry(f"f{number}") for number in range(4))), UnpackLimits(entries=3))
    with pytest.raises(LayerRefused, match="name that is too long"):
        unpack(place, tar_of(entry("/".join("d" * 2000))))


@pytest.mark.parametrize("kind", [b"x", b"g", b"L"])
@pytest.mark.parametrize("size", [5_000_000, 512])
def test_headers_have_a_bound(place: Path, kind: bytes, size: int) -> None:
    """tarfile keeps an entry's headers in memory: one large header, or many small ones."""
    header = tarfile.TarInfo("h")
    header.type, header.size = kind, size
    record = b"%d comment=" % size
    whole = header.tobuf() + record + b"x" * (size - len(record) - 1) + b"\n" + b"\0" * (-size % 512)
    with pytest.raises(LayerRefused, match=r"headers that are too long|damaged"):
        unpack(place, whole * (10_000_000 // size))


def test_the_map_of_a_sparse_file_has_a_bound(place: Path) -> None:
    header = bytearray(tarfile.TarInfo("s").tobuf(tarfile.GNU_FORMAT))
    header[156:157] = tarfile.GNUTYPE_SPARSE
    header[482] = 1  # another block follows
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    with pytest.raises(LayerRefused, match="headers that are too long"):
        unpack(place, bytes(header) + (b"\0" * 504 + b"\1" + b"\0" * 7) * 20_000)


@pytest.mark.parametrize("compress", [bytes, gzip.compress, zstd.compress], ids=["plain", "gzip", "zstd"])
def test_a_layer_that_is_cut_off(place: Path, compress: Callable[[bytes], bytes]) -> None:
    whole = tar_of(entry("f", FILE, os.urandom(100_000).hex()))
    with pytest.raises(LayerRefused):
        unpack(place, compress(whole)[:60_000])


@given(noise=st.binary(max_size=4096), at=st.integers(0, 4096))
def test_damage_is_an_error_of_its_kind(noise: bytes, at: int) -> None:
    links = (entry("l", LINK, "d"), entry("h", HARD, "d/f"))
    whole = tar_of(entry("d", FOLDER), entry("d/f", FILE, "text"), *links)
    with tempfile.TemporaryDirectory() as place, contextlib.suppress(SandboxError):
        unpack(Path(place), whole[:at] + noise + whole[at + len(noise) :])
