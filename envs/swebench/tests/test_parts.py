"""The parts of building and grading that need neither network nor sandbox."""

import importlib.util
import io
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from prorl_envs.envs.swebench.diffs import changed_paths
from prorl_envs.envs.swebench.interpreters import choose, interpreters, mounts_of
from prorl_envs.envs.swebench.submission import protected
from prorl_envs.envs.swebench.task import SwebenchTask
from prorl_envs.envs.swebench.unpack import unpack_sdist
from prorl_envs.errors import EnvironmentFault

PKG_INFO = b"Metadata-Version: 1.0\nName: Some.Thing\nVersion: 1.2\n\nName: other\n"


def archive(folder: Path, *entries: tuple[str, bytes | str]) -> None:
    """Write a source archive; an entry with a text is a symbolic link to it."""
    with tarfile.open(folder / "some_thing-1.2.tar.gz", "w:gz") as tar:
        for name, content in entries:
            info = tarfile.TarInfo(name)
            if isinstance(content, str):
                info.type, info.linkname = tarfile.SYMTYPE, content
                tar.addfile(info)
            else:
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))


has_pip = pytest.mark.skipif(
    importlib.util.find_spec("ensurepip") is None, reason="this Python has no pip (on Debian: python3-venv)"
)


@has_pip
def test_this_interpreter_is_found() -> None:
    minor = f"{sys.version_info.major}.{sys.version_info.minor}"
    found = interpreters()[minor]
    assert found.executable.is_relative_to(found.prefix)
    assert found.pip.name.startswith("pip-")
    assert choose(["3.0", minor]) is found


@has_pip
def test_unreadable_places_have_no_interpreters(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYENV_ROOT", "UV_PYTHON_INSTALL_DIR", "PATH"):
        monkeypatch.setenv(name, f"/{'x' * 300}")  # longer than a name may be: an error for root, too
    found = interpreters.__wrapped__()
    assert list(found) == [f"{sys.version_info.major}.{sys.version_info.minor}"]


def test_no_interpreter_is_an_error_that_lists_the_existing_ones() -> None:
    with pytest.raises(EnvironmentFault, match=r"no Python 3\.0 or 3\.1, only .*3\.") as caught:
        choose(["3.0", "3.1"])
    assert "install" in caught.value.hint


def test_a_system_interpreter_needs_no_mount() -> None:
    assert mounts_of(Path("/usr")) == ()
    (mount,) = mounts_of(Path("/opt/python"))
    assert (mount.source, mount.target, mount.writable) == (Path("/opt/python"), "/opt/python", False)


def test_a_release_is_unpacked(tmp_path: Path) -> None:
    archive(tmp_path, ("some_thing-1.2/PKG-INFO", PKG_INFO), ("some_thing-1.2/a/b.py", b"x = 1\n"))
    unpack_sdist(tmp_path, "some-thing==1.2", tmp_path / "tree")
    assert (tmp_path / "tree/a/b.py").read_text() == "x = 1\n"


@pytest.mark.parametrize(
    ("entries", "why"),
    [
        ([("some_thing-1.2/PKG-INFO", PKG_INFO.replace(b"1.2", b"1.3"))], "got Some.Thing==1.3"),
        ([("some_thing-1.2/PKG-INFO", PKG_INFO.replace(b"Some", b"No"))], "got No.Thing"),
        ([("some_thing-1.2/setup.py", b"")], "got None"),
        ([("a/PKG-INFO", PKG_INFO), ("b/PKG-INFO", PKG_INFO)], "one directory"),
        ([("../outside", b"x")], "cannot be unpacked"),
        ([("/tmp/outside", b"x"), ("../x", b"x")], "cannot be unpacked"),
        ([("top/link", "/etc/passwd")], "cannot be unpacked"),
        ([("top/PKG-INFO", "../../secret")], "cannot be unpacked"),
    ],
)
def test_another_or_a_hostile_archive_is_refused(
    tmp_path: Path, entries: list[tuple[str, bytes | str]], why: str
) -> None:
    archive(tmp_path, *entries)
    with pytest.raises(EnvironmentFault, match=why):
        unpack_sdist(tmp_path, "some-thing==1.2", tmp_path / "tree")
    assert not (tmp_path / "tree").exists()


def test_a_missing_or_broken_archive_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match="no source release"):
        unpack_sdist(tmp_path, "some-thing==1.2", tmp_path / "tree")
    (tmp_path / "some_thing-1.2.tar.gz").write_bytes(b"not a tar")
    with pytest.raises(EnvironmentFault, match="cannot be unpacked"):
        unpack_sdist(tmp_path, "some-thing==1.2", tmp_path / "tree")


