"""Conversion of the agent's tree to a patch on the pristine one, without the agent's git data.

The agent's workspace is mounted read-only in a sandbox created for the comparison. There git compares it with
the pristine tree: the agent's `.git`, with its hooks, filters, aliases and history, is never opened.

Files are compared and patched byte for byte. The base commit is not the base of the patch, because git may
have converted line ends, encodings or keywords when the files were committed.
"""

import posixpath
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import PurePosixPath

from prorl_envs.envs.swebench.diffs import changed_paths
from prorl_envs.envs.swebench.schemas import END_MARKER, START_MARKER
from prorl_envs.envs.swebench.task import SwebenchTask
from prorl_envs.errors import GraderError
from prorl_envs.tools.pool.sandbox_session import SandboxSession

SUBMISSION = "/submission"

#: Limits of a tree that is graded. A fix is never near them.
MAX_ENTRIES = 200_000
MAX_FILE_BYTES = 64 * 2**20
MAX_TREE_BYTES = 2**30
MAX_PATCH_BYTES = 32 * 2**20
TIMEOUT_S = 120.0
_MAX_NAMES_BYTES = 4 * 2**20

#: Files that control the test runner or run before it, in any folder.
_RUNNER_FILES = frozenset(
    {
        *("conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "setup.cfg"),
        *("pyproject.toml", ".coveragerc", "sitecustomize.py", "usercustomize.py", "phpunit.xml"),
        *("runtests.py", "test_sqlite.py"),  # sympy's and Django's own
    }
)
#: Modules that Python or the test runner imports by name, as a file or a package, in any folder.
_RUNNER_MODULES = frozenset({"conftest", "sitecustomize", "usercustomize"})
#: Suffixes of modules: source, bytecode, extensions.
_MODULE_SUFFIX = re.compile(r"(\.py[cod]?|(\.[\w-]+)?\.so)$")
#: Prefixes of such files' names, of runners in other languages.
_RUNNER_NAMES = ("jest.config.", "vitest.config.", "karma.conf.", ".mocharc.")

# In a repository, this file takes precedence over each .gitattributes: git converts nothing. Its other
# attributes of conversion have no effect on files without `text`.
_RAW = (
    "mkdir -p ${GIT_DIR:-.git}/info || exit 1\n"
    "echo '* -text !ident !filter !working-tree-encoding !diff'"
    " > ${GIT_DIR:-.git}/info/attributes || exit 1\n"
)

# A git that reads the pristine repository, the agent's tree, a separate index, and no configuration. The
# index starts without any file's size or time, so that every file is read.
_GIT = f"""
export GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_NOSYSTEM=1 GIT_LITERAL_PATHSPECS=1 GIT_OPTIONAL_LOCKS=0
export GIT_DIR=/testbed/.git GIT_WORK_TREE={SUBMISSION} GIT_INDEX_FILE=/tmp/submission.index LC_ALL=C
cd {SUBMISSION} 2>/dev/null || {{ echo 'the tree cannot be read'; exit 3; }}
"""
_REFUSED = 3
# Git takes a directory in which the agent started a repository for a submodule, and reads none of its files.
_NESTED = r"""
find . -mindepth 2 -name .git -prune -printf '%h\0' 2>/dev/null | while IFS= read -r -d '' folder; do
    [ -e "/testbed/$folder/.git" ] || printf '%s\0' "$folder"
done > /tmp/nested
if [ -s /tmp/nested ]; then
    while IFS= read -r -d '' folder; do
        git update-index --force-remove -- "$folder"
        find "$folder" -name .git -prune -o \( -type l -o -type f -readable \) -print0
    done < /tmp/nested | sort -z --unique > /tmp/inside
    # It reads no literal paths; each of these begins with `./`.
    GIT_LITERAL_PATHSPECS=0 git check-ignore -z --stdin < /tmp/inside > /tmp/ignored || [ $? -eq 1 ] || exit 1
    sort -z /tmp/ignored | comm -z -23 /tmp/inside - | git update-index --add --replace -z --stdin || exit 1
fi
"""
_LIST = f"""
entries=$(find . -name .git -prune -o -printf x 2>/dev/null | head --bytes={MAX_ENTRIES + 1} | wc --bytes)
[ "$entries" -le {MAX_ENTRIES} ] || {{ echo 'more than {MAX_ENTRIES} files'; exit {_REFUSED}; }}
large=$(find . -name .git -prune -o -type f -size +{MAX_FILE_BYTES // 2**20}M -print -quit 2>/dev/null)
[ -z "$large" ] || {{ echo "a file over {MAX_FILE_BYTES} bytes: ${{large:0:500}}"; exit {_REFUSED}; }}
# Sparse files and links to one file cost nothing to make, and git reads each of them.
total=$(du --summarize --apparent-size --bytes --count-links --exclude=.git . 2>/dev/null | cut --fields=1)
[ "$total" -le {MAX_TREE_BYTES} ] || {{ echo 'more than {MAX_TREE_BYTES} bytes'; exit {_REFUSED}; }}
{_RAW}
git config core.fileMode true || exit 1
pristine() {{ GIT_WORK_TREE=/testbed GIT_INDEX_FILE=/tmp/base.index git -C /testbed "$@"; }}
pristine read-tree HEAD && pristine add --all . >/dev/null 2>&1 && pristine write-tree > /tmp/base || exit 1
git read-tree "$(cat /tmp/base)" || exit 1
# Unreadable files keep their base version, and git says so with status 1.
git add --all --ignore-errors . >/dev/null 2>&1
{_NESTED}
# Files that only the pristine .gitignore names are not new, although the base lacks them so far.
git diff --cached --no-renames --name-only --diff-filter=A -z "$(cat /tmp/base)" | sort -z > /tmp/added
pristine ls-files --others -z | sort -z | comm -z -12 - /tmp/added | pristine update-index --add -z --stdin \
    && pristine write-tree > /tmp/base || exit 1
git diff --cached --no-renames --name-only -z "$(cat /tmp/base)" 2>/dev/null
"""
_DROP = 'git reset --quiet "$(cat /tmp/base)" --pathspec-from-file=- --pathspec-file-nul || exit 1\n'
_DIFF = f"""
git diff --cached --binary --full-index --no-renames --no-ext-diff --no-textconv "$(cat /tmp/base)" \
    > /tmp/submission.patch || exit 1
[ "$(stat --format=%s /tmp/submission.patch)" -le {MAX_PATCH_BYTES} ] \
    || {{ echo 'a patch over {MAX_PATCH_BYTES} bytes'; exit {_REFUSED}; }}
# Git writes some names that it cannot read: an empty file in a directory whose name ends in a space.
[ ! -s /tmp/submission.patch ] || fault=$(git apply --numstat /tmp/submission.patch 2>&1 >/dev/null) \
    || {{ echo "git cannot read its own patch: $fault"; exit {_REFUSED}; }}
"""


@dataclass(frozen=True, slots=True)
class Submission:
    """Changes of the agent.

    Args:
        patch: the diff that is graded; empty if nothing was changed.
        dropped: changed paths that are excluded from it.
        refusal: why the tree is not graded, if the agent caused it; else empty.
    """

    patch: bytes = b""
    dropped: Sequence[str] = ()
    refusal: str = ""


async def take(task: SwebenchTask, comparer: SandboxSession) -> Submission:
    """Compare the agent's tree with the pristine tree.

    Args:
        task: names the paths that the agent must not change.
        comparer: a fresh sandbox with the pristine tree at /testbed and the agent's at /submission.

    Raises:
        GraderError: the comparison failed, and the agent did not cause it.
    """
    status, output = await _run(comparer, _LIST)
    if status == _REFUSED:
        return Submission(refusal=output.decode(errors="replace").strip())
    changed = [name.decode(errors="surrogateescape") for name in output.split(b"\0") if name]
    dropped = protected(changed, task)
    if dropped:  # without any path, git would reset all of them
        await _run(comparer, _DROP, stdin="".join(f"{path}\0" for path in dropped))
    status, output = await _run(comparer, _DIFF)
    if status == _REFUSED:
        return Submission(refusal=output.decode(errors="replace").strip())
    patch = await comparer.tools.read("/tmp/submission.patch")
    return Submission(patch=patch, dropped=[_printable(path) for path in dropped])


async def apply(patch: bytes, grader: SandboxSession, *, testbed: str) -> None:
    """Apply a submission's patch to the pristine tree of a fresh sandbox, which is at `testbed`.

    Raises:
        GraderError: it does not apply, though it was made from the same tree.
    """
    if not patch:
        return
    await grader.tools.write("/tmp/submission.patch", patch)
    # The test script finds the repository as it was.
    script = (
        "own=.git/info/attributes; kept=$own.kept\n"
        '[ ! -e "$own" ] || mv "$own" "$kept" || exit 1\n'
        f"{_RAW}"
        """trap 'rm "$own"; [ ! -e "$kept" ] || mv "$kept" "$own"' EXIT\n"""
        "git -c core.fileMode=true apply --whitespace=nowarn /tmp/submission.patch"
    )
    done = await grader.tools.run(["/bin/bash", "-c", script], cwd=testbed, timeout_s=TIMEOUT_S)
    if done.exit_code != 0:
        raise GraderError(f"the patch does not apply: {done.output.decode(errors='replace')[-500:]}")


async def apply_reference(task: SwebenchTask, grader: SandboxSession) -> None:
    """Apply the reference patch to the pristine tree of a fresh sandbox, with the repository's attributes.

    Raises:
        GraderError: it does not apply.
    """
    command = ["git", "apply", "--whitespace=nowarn", *(["--reverse"] if task.bug else []), "-"]
    patch = task.patch if task.patch.endswith("\n") else f"{task.patch}\n"
    done = await grader.tools.run(command, cwd=task.testbed, stdin=patch.encode(), timeout_s=TIMEOUT_S)
    if done.exit_code != 0:
        why = done.output.decode(errors="replace")[-500:]
        raise GraderError(f"{task.id}: the reference patch does not apply: {why}")


async def _run(comparer: SandboxSession, script: str, *, stdin: str = "") -> tuple[int, bytes]:
    """Run one step; its status is 0, or `_REFUSED`."""
    try:
        done = await comparer.tools.run(
            ["/bin/bash", "--noprofile", "--norc", "-c", _GIT + script],
            cwd="/",
            stdin=stdin.encode(errors="surrogateescape"),
            timeout_s=TIMEOUT_S,
            output_limit=_MAX_NAMES_BYTES,
        )
    except OSError as error:
        raise GraderError(f"the submission cannot be taken: {error}") from error
    if done.exit_code not in (0, _REFUSED):
        why = "timed out" if done.timed_out else done.output.decode(errors="replace")[-500:].strip()
        raise GraderError(f"the submission cannot be taken: {why}")
    if done.truncated_bytes:
        return _REFUSED, f"the names of the changed files are over {_MAX_NAMES_BYTES} bytes".encode()
    return done.exit_code, done.output


def _printable(path: str) -> str:
    return path.encode(errors="surrogateescape").decode(errors="replace")


def protected(changed: Iterable[str], task: SwebenchTask) -> list[str]:
    """Return the paths of `changed` that are excluded from a submission.

    The tests' own files always are: the test patch brings them, and may fail to apply on others. Also
    excluded are files that configure the test runner, that the test command names (`bin/test`), bytecode,
    modules that Python would import instead of a test's own file, and top-level modules with the name of
    something the runner or pip imports from the working directory, unless the reference fix changes that file
    too.
    """
    tests, fixed = task.own_files, changed_paths(task.patch) if task.patch else frozenset()
    known = {PurePosixPath(path).parts[0] for path in tests | fixed}
    tested = {_MODULE_SUFFIX.sub("", path) for path in tests if path.endswith(".py")}
    shadowed = _imported(task.environment.pip if task.environment is not None else ())

    named = _named(task.eval_script)

    def steers(path: str) -> bool:
        parts = PurePosixPath(path).parts
        if path in named:
            return True
        if parts[-1] in _RUNNER_FILES or parts[-1].startswith(_RUNNER_NAMES):
            return True
        if path.endswith((".pth", ".pyc", ".pyo")):
            return True
        modules = [_MODULE_SUFFIX.sub("", part) for part in parts]
        packages = accumulate(modules, posixpath.join)
        if not _RUNNER_MODULES.isdisjoint(modules) or not tested.isdisjoint(packages):
            return True
        return parts[0] not in known and modules[0] in shadowed

    def owned(path: str) -> bool:
        return path in tests or any(path.startswith(f"{own}/") for own in task.hidden_files)

    return [path for path in changed if owned(path) or (path not in fixed and steers(path))]


def _named(script: str) -> frozenset[str]:
    """Return the words of the test command, as paths."""
    command = script.partition(START_MARKER)[2].partition(END_MARKER)[0]
    return frozenset(word.strip("'\"").removeprefix("./") for word in command.split())


def _imported(pins: Iterable[str]) -> frozenset[str]:
    distributions = {pin.partition("==")[0].lower().replace("-", "_").replace(".", "_") for pin in pins}
    return frozenset(
        {*sys.stdlib_module_names, *distributions, "_pytest", "pkg_resources", "_distutils_hack"}
    )
