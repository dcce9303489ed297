"""Copies of files into layers on the host: destinations, links, replaced files, hostile sources."""

import os
import stat
from collections.abc import Mapping
from pathlib import Path

import pytest

from prorl_envs.errors import InputError
from prorl_envs.images.dockerfile.copy_files import (
    CopyLimits,
    CopyRequest,
    FileCopier,
    LayerWriter,
    SourceTree,
    change_mode,
    is_unchanged,
)
from prorl_envs.images.dockerfile.ignore import IgnoreRules
from prorl_envs.sandbox.filesystem.layered import LayerTree, is_opaque

type Files = Mapping[str, str | None]


def write(root: Path, files: Files) -> Path:
    """Write files; a name that ends in `/` is a directory, and `-> x` as content is a link."""
    root.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            path.mkdir(exist_ok=True)
        elif content.startswith("-> "):
            path.symlink_to(content[3:])
        else:
            path.write_text(content)
    return root


def read(*layers: Path) -> dict[str, str]:
    """Return the files and links of a merged tree by path."""
    found = {}
    source = SourceTree(layers)
    for entry in source.walk("", CopyLimits(), IgnoreRules(())):
        if entry.host.is_symlink():
            found[entry.path] = f"-> {entry.host.readlink()}"
        elif entry.host.is_file():
            found[entry.path] = entry.host.read_text()
    return found


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


class Copying:
    """Context `context`, image layer `below` and new layer `new`."""

    def __init__(self, root: Path) -> None:
        self.context = write(root / "context", {})
        self.below = write(root / "below", {})
        self.new = write(root / "new", {})
        self.rules: tuple[str, ...] = ()

    def copy(self, *sources: str, to: str, **options: object) -> dict[str, str]:
        request = CopyRequest(sources=sources, destination=to, **options)  # type: ignore[arg-type]
        source = SourceTree([self.context], rules=IgnoreRules(self.rules))
        FileCopier(source, request).copy(LayerWriter([self.below], self.new))
        return read(self.below, self.new)


@pytest.fixture
def copying(tmp_path: Path) -> Copying:
    return Copying(tmp_path)


@pytest.mark.parametrize(
    ("sources", "to", "found"),
    [
        (["a"], "/x", {"x": "1"}),
        (["a"], "/x/", {"x/a": "1"}),
        (["a"], "/there", {"there/a": "1"}),
        (["d"], "/x", {"x/b": "2", "x/e/c": "3"}),
        (["d/"], "/x/", {"x/b": "2", "x/e/c": "3"}),
        (["."], "/", {"a": "1", "d/b": "2", "d/e/c": "3"}),
        (["a", "d/b"], "/x/", {"x/a": "1", "x/b": "2"}),
        (["d/*"], "/x/", {"x/b": "2", "x/c": "3"}),
        (["?"], "/x/", {"x/a": "1", "x/b": "2", "x/e/c": "3"}),
        (["*/e/c"], "/x", {"x": "3"}),
        (["/a"], "/deep/er/x", {"deep/er/x": "1"}),
        (["a", "none*"], "/x/", {"x/a": "1"}),
        (["none*"], "/x/", {}),
        (["none*"], "/x", {}),
        (["d/*.md", "d/[x-z]", "*/none", "d/b/*", "none?/*/a"], "/x/", {}),
        (["[[]a", "**/c"], "/x/", {}),
        (["**/b"], "/x/", {"x/b": "2"}),
    ],
)
def test_destinations(copying: Copying, sources: list[str], to: str, found: dict[str, str]) -> None:
    write(copying.context, {"a": "1", "d/b": "2", "d/e/c": "3"})
    write(copying.below, {"there": None})
    assert copying.copy(*sources, to=to) == found


@pytest.mark.parametrize("name", ["none", "d/none", "none/*", "none/a", r"none\*", r"\*a", r"a\[b]"])
def test_a_name_that_is_missing_is_an_error(copying: Copying, name: str) -> None:
    write(copying.context, {"a": "1", "d/b": "2"})
    with pytest.raises(InputError, match="not in the build context"):
        copying.copy("a", name, to="/x/")


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("d/e/c", {"x/d/e/c"}),
        ("**/c", {"x/c", "x/d/e/c"}),
        ("d/**/c", {"x/d/e/c"}),
        ("d/**/*", {"x/d/e/c", "x/d/b"}),
        ("**", {"x/c", "x/d/e/c", "x/d/b"}),
        ("**/none", set()),
        ("./d/./e/c", {"x/e/c"}),
        ("d/./**/c", {"x/e/c"}),
        ("*/./e", {"x/e/c"}),
    ],
)
def test_parents_are_kept_on_request(copying: Copying, source: str, found: set[str]) -> None:
    write(copying.context, {"c": "1", "d/b": "2", "d/e/c": "3"})
    assert copying.copy(source, to="/x/", keeps_parents=True).keys() == found


