import pytest

from prorl_envs.tools.server.files import undo
from prorl_envs.tools.server.files.undo import UndoHistory, Version


def test_versions_are_restored_newest_first() -> None:
    history = UndoHistory()
    history.push("/a", None, b"1")
    history.push("/a", Version(b"1"), b"2")
    assert history.is_newer("/a", b"1") and not history.is_newer("/a", b"2")
    assert history.pop("/a") == Version(b"1")
    assert history.pop("/a") is None
    assert not history.has("/a")
    with pytest.raises(KeyError):
        history.pop("/a")


def test_the_number_of_versions_of_a_file_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(undo, "VERSIONS_LIMIT", 2)
    history = UndoHistory()
    for data in (b"1", b"2", b"3"):
        history.push("/a", Version(data), None)
    assert [history.pop("/a"), history.pop("/a")] == [Version(b"3"), Version(b"2")]
    assert not history.has("/a")


def test_the_file_edited_longest_ago_is_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(undo, "BYTES_LIMIT", 10)
    history = UndoHistory()
    history.push("/old", Version(b"12345"), b"")
    history.push("/new", Version(b"1234567"), b"")
    assert not history.has("/old")
    assert history.pop("/new") == Version(b"1234567")


def test_the_number_of_files_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(undo, "FILES_LIMIT", 2)
    history = UndoHistory()
    for path in ("/a", "/b", "/c"):
        history.push(path, None, b"")
    assert [history.has(path) for path in ("/a", "/b", "/c")] == [False, True, True]


def test_a_version_larger_than_the_limit_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(undo, "BYTES_LIMIT", 3)
    history = UndoHistory()
    history.push("/a", Version(b"12345"), b"")
    assert not history.has("/a")
