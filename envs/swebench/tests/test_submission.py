"""The graded tree has exactly the bytes of the agent's tree, regardless of git's attributes."""

import io
import os
import random
import shutil
import subprocess
import tarfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from prorl_envs.env.node import Node
from prorl_envs.env.sandboxed import sandbox_session
from prorl_envs.envs.swebench.root import BuiltRoot
from prorl_envs.envs.swebench.steps import EXCLUDED, GIT, INIT, SEAL
from prorl_envs.envs.swebench.submission import SUBMISSION, Submission, apply, take
from prorl_envs.envs.swebench.task import SwebenchTask
from prorl_envs.sandbox.base import Mount

pytestmark = pytest.mark.anyio

ATTRIBUTES = (
    *(
        "*.txt text",
        "*.txt text eol=crlf",
        "*.txt eol=lf",
        "*.txt crlf",
        "* text=auto",
        "* text=auto eol=crlf",
    ),
    *("*.txt ident", "* filter=upper", "* -diff", "* diff=python", "*.txt binary", "* whitespace=cr-at-eol"),
    *("*.utf text working-tree-encoding=UTF-16", "*.utf working-tree-encoding=UTF-16LE-BOM eol=crlf"),
)
FILTER = ("filter.upper.clean 'tr a-z A-Z'", "filter.upper.smudge 'tr a-z A-Z'")
CONFIGURATION = (
    *("core.autocrlf true", "core.autocrlf input", "core.eol crlf", "core.safecrlf true"),
    *("core.fileMode false", "core.whitespace cr-at-eol", "apply.whitespace fix"),
    "apply.ignoreWhitespace change",
)
PIECES = (
    *(b"\n", b"\r\n", b"\r", b"line", b"line\r\n", b"line\n", b"trailing \t\n", b"$Id$", b"$Id: old $\n"),
    *(b"\0", b"\xff\xfe", b"\xef\xbb\xbf", "ä\r\n".encode(), b"diff --git a/x b/x\n", b"line\n" * 50),
)
NAMES = (
    *("plain", "sp ace", "new\nline", "tab\t", '"quoted"', "back\\slash", "--help", ":(glob)*", "\udcff"),
    *("ä", ".hidden", "[a-z]*", "a -> b", "trailing "),
)  # fmt: skip
SUFFIXES = (".txt", ".utf", ".bin", "")

type Entry = tuple[str, bool, bytes]


def entry(path: Path) -> Entry:
    if path.is_symlink():
        return "link", False, os.fsencode(path.readlink())
    return "file", bool(path.stat().st_mode & 0o100), path.read_bytes()


def entries(tree: Path) -> dict[str, Entry]:
    """Return every file of a tree by its path, except the files of git."""
    found = {}
    for folder, folders, files in os.walk(tree):
        if ".git" in folders:
            folders.remove(".git")
        links = [name for name in folders if (Path(folder) / name).is_symlink()]
        for name in (*files, *links):
            path = Path(folder) / name
            found[str(path.relative_to(tree))] = entry(path)
    return found


def entries_of_tar(archive: bytes) -> dict[str, Entry]:
    found: dict[str, Entry] = {}
    with tarfile.open(fileobj=io.BytesIO(archive), errors="surrogateescape") as tar:
        for member in tar:
            name = member.name.removeprefix("./")
            if member.issym():
                found[name] = "link", False, os.fsencode(member.linkname)
            elif not member.isdir():
                file = tar.extractfile(member)
                assert file is not None
                found[name] = "file", bool(member.mode & 0o100), file.read()
    return found


def content(rng: random.Random, suffix: str) -> bytes:
    if suffix == ".utf":  # git refuses to commit other bytes
        return "line\r\nline\n".encode("utf-16")
    return b"".join(rng.choices(PIECES, k=rng.randrange(12)))


def commit(tree: Path, *configuration: str) -> BuiltRoot:
    """Commit a tree as a build does, and set options of its repository."""
    options = "".join(f"git config {option}\n" for option in configuration)
    script = f"set -e\n{GIT}{INIT}{SEAL}{options}git rev-parse HEAD"
    done = subprocess.run(
        ["bash", "-c", script], cwd=tree, check=True, capture_output=True, input=EXCLUDED.encode()
    )
    head = done.stdout.decode().splitlines()[-1]
    return BuiltRoot(folder=tree.parent, base_commit=head)


def random_tree(rng: random.Random, tree: Path) -> None:
    (tree / "files").mkdir(parents=True)
    for number, name in enumerate(NAMES):
        for suffix in SUFFIXES:
            path = tree / "files" / f"{number} {name}{suffix}"
            path.write_bytes(content(rng, suffix))
            path.chmod(rng.choice((0o644, 0o755)))
    (tree / "files/link").symlink_to(rng.choice(("nowhere", "a\r\nb", "..")))
    (tree / ".gitattributes").write_text("\n".join([*rng.sample(ATTRIBUTES, 4), ""]))