def test_tests_and_their_configuration_must_not_be_changed(
    tasks: Mapping[str, SwebenchTask],
) -> None:
    kept = ["requests/utils.py", "requests/new.py", "setup.py", "docs/conf.py", "tests/helper.py", "types.md"]
    kept += [
        "requests/fast.so",
        "requests/subprocess.py",
        "tests/test_utils.md",
        "tests/test_utils_more/x.py",
    ]
    dropped = [
        *("tests/test_utils.py", "conftest.py", "tests/conftest.py", "setup.cfg", "tox.ini", "pytest.ini"),
        *("pip.py", "pip/__main__.py", "pytest.py", "_pytest/x.py", "sitecustomize.py", "subprocess.py"),
        *("x.pth", "pip.pyc", "pip.so", "subprocess.cpython-312-x86_64-linux-gnu.so", "a/__pycache__/b.pyc"),
        *("src/sitecustomize/__init__.py", "sitecustomize.abi3.so", "tests/conftest/__init__.py"),
        *("tests/test_utils/__init__.py", "tests/test_utils.so", "tests/test_utils.cpython-39.so"),
    ]
    assert protected([*kept, *dropped], tasks["psf__requests-6028"]) == dropped


def test_files_named_by_the_test_command_must_not_be_changed(
    tasks: Mapping[str, SwebenchTask],
) -> None:
    task = tasks["psf__requests-6028"]
    script = task.eval_script.replace("pytest -rA", "bin/test -C")
    task = task.model_copy(update={"eval_script": script})
    changed = ["bin/test", "bin/other", "requests/testing/runtests.py", "jest.config.js"]
    assert protected(changed, task) == ["bin/test", "requests/testing/runtests.py", "jest.config.js"]


def test_files_beside_hidden_ones_may_be_changed(tasks: Mapping[str, SwebenchTask]) -> None:
    """A hidden path may be a directory; a path that only starts with the same letters is not in it."""
    task = tasks["psf__requests-6028"].model_copy(update={"hidden_files": ("r2e_tests", "tests/check.py")})
    hidden = ["r2e_tests", "r2e_tests/test_a.py", "tests/check.py"]
    beside = ["r2e_tests_helper.py", "r2e_tests.md", "tests/check.py.txt", "tests/check_more.py"]
    assert protected([*beside, *hidden], task) == hidden


def test_files_changed_by_the_reference_may_be_changed(tasks: Mapping[str, SwebenchTask]) -> None:
    task = tasks["psf__requests-6028"]
    moved = task.patch.replace("requests/utils.py", "setup.cfg")
    task = task.model_copy(update={"patch": moved})
    assert protected(["setup.cfg", "tox.ini"], task) == ["tox.ini"]


def diff_of(old: str, new: str) -> str:
    return f"--- {old}\n+++ {new}\n@@ -1 +1 @@\n-x\n+y\n"


def test_a_diff_names_the_files_of_both_sides() -> None:
    assert changed_paths(diff_of("a/one.py", "b/one.py")) == {"one.py"}
    assert changed_paths(diff_of("a/one.py", "b/two.py")) == {"one.py", "two.py"}
    assert changed_paths("--- /dev/null\n+++ b/new.py\n@@ -0,0 +1 @@\n+y\n") == {"new.py"}


@pytest.mark.parametrize(
    ("quoted", "name"),
    [
        (r"caf\303\251.py", "café.py"),
        (r"a\tb\"c\\d.py", 'a\tb"c\\d.py'),
        (r"\377.py", "\udcff.py"),
        ("a b.py", "a b.py"),
    ],
)
def test_quoted_names_of_git_are_read(quoted: str, name: str) -> None:
    diff = diff_of(f'"a/{quoted}"', f'"b/{quoted}"')
    assert changed_paths(diff) == {name}


@pytest.mark.parametrize(
    ("diff", "said"),
    [
        ("no diff", "touches no file"),
        (diff_of("a/../x", "b/../x"), r"outside the tree: '\.\./x'"),
        (diff_of("a/x", "b/y/../../z"), "outside the tree"),
        (diff_of("/etc/passwd", "/etc/passwd"), "outside the tree: '/etc/passwd'"),
    ],
)
def test_a_diff_that_names_no_file_of_the_tree_is_refused(diff: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        changed_paths(diff)
