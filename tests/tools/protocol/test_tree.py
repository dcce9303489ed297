"""Untrusted archives, without a sandbox."""

import contextlib
import io
import os
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prorl_envs.errors import TransferRefused
from prorl_envs.tools.protocol.tree import Transferred, TreeLimits, pack, stays_inside
from prorl_envs.tools.protocol.unpack import unpack

LIMITS = TreeLimits(bytes=100_000, entries=50, depth=8)


class Pipe:
    """Return the output of `pack`."""

    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, data: bytes) -> int:
        self.data += data
        return len(data)


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Path]:
    """Directory for unpacked archives. A test fails if its archive changes anything outside."""
    (tmp_path / "canary").write_text("alive")
    (tmp_path / "in").mkdir()
    yield tmp_path / "in"
    assert (tmp_path / "canary").read_text() == "alive"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["canary", "in"]


def packed(
    source: Path, *, skip_unsupported: bool = False, limits: TreeLimits = LIMITS
) -> tuple[bytes, Transferred]:
    pipe = Pipe()
    done = pack(str(source), pipe, limits, skip_unsupported=skip_unsupported)
    return bytes(pipe.data), done


def unpacked(archive: bytes, here: Path, *, merge: bool = False, limits: TreeLimits = LIMITS) -> Transferred:
    folder = os.open(here, os.O_RDONLY)
    try:
        return unpack(io.BytesIO(archive), folder, "out", limits, merge=merge)
    finally:
        os.close(folder)


def member(
    name: str, kind: bytes = tarfile.REGTYPE, content: bytes = b"", **fields: object
) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, len(content)
    for field, value in fields.items():
        setattr(info, field, value)
    return info


def archive(*members: tarfile.TarInfo, content: bytes = b"", form: int = tarfile.GNU_FORMAT) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=form, errors="surrogateescape") as tar:
        for info in members:
            tar.addfile(info, io.BytesIO(content) if info.isreg() else None)
    return stream.getvalue()


TOP = member("top", tarfile.DIRTYPE, mode=0o755)


def link(name: str, target: str) -> tarfile.TarInfo:
    return member(name, tarfile.SYMTYPE, linkname=target)


def header(change: Callable[[bytearray], None], kind: bytes = tarfile.REGTYPE) -> bytes:
    """Make an archive of the top and one file, with a changed header and a corrected checksum."""
    data = bytearray(archive(TOP, member("top/f", kind)))
    block = data[512:1024]
    change(block)
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    data[512:1024] = block
    return bytes(data)


def set_size(size: bytes) -> Callable[[bytearray], None]:
    def change(block: bytearray) -> None:
        block[124:136] = size

    return change