# Modes that chmod of coreutils 9.1 makes, except in the last two rows, which follow POSIX and BuildKit.
@pytest.mark.parametrize(
    ("change", "file", "program", "folder"),
    [
        ("u=rwX,go=rX", 0o644, 0o755, 0o755),
        ("+x", 0o751, 0o751, 0o751),
        ("a+rw,o-w", 0o664, 0o775, 0o774),
        ("g=u", 0o660, 0o771, 0o770),
        ("o=u-w", 0o644, 0o755, 0o755),
        ("go=", 0o600, 0o700, 0o700),
        ("=r,u+w", 0o644, 0o644, 0o644),
        ("u+r-w", 0o440, 0o551, 0o550),
        ("u=g,g=o", 0o400, 0o511, 0o500),
        ("g-u,-X", 0o600, 0o600, 0o600),
        ("=", 0, 0, 0),
        ("+t", 0o1640, 0o1751, 0o1750),
        ("7", 0o7, 0o7, 0o7),
        ("07755", 0o7755, 0o7755, 0o7755),
        ("", 0o640, 0o751, 0o750),
        ("u+x,g+X", 0o740, 0o751, 0o750),
        ("-x,+X", 0o640, 0o751, 0o751),
    ],
)
def test_changes_of_modes(change: str, file: int, program: int, folder: int) -> None:
    before = (0o100640, 0o100751, 0o040750)
    assert [stat.S_IMODE(change_mode(change, mode)) for mode in before] == [file, program, folder]


def test_ignored_and_excluded_files_are_left_out(copying: Copying) -> None:
    write(copying.context, {"a.md": "1", "d/b.md": "2", "d/keep.md": "3", "d/x": "4", "d/y": "5"})
    copying.rules = ("**/*.md", "!d/keep.md")
    assert copying.copy(".", to="/x/", excluded=["d/y"]) == {"x/d/keep.md": "3", "x/d/x": "4"}
    with pytest.raises(InputError, match="not in the build context"):
        copying.copy("a.md", to="/x/")


def test_directories_of_the_image_keep_their_modes(copying: Copying) -> None:
    write(copying.context, {"d/a": "1"})
    write(copying.below, {"t": None})
    (copying.below / "t").chmod(0o1777)
    copying.copy("d", to="/t")
    assert (copying.new / "t").stat().st_mode & 0o7777 == 0o1777


def test_modes_are_kept_or_given(copying: Copying) -> None:
    write(copying.context, {"a": "1"})
    (copying.context / "a").chmod(0o4755)
    copying.copy("a", to="/kept")
    copying.copy("a", to="/given", mode="0640")
    copying.copy("a", to="/changed", mode="go=u-w")
    modes = [(copying.new / name).stat().st_mode & 0o7777 for name in ("kept", "given", "changed")]
    assert modes == [0o755, 0o640, 0o755]


def test_a_file_replaces_a_directory_and_a_directory_a_file(copying: Copying) -> None:
    write(copying.context, {"one/x": "file", "one/y/new": "1"})
    write(copying.below, {"x/old": "0", "y": "0"})
    assert copying.copy("one", to="/") == {"x": "file", "y/new": "1"}


def test_a_directory_that_replaces_a_new_file_hides_the_lower_directory(copying: Copying) -> None:
    write(copying.context, {"one/x": "file", "two/x/new": "1"})
    write(copying.below, {"x/old": "0"})
    assert copying.copy("one", "two", to="/") == {"x/new": "1"}
    assert is_opaque(copying.new / "x")


def test_links_of_the_image_lead_to_places_in_the_image(copying: Copying, tmp_path: Path) -> None:
    outside = write(tmp_path / "outside", {"kept": "0"})
    write(copying.context, {"a": "1"})
    write(copying.below, {"bin": "-> usr/bin", "usr/bin": None, "out": f"-> {outside}", "up": "-> ../../.."})
    copying.copy("a", to="/bin/")
    copying.copy("a", to="/out/")
    found = copying.copy("a", to="/up/b")
    inside = str(outside)[1:]
    assert {name: found[name] for name in ("usr/bin/a", f"{inside}/a", "b")} == {
        "usr/bin/a": "1",
        f"{inside}/a": "1",
        "b": "1",
    }
    assert names(outside) == ["kept"]