def edit(rng: random.Random, tree: Path) -> None:
    """Change about half of the files, and the attributes."""
    for path in sorted((tree / "files").iterdir()):
        match rng.randrange(16):
            case 0:
                path.unlink()
            case 1:
                path.unlink()
                path.symlink_to(rng.choice(("nowhere", "a\r\nb")))
            case 2 if not path.name.endswith(" "):  # see the test of refused names
                path.unlink()
                path.mkdir()
                (path / "inner.txt").write_bytes(content(rng, ""))
            case 3:
                path.rename(path.with_name(f"moved {path.name}"))
            case 4 if not path.is_symlink():
                path.chmod(path.stat().st_mode ^ 0o111)
            case 5 if not path.is_symlink():
                path.write_bytes(path.read_bytes().replace(b"\r\n", b"\n"))
            case 6 | 7 if not path.is_symlink():
                path.write_bytes(path.read_bytes() + content(rng, ""))
            case 8 if not path.is_symlink():
                path.write_bytes(rng.randbytes(rng.randrange(2000)))
            case _:
                pass
    for name in NAMES:
        (tree / f"new {name}.txt").write_bytes(content(rng, ""))
    if rng.random() < 0.5:
        (tree / ".gitattributes").write_text("\n".join([*rng.sample(ATTRIBUTES, 4), ""]))


@pytest.fixture
def task(tasks: Mapping[str, SwebenchTask]) -> SwebenchTask:
    return tasks["psf__requests-6028"]


async def submitted(node: Node, task: SwebenchTask, root: BuiltRoot, tree: Path) -> Submission:
    async with sandbox_session(node, root.comparing_spec(Mount(source=tree, target=SUBMISSION))) as comparer:
        return await take(task, comparer)


async def applied(node: Node, root: BuiltRoot, patch: bytes) -> dict[str, Entry]:
    """Apply a patch to a fresh view of the pristine tree, and return the files."""
    async with sandbox_session(node, root.comparing_spec()) as grader:
        await apply(patch, grader, testbed="/testbed")
        done = await grader.tools.run(
            ["tar", "--exclude=./.git", "-cf", "-", "."], cwd="/testbed", output_limit=2**26, timeout_s=60
        )
    return entries_of_tar(done.output)


def paths_of(patch: bytes, folder: Path) -> set[str]:
    """Return the paths that a patch changes."""
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)}
    done = subprocess.run(
        ["git", "apply", "--numstat", "-z", "-"],
        cwd=folder, env=environment, input=patch, check=True, stdout=subprocess.PIPE,
    )  # fmt: skip
    return {os.fsdecode(line.split(b"\t", 2)[2]) for line in done.stdout.split(b"\0") if line}


@pytest.mark.parametrize("seed", range(12))
async def test_any_tree_is_graded_byte_for_byte(
    tmp_path: Path, node: Node, task: SwebenchTask, seed: int
) -> None:
    rng = random.Random(seed)
    pristine, tree = tmp_path / "testbed", tmp_path / "submission"
    random_tree(rng, pristine)
    root = commit(pristine, *FILTER, *rng.sample(CONFIGURATION, 2))
    shutil.copytree(pristine, tree, symlinks=True)
    edit(rng, tree)
    before, after = entries(pristine), entries(tree)
    changed = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}

    submission = await submitted(node, task, root, tree)

    assert (submission.refusal, submission.dropped) == ("", [])
    assert paths_of(submission.patch, tmp_path) == changed
    assert await applied(node, root, submission.patch) == after


@pytest.mark.parametrize("commits", [False, True])
async def test_a_directory_that_the_agent_made_a_repository_is_graded(
    tmp_path: Path, node: Node, task: SwebenchTask, commits: bool
) -> None:
    pristine, tree = tmp_path / "testbed", tmp_path / "submission"
    for name in ("known/same", "known/changed", "known/gone", "known/kept.gen", "vendor/a"):
        (pristine / name).parent.mkdir(parents=True, exist_ok=True)
        (pristine / name).write_text("1\n")
    (pristine / ".gitignore").write_text("*.gen\n")
    start = "git init -q . && git config user.email a@b && git config user.name a"
    make = f"{start} && git add . && git commit -q --allow-empty -m x"
    folders = ("new", "known", "known/in\nner", "deep/er/new")

    def repository(folder: Path, script: str) -> None:
        subprocess.run(["bash", "-c", script], cwd=folder, check=True)

    repository(pristine / "vendor", make)
    root = commit(pristine)
    shutil.copytree(pristine, tree)
    (tree / "known/changed").write_text("2\r\n")
    (tree / "known/gone").unlink()
    for folder in folders:
        (tree / folder).mkdir(parents=True, exist_ok=True)
        (tree / folder / "file").write_text("3\n")
        (tree / folder / "link").symlink_to("nowhere")
        (tree / folder / "ignored.gen").write_text("4\n")
    for folder in folders:
        repository(tree / folder, make if commits else start)
    submission = await submitted(node, task, root, tree)
    changed = {f"{folder}/{name}" for folder in folders for name in ("file", "link")}
    assert paths_of(submission.patch, tmp_path) == {*changed, "known/changed", "known/gone"}
    graded = await applied(node, root, submission.patch)
    assert {path: found for path, found in graded.items() if "/.git/" not in path} == {
        path: found for path, found in entries(tree).items() if not path.endswith("ignored.gen")
    }