HOSTILE = {
    "absolute path": archive(TOP, member("/etc/x")),
    "other top": archive(member("other", tarfile.DIRTYPE)),
    "up": archive(TOP, member("top/../../canary")),
    "up at the end": archive(TOP, member("top/..", tarfile.DIRTYPE)),
    "dot": archive(TOP, member("top/./x")),
    "empty part": archive(TOP, member("top//x")),
    "no directory": archive(member("top/a/b")),
    "below a file": archive(TOP, member("top/a"), member("top/a/b")),
    "twice": archive(TOP, member("top/a"), member("top/a")),
    "top twice": archive(TOP, TOP),
    "absolute link": archive(TOP, link("top/l", "/etc/passwd")),
    "link out": archive(TOP, link("top/l", "../canary")),
    "link out by way of a link": archive(
        TOP,
        member("top/a", tarfile.DIRTYPE),
        member("top/a/b", tarfile.DIRTYPE),
        link("top/a/b/up", "../.."),
        link("top/l", "a/b/up/../../canary"),
    ),
    "empty link": archive(TOP, link("top/l", "")),
    "write through a link": archive(TOP, link("top/l", "."), member("top/l/canary")),
    "directory over a link": archive(
        TOP, link("top/l", "."), member("top/l", tarfile.DIRTYPE), member("top/l/x")
    ),
    "hard link": archive(TOP, member("top/h", tarfile.LNKTYPE, linkname="../canary")),
    "device": archive(TOP, member("top/d", tarfile.CHRTYPE, devmajor=1, devminor=3)),
    "pipe": archive(TOP, member("top/p", tarfile.FIFOTYPE)),
    "contiguous": archive(TOP, member("top/p", tarfile.CONTTYPE)),
    "sparse": header(lambda block: None, tarfile.GNUTYPE_SPARSE),
    "setuid": archive(TOP, member("top/s", mode=0o4755)),
    "sticky": archive(TOP, member("top/s", mode=0o1777)),
    "not utf-8": archive(TOP, member("top/\udcff")),
    "link not utf-8": archive(TOP, link("top/l", "\udcff")),
    "extended header": archive(TOP, member("top/" + "é" * 120), form=tarfile.PAX_FORMAT),
    "endless size": header(set_size(b"\x80" + b"\x00" * 3 + b"\x7f" * 8)),
    "negative size": header(set_size(b"\xff" * 12)),
    "endless name": header(set_size(b"%011o\0" % (1 << 30)), tarfile.GNUTYPE_LONGNAME),
    "too deep": archive(*(member("/".join(["top"] * n), tarfile.DIRTYPE) for n in range(1, 12))),
    "too many": archive(TOP, *(member(f"top/{n}") for n in range(60))),
    "too large": archive(TOP, member("top/f", content=b"x" * 100_001), content=b"x" * 100_001),
    "too large together": archive(
        TOP, *(member(f"top/{n}", content=b"x" * 60_000) for n in range(2)), content=b"x" * 60_000
    ),
    "truncated": archive(TOP, member("top/f", content=b"x" * 5000), content=b"x" * 5000)[:3000],
    "nothing": b"",
    "noise": b"\xa5" * 10_000,
    "long names without end": b"".join(
        [header(lambda block: None, tarfile.GNUTYPE_LONGNAME)[512:1024]] * 5000
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_archive_is_refused_and_changes_nothing_outside(here: Path, name: str) -> None:
    with pytest.raises(TransferRefused):
        unpacked(HOSTILE[name], here)


def test_headers_that_tarfile_cannot_check_are_refused(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("prorl_envs.tools.protocol.unpack._Header._proc_member")
    with pytest.raises(TransferRefused, match="does not let headers be checked"):
        unpacked(archive(TOP), here)
    assert not (here / "out").exists()


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_archive_is_not_merged_into_an_existing_tree(here: Path, name: str) -> None:
    (here / "out").mkdir()
    (here / "out" / "l").symlink_to("..")
    with pytest.raises((TransferRefused, OSError)):
        unpacked(HOSTILE[name], here, merge=True)


VALID = archive(
    TOP,
    member("top/a", tarfile.DIRTYPE, mode=0o750),
    member("top/a/f", content=b"x" * 700),
    link("top/a/l", "../g"),
    member("top/g"),
    content=b"x" * 700,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
@given(st.lists(st.tuples(st.integers(0, len(VALID) - 1), st.integers(0, 255)), max_size=6), st.booleans())
def test_an_archive_with_flipped_bytes_is_unpacked_or_refused(
    tmp_path_factory: pytest.TempPathFactory, flips: list[tuple[int, int]], repair: bool
) -> None:
    data = bytearray(VALID)
    for place, value in flips:
        data[place] = value
    if repair:
        for start in range(0, 512 * 4, 512):
            block = data[start : start + 512]
            block[148:156] = b" " * 8
            data[start + 148 : start + 156] = b"%06o\0 " % sum(block)
    base = tmp_path_factory.mktemp("flip")
    (base / "in").mkdir()
    with contextlib.suppress(TransferRefused, OSError):
        unpacked(bytes(data), base / "in")
    assert [path.name for path in base.iterdir()] == ["in"]
    root = (base / "in").resolve()
    for path in root.rglob("*"):
        assert path.parent.resolve().is_relative_to(root)
        if path.is_symlink():
            assert Path(os.path.normpath(path.parent / path.readlink())).is_relative_to(root)


NAMES = st.sampled_from(["a", "b", "..", ".", "l"])


@given(st.lists(NAMES, max_size=3), st.lists(NAMES, min_size=1, max_size=4))
def test_a_link_that_stays_inside_resolves_inside(place: list[str], target: list[str]) -> None:
    """The names in the link may be links; `..` is allowed only after real directories."""
    inside = stays_inside(("top", *place, "link"), "/".join(target))
    climbs = next((n for n, part in enumerate(target) if part != ".."), len(target))
    assert inside == (".." not in target[climbs:] and climbs <= len(place))


def test_a_tree_is_unchanged_after_a_round_trip(here: Path, tmp_path: Path) -> None:
    source = here / "source"
    (source / "sub" / ("d" * 200)).mkdir(parents=True)
    (source / "sub" / "empty").mkdir(mode=0o500)
    (source / "run.sh").write_bytes(b"#!/bin/sh\n")
    (source / "run.sh").chmod(0o755)
    (source / "sub" / ("d" * 200) / "é ü.txt").write_bytes(bytes(range(256)) * 30)
    (source / "sub" / "link").symlink_to("../run.sh")
    (source / "dangling").symlink_to("nowhere/at/all")
    os.link(source / "run.sh", source / "hard")
    os.utime(source / "run.sh", (1_000_000, 1_000_000))
    os.utime(source / "sub", (2_000_000, 2_000_000))
    data, sent = packed(source)
    got = unpacked(data, here)
    assert got == sent == Transferred(9, 7700)
    out = here / "out"
    assert listing(out) == listing(source)
    assert (out / "run.sh").stat().st_mtime == 1_000_000
    assert (out / "sub").stat().st_mtime == 2_000_000
    assert (out / "hard").stat().st_nlink == 1


def listing(root: Path) -> list[tuple[str, int, bytes | str]]:
    found: list[tuple[str, int, bytes | str]] = []
    for path in sorted(root.rglob("*")):
        what: bytes | str = ""
        if path.is_symlink():
            what = str(path.readlink())
        elif path.is_file():
            what = path.read_bytes()
        mode = path.lstat().st_mode | (0o700 if path.is_dir() else 0)
        found.append((str(path.relative_to(root)), mode, what))
    return found


def test_names_without_a_file_are_bounded(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The receiver stores them: a hundred thousand of the longest took 700 MB."""
    monkeypatch.setattr("prorl_envs.tools.protocol.unpack.NAMES_LIMIT", 2000)
    names = [member("top/" + "x" * 200 + str(number)) for number in range(11)]
    with pytest.raises(TransferRefused, match="longer than 2000 bytes in all"):
        unpacked(archive(TOP, *names), here)


def test_a_single_file_is_packed(here: Path) -> None:
    (here / "f").write_bytes(b"data")
    data, _ = packed(here / "f")
    assert unpacked(data, here) == Transferred(1, 4)
    assert (here / "out").read_bytes() == b"data"


def test_a_merge_replaces_files_and_links_and_keeps_the_rest(here: Path) -> None:
    out = here / "out"
    (out / "a").mkdir(parents=True)
    (out / "a" / "other").write_text("stays")
    (out / "a" / "f").symlink_to("../../../canary")
    unpacked(VALID, here, merge=True)
    assert (out / "a" / "other").read_text() == "stays"
    assert not (out / "a" / "f").is_symlink()
    assert (out / "a" / "f").read_bytes() == b"x" * 700


def test_a_merge_does_not_follow_links(here: Path) -> None:
    (here / "out").mkdir()
    (here / "elsewhere").mkdir()
    (here / "out" / "a").symlink_to("../elsewhere")
    with pytest.raises(OSError):
        unpacked(VALID, here, merge=True)
    assert not list((here / "elsewhere").iterdir())


def special(root: Path) -> None:
    root.mkdir()
    (root / "good").write_text("x")
    os.mkfifo(root / "pipe")
    (root / "out").symlink_to("/etc/passwd")
    (root / "up").symlink_to("../..")
    Path(os.fsdecode(os.fsencode(root) + b"/bad\xff")).mkdir()


def test_unsupported_files_are_refused_or_named(here: Path) -> None:
    special(here / "source")
    with pytest.raises(TransferRefused):
        packed(here / "source")
    data, done = packed(here / "source", skip_unsupported=True)
    assert done.entries == 2
    assert done.left_out == [
        "bad? has a name that is not UTF-8",
        "out is a link that leads out of the tree",
        "pipe is a device, pipe or socket",
        "up is a link that leads out of the tree",
    ]
    unpacked(data, here)
    assert [path.name for path in (here / "out").iterdir()] == ["good"]


def test_set_id_and_sticky_bits_are_dropped(here: Path) -> None:
    (here / "source").mkdir()
    (here / "source" / "f").touch()
    (here / "source" / "f").chmod(0o6755)
    (here / "source").chmod(0o1777)
    unpacked(packed(here / "source")[0], here)
    assert (here / "out" / "f").stat().st_mode & 0o7777 == 0o755
    assert (here / "out").stat().st_mode & 0o7777 == 0o777


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        (TreeLimits(entries=3), "more than 3 entries"),
        (TreeLimits(bytes=10), "more than 10 bytes"),
        (TreeLimits(depth=2), "too deep"),
    ],
)
def test_too_much_data_is_refused_before_it_is_read(here: Path, limits: TreeLimits, said: str) -> None:
    (here / "source" / "a" / "b").mkdir(parents=True)
    with (here / "source" / "big").open("wb") as file:
        file.truncate(1 << 40)  # sparse: takes no room, and would take for ever
    (here / "source" / "c").touch()
    with pytest.raises(TransferRefused, match=said):
        packed(here / "source", limits=limits)


def test_files_that_report_no_size_are_refused() -> None:
    with pytest.raises(TransferRefused, match="does not say its size"):
        packed(Path("/proc/self/status"))