def test_a_link_that_was_copied_is_not_followed_by_the_host(copying: Copying, tmp_path: Path) -> None:
    outside = write(tmp_path / "outside", {})
    write(copying.context, {"one/x": f"-> {outside}", "two/x/evil": "1"})
    copying.copy("one", "two", to="/")
    assert names(outside) == []


def test_links_of_the_context_stay_within_it(copying: Copying, tmp_path: Path) -> None:
    secret = write(tmp_path / "outside", {"secret": "s"})
    write(copying.context, {"d/out": f"-> {secret}", "f": f"-> {secret}/secret", "ok": "-> d/b", "d/b": "2"})
    assert copying.copy("d", to="/") == {"out": f"-> {secret}", "b": "2"}
    assert copying.copy("ok", to="/named")["named"] == "2"
    for name in ("f", "d/out/secret", "d/out/*"):
        with pytest.raises(InputError, match="not in the build context"):
            copying.copy(name, to="/y")


@pytest.mark.parametrize("name", ["../outside/secret", "d/../../outside/secret", "/../outside/secret"])
def test_names_that_lead_out_are_refused(copying: Copying, tmp_path: Path, name: str) -> None:
    write(tmp_path / "outside", {"secret": "s"})
    with pytest.raises(InputError, match="leads out"):
        copying.copy(name, to="/y")


def test_special_files_are_left_out(copying: Copying) -> None:
    write(copying.context, {"d/a": "1"})
    os.mkfifo(copying.context / "d" / "pipe")
    assert copying.copy("d", to="/") == {"a": "1"}


def test_the_size_and_the_number_of_files_are_bounded(copying: Copying) -> None:
    write(copying.context, {"d/a": "1" * 100, "d/b": "2" * 100})
    source = SourceTree([copying.context])
    request = CopyRequest(sources=["d"], destination="/")
    writer = LayerWriter([copying.below], copying.new)
    with pytest.raises(InputError, match="more than 150 bytes"):
        FileCopier(source, request, CopyLimits(size_bytes=150)).copy(writer)
    with pytest.raises(InputError, match="more than 2 files"):
        FileCopier(source, request, CopyLimits(entries=2)).digest()


def test_a_file_cannot_have_files_below_it(copying: Copying) -> None:
    write(copying.context, {"a": "1"})
    write(copying.below, {"x": "0"})
    with pytest.raises(InputError, match="is a file"):
        copying.copy("a", to="/x/a")


def test_the_digest_depends_on_names_modes_and_contents(copying: Copying) -> None:
    write(copying.context, {"d/a": "1", "d/l": "-> a"})

    def digest() -> str:
        request = CopyRequest(sources=["d"], destination="/")
        return FileCopier(SourceTree([copying.context]), request).digest()

    seen = [digest()]
    os.utime(copying.context / "d" / "a", (0, 0))
    assert digest() == seen[0]
    (copying.context / "d" / "a").chmod(0o755)
    seen.append(digest())
    (copying.context / "d" / "a").write_text("2")
    seen.append(digest())
    (copying.context / "d" / "a").rename(copying.context / "d" / "b")
    seen.append(digest())
    (copying.context / "d" / "l").unlink()
    seen.append(digest())
    assert len(set(seen)) == len(seen)


def test_merged_layers_are_read_as_an_overlay_shows_them(tmp_path: Path) -> None:
    one = write(tmp_path / "one", {"d/a": "1", "d/gone": "1", "e/old": "1", "f": "1"})
    two = write(tmp_path / "two", {"d/b": "2", "e/new": "2", "f/g": "2"})
    os.mknod(two / "d" / "gone", 0o20000, 0)
    os.setxattr(two / "e", "user.overlay.opaque", b"y")
    assert read(one, two) == {"d/a": "1", "d/b": "2", "e/new": "2", "f/g": "2"}
    assert LayerTree([one, two]).find("/d/gone") is None


def test_a_layer_of_unchanged_directories_changes_nothing(tmp_path: Path) -> None:
    below = write(tmp_path / "below", {"d/a": "1"})
    same = write(tmp_path / "same", {"d": None})
    assert is_unchanged(same, [below])
    assert not is_unchanged(write(tmp_path / "more", {"d/b": "2"}), [below])
    assert not is_unchanged(write(tmp_path / "new", {"e": None}), [below])
    (same / "d").chmod(0o700)
    assert not is_unchanged(same, [below])