async def test_the_attributes_of_a_graded_repository_are_kept(
    tmp_path: Path, node: Node, task: SwebenchTask
) -> None:
    pristine, tree = tmp_path / "testbed", tmp_path / "submission"
    pristine.mkdir()
    (pristine / "file.txt").write_bytes(b"1\r\n")
    root = commit(pristine)
    (pristine / ".git/info").mkdir(exist_ok=True)
    (pristine / ".git/info/attributes").write_text("*.txt text\n")
    shutil.copytree(pristine, tree)
    (tree / "file.txt").write_bytes(b"2\r\n")
    submission = await submitted(node, task, root, tree)
    async with sandbox_session(node, root.comparing_spec()) as grader:
        await apply(submission.patch, grader, testbed="/testbed")
        assert await grader.tools.read("/testbed/file.txt") == b"2\r\n"
        assert await grader.tools.read("/testbed/.git/info/attributes") == b"*.txt text\n"


@pytest.mark.parametrize(
    ("target", "is_kept"),
    [
        *((".", False), ("..", False), ("../sub", False), ("/testbed", False), ("/testbed/new", False)),
        *(("known", False), ("file", True), ("nowhere", True)),
    ],
)
async def test_several_links_to_directories_are_excluded_because_runners_follow_them(
    tmp_path: Path, node: Node, task: SwebenchTask, target: str, is_kept: bool
) -> None:
    pristine, tree = tmp_path / "testbed", tmp_path / "submission"
    (pristine / "sub").mkdir(parents=True)
    (pristine / "sub/file").write_text("1\n")
    (pristine / "sub/known").symlink_to("..")
    root = commit(pristine)
    shutil.copytree(pristine, tree, symlinks=True)
    (tree / "sub/new link").symlink_to(target)
    (tree / "sub/file").write_text("2\n")
    submission = await submitted(node, task, root, tree)
    assert submission.dropped == ([] if is_kept else ["sub/new link"])
    assert paths_of(submission.patch, tmp_path) == {"sub/file", *(["sub/new link"] if is_kept else [])}


async def test_an_excluded_file_has_its_pristine_bytes(
    tmp_path: Path, node: Node, task: SwebenchTask
) -> None:
    pristine, tree = tmp_path / "testbed", tmp_path / "submission"
    pristine.mkdir()
    (pristine / "setup.cfg").write_bytes(b"[a]\r\n")
    (pristine / ".gitattributes").write_text("* text\n")
    root = commit(pristine)
    shutil.copytree(pristine, tree)
    (tree / "setup.cfg").write_bytes(b"[b]\r\n")
    assert await submitted(node, task, root, tree) == Submission(dropped=["setup.cfg"])


async def test_names_that_git_cannot_patch_are_refused_instead_of_failing_the_grader(
    tmp_path: Path, node: Node, task: SwebenchTask
) -> None:
    pristine, tree = tmp_path / "testbed", tmp_path / "submission"
    pristine.mkdir()
    (pristine / "file").write_text("1\n")
    root = commit(pristine)
    (tree / "a ").mkdir(parents=True)
    (tree / "a /empty").touch()
    submission = await submitted(node, task, root, tree)
    if not submission.refusal:  # newer versions of git can
        assert "a /empty" in paths_of(submission.patch, tmp_path)
        return
    assert "git cannot read its own patch" in submission.refusal


async def test_ignored_files_of_the_pristine_tree_are_not_new_if_the_agent_stops_ignoring_them(
    tmp_path: Path, node: Node, task: SwebenchTask
) -> None:
    pristine, tree = tmp_path / "testbed", tmp_path / "submission"
    for name in ("same.gen", "changed.gen", "sub/gone.gen", "file.gen/x", "kept.gen"):
        (pristine / name).parent.mkdir(parents=True, exist_ok=True)
        (pristine / name).write_text("1\n")
    (pristine / ".gitignore").write_text("*.gen\n")
    root = commit(pristine)
    shutil.copytree(pristine, tree)
    (tree / ".gitignore").unlink()
    (tree / "changed.gen").write_text("2\n")
    shutil.rmtree(tree / "sub")
    submission = await submitted(node, task, root, tree)
    assert paths_of(submission.patch, tmp_path) == {".gitignore", "changed.gen"}
    kept = {path: entry for path, entry in entries(pristine).items() if path.startswith("sub/")}
    assert await applied(node, root, submission.patch) == {**entries(tree), **kept}
