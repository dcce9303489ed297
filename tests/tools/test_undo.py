import pytest

from prorl_envs.tools.undo import UndoHistory


def test_versions_come_back_newest_first() -> None:
    history = UndoHistory()
    history.push("/a", None)
    history.push("/a", b"1")
    assert history.pop("/a") == b"1"
    assert history.pop("/a") is None
    assert not history.has("/a")
    with pytest.raises(KeyError):
        history.pop("/a")


def test_only_so_many_versions_of_a_file_are_kept() -> None:
    history = UndoHistory(versions_limit=2)
    for version in (b"1", b"2", b"3"):
        history.push("/a", version)
    assert [history.pop("/a"), history.pop("/a")] == [b"3", b"2"]
    assert not history.has("/a")


def test_the_file_edited_longest_ago_is_forgotten_first() -> None:
    history = UndoHistory(bytes_limit=10)
    history.push("/old", b"12345")
    history.push("/new", b"1234567")
    assert not history.has("/old")
    assert history.pop("/new") == b"1234567"


def test_only_so_many_files_are_remembered() -> None:
    history = UndoHistory(files_limit=2)
    for path in ("/a", "/b", "/c"):
        history.push(path, None)
    assert [history.has(path) for path in ("/a", "/b", "/c")] == [False, True, True]


def test_a_version_larger_than_everything_is_not_kept() -> None:
    history = UndoHistory(bytes_limit=3)
    history.push("/a", b"12345")
    assert not history.has("/a")
