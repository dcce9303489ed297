"""Conversion of the agent's tree to a patch on the pristine tree, without the agent's git data.

The agent's workspace is mounted read-only in a fresh sandbox, where git compares it with the pristine tree.
The agent's `.git`, with its hooks, filters, aliases and history, is never opened.

Files are compared and patched byte for byte. The patch is based on the pristine files, not on the base
commit, because git may have converted line ends, encodings or keywords when the files were committed.
"""

import posixpath
import re
import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import PurePosixPath

from prorl_envs.envs.swebench.diffs import changed_paths
from prorl_envs.envs.swebench.schemas import END_MARKER, START_MARKER
from prorl_envs.envs.swebench.task import SwebenchTask
from prorl_envs.errors import GraderError
from prorl_envs.tools.pool.sandbox_session import SandboxSession

SUBMISSION = "/submission"

#: Limits of a tree that is graded, far above the size of any fix.
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
#: Prefixes of the names of files that control test runners of other languages.
_RUNNER_NAMES = ("jest.config.", "vitest.config.", "karma.conf.", ".mocharc.")

# In a repository, this file takes precedence over each .gitattributes, so that git converts nothing. The
# other attributes of conversion have no effect on files without `text`.
_RAW = (
    "mkdir -p ${GIT_DIR:-.git}/info || exit 1\n"
    "echo '* -text !ident !filter !working-tree-encoding !diff'"
    " > ${GIT_DIR:-.git}/info/attributes || exit 1\n"
)

# Makes git use the pristine repository, the agent's tree, a separate index, and no configuration. The index
# starts without sizes and times of files, so that git reads every file.
_GIT = f"""
export GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_NOSYSTEM=1 GIT_LITERAL_PATHSPECS=1 GIT_OPTIONAL_LOCKS=0
export GIT_DIR=/testbed/.git GIT_WORK_TREE={SUBMISSION} GIT_INDEX_FILE=/tmp/submission.index LC_ALL=C
cd {SUBMISSION} 2>/dev/null || {{ echo 'the tree cannot be read'; exit 3; }}
"""
_REFUSED = 3
# If the agent makes a repository in a directory, git treats the directory as a submodule and reads no file in
# it. So the files of such directories are added to the index by name.
_NESTED = r"""
find . -mindepth 2 -name .git -prune -printf '%h\0' 2>/dev/null | while IFS= read -r -d '' folder; do
    [ -e "/testbed/$folder/.git" ] || printf '%s\0' "$folder"
done > /tmp/nested
if [ -s /tmp/nested ]; then
    while IFS= read -r -d '' folder; do
        git update-index --force-remove -- "$folder"
        find "$folder" -name .git -prune -o \( -type l -o -type f -readable \) -print0
    done < /tmp/nested | sort -z --unique > /tmp/inside
    # check-ignore does not support literal paths; these paths are safe because each starts with `./`.
    GIT_LITERAL_PATHSPECS=0 git check-ignore -z --stdin < /tmp/inside > /tmp/ignored || [ $? -eq 1 ] || exit 1
    sort -z /tmp/ignored | comm -z -23 /tmp/inside - | git update-index --add --replace -z --stdin || exit 1
fi
"""
_LIST = f"""
entries=$(find . -name .git -prune -o -printf x 2>/dev/null | head --bytes={MAX_ENTRIES + 1} | wc --bytes)
[ "$entries" -le {MAX_ENTRIES} ] || {{ echo 'more than {MAX_ENTRIES} files'; exit {_REFUSED}; }}
large=$(find . -name .git -prune -o -type f -size +{MAX_FILE_BYTES // 2**20}M -print -quit 2>/dev/null)
[ -z "$large" ] || {{ echo "a file over {MAX_FILE_BYTES} bytes: ${{large:0:500}}"; exit {_REFUSED}; }}
# Sparse files and hard links take no disk space, but git reads their whole content.
total=$(du --summarize --apparent-size --bytes --count-links --exclude=.git . 2>/dev/null | cut --fields=1)
[ "$total" -le {MAX_TREE_BYTES} ] || {{ echo 'more than {MAX_TREE_BYTES} bytes'; exit {_REFUSED}; }}
{_RAW}
git config core.fileMode true || exit 1
pristine() {{ GIT_WORK_TREE=/testbed GIT_INDEX_FILE=/tmp/base.index git -C /testbed "$@"; }}
pristine read-tree HEAD && pristine add --all . >/dev/null 2>&1 && pristine write-tree > /tmp/base || exit 1
git read-tree "$(cat /tmp/base)" || exit 1
# Unreadable files keep their base version; git reports them with exit status 1, which is ignored.
git add --all --ignore-errors . >/dev/null 2>&1
{_NESTED}
# Files that only the pristine .gitignore ignores are not new, so they are added to the base.
git diff --cached --no-renames --name-only --diff-filter=A -z "$(cat /tmp/base)" | sort -z > /tmp/added
pristine ls-files --others -z | sort -z | comm -z -12 - /tmp/added | pristine update-index --add -z --stdin \
    && pristine write-tree > /tmp/base || exit 1
git diff --cached --no-renames --name-only -z "$(cat /tmp/base)" 2>/dev/null
"""
# Test runners follow links to directories. Two that lead back, or a chain of pairs, have millions of paths:
# the grader is occupied until its timeout. A single one multiplies paths by 40, the kernel's limit.
_LINKS = r"""
find . -name .git -prune -o -type l \( -xtype d -o -lname '/*' \) -printf '%P\0' 2>/dev/null \
    | sort -z > /tmp/links
[ "$(tr --delete --complement '\0' < /tmp/links | wc --bytes)" -lt 2 ] \
    || git diff --cached --no-renames --name-only -z "$(cat /tmp/base)" | sort -z | comm -z -12 - /tmp/links
"""
_DROP = 'git reset --quiet "$(cat /tmp/base)" --pathspec-from-file=- --pathspec-file-nul || exit 1\n'
_DIFF = f"""
git diff --cached --binary --full-index --no-renames --no-ext-diff --no-textconv "$(cat /tmp/base)" \
    > /tmp/submission.patch || exit 1
[ "$(stat --format=%s /tmp/submission.patch)" -le {MAX_PATCH_BYTES} ] \
    || {{ echo 'a patch over {MAX_PATCH_BYTES} bytes'; exit {_REFUSED}; }}
# Git can write some names that it cannot parse, such as an empty file in a directory `a `, with a space.
[ ! -s /tmp/submission.patch ] || fault=$(git apply --numstat /tmp/submission.patch 2>&1 >/dev/null) \
    || {{ echo "git cannot read its own patch: $fault"; exit {_REFUSED}; }}
"""


@dataclass(frozen=True, slots=True)
class Submission:
    """Changes of the agent.

    Args:
        patch: the diff that is graded; empty if the agent changed nothing.
        dropped: changed paths that are excluded from the patch.
        refusal: reason, caused by the agent, why the tree is not graded; "" if it is graded.
    """

    patch: bytes = b""
    dropped: Sequence[str] = ()
    refusal: str = ""


async def take(task: SwebenchTask, comparer: SandboxSession) -> Submission:
    """Compare the agent's tree with the pristine tree.

    Args:
        task: determines the paths that the agent must not change.
        comparer: a fresh sandbox with the pristine tree at /testbed and the agent's tree at /submission.

    Raises:
        GraderError: the comparison failed, and the agent did not cause it.
    """
    status, output = await _run(comparer, _LIST)
    if status == _REFUSED:
        return Submission(refusal=output.decode(errors="replace").strip())
    changed = _names(output)
    links = _names((await _run(comparer, _LINKS))[1]) if changed else []
    dropped = protected(changed, task, links)
    if dropped:  # without a path, git would reset all files
        await _run(comparer, _DROP, stdin="".join(f"{path}\0" for path in dropped))
    status, output = await _run(comparer, _DIFF)
    if status == _REFUSED:
        return Submission(refusal=output.decode(errors="replace").strip())
    patch = await comparer.tools.read("/tmp/submission.patch")
    return Submission(patch=patch, dropped=[_printable(path) for path in dropped])


async def apply(patch: bytes, grader: SandboxSession, *, testbed: str) -> None:
    """Apply a submission's patch to the pristine tree at `testbed` in a fresh sandbox.

    Raises:
        GraderError: the patch does not apply, although it was made from the same tree.
    """
    if not patch:
        return
    await grader.tools.write("/tmp/submission.patch", patch)
    # The repository's own attributes are restored at the end, for the test script.
    script = (
        "attributes=.git/info/attributes; saved=$attributes.saved\n"
        '[ ! -e "$attributes" ] || mv "$attributes" "$saved" || exit 1\n'
        f"{_RAW}"
        """trap 'rm "$attributes"; [ ! -e "$saved" ] || mv "$saved" "$attributes"' EXIT\n"""
        "git -c core.fileMode=true apply --whitespace=nowarn /tmp/submission.patch"
    )
    done = await grader.tools.run(["/bin/bash", "-c", script], cwd=testbed, timeout_s=TIMEOUT_S)
    if done.exit_code != 0:
        raise GraderError(f"the patch does not apply: {done.output.decode(errors='replace')[-500:]}")


async def apply_reference(task: SwebenchTask, grader: SandboxSession) -> None:
    """Apply the reference patch to the pristine tree of a fresh sandbox, with the repository's attributes.

    Raises:
        GraderError: the patch does not apply.
    """
    command = ["git", "apply", "--whitespace=nowarn", *(["--reverse"] if task.bug else []), "-"]
    patch = task.patch if task.patch.endswith("\n") else f"{task.patch}\n"
    done = await grader.tools.run(command, cwd=task.testbed, stdin=patch.encode(), timeout_s=TIMEOUT_S)
    if done.exit_code != 0:
        output = done.output.decode(errors="replace")[-500:]
        raise GraderError(f"{task.id}: the reference patch does not apply: {output}")


async def _run(comparer: SandboxSession, script: str, *, stdin: str = "") -> tuple[int, bytes]:
    """Run one step of the comparison; return its exit status, 0 or `_REFUSED`, and its output.

    Raises:
        GraderError: the step failed.
    """
    try:
        done = await comparer.tools.run(
            ["/bin/bash", "--noprofile", "--norc", "-c", _GIT + script],
            cwd="/",
            stdin=stdin.encode(errors="surrogateescape"),
            timeout_s=TIMEOUT_S,
            output_limit=_MAX_NAMES_BYTES,
        )
    except OSError as error:
        raise GraderError(f"the submission cannot be compared: {error}") from error
    if done.exit_code not in (0, _REFUSED):
        reason = "timed out" if done.timed_out else done.output.decode(errors="replace")[-500:].strip()
        raise GraderError(f"the submission cannot be compared: {reason}")
    if done.truncated_bytes:
        return _REFUSED, f"the names of the changed files are over {_MAX_NAMES_BYTES} bytes".encode()
    return done.exit_code, done.output


def _names(output: bytes) -> list[str]:
    return [name.decode(errors="surrogateescape") for name in output.split(b"\0") if name]


def _printable(path: str) -> str:
    return path.encode(errors="surrogateescape").decode(errors="replace")


def protected(changed: Iterable[str], task: SwebenchTask, links: Collection[str] = ()) -> list[str]:
    """Return the paths of `changed` that are excluded from a submission.

    The tests' own files are always excluded: the test patch brings them, and may not apply to changed files.
    These files are excluded unless the reference fix changes the same file:

    - files that configure the test runner, or that the test command names (`bin/test`);
    - bytecode;
    - links that are absolute or lead to a directory (`links`), if the tree has two or more;
    - modules that Python would import instead of a test's own file;
    - top-level modules with the name of a module that the test runner or pip imports.
    """
    tests, fixed = task.own_files, changed_paths(task.patch) if task.patch else frozenset()
    top_level_names = {PurePosixPath(path).parts[0] for path in tests | fixed}
    tested = {_MODULE_SUFFIX.sub("", path) for path in tests if path.endswith(".py")}
    runner_imports = _imported(task.environment.pip if task.environment is not None else ())
    named = _named(task.eval_script)

    def controls_runner(path: str) -> bool:
        parts = PurePosixPath(path).parts
        if path in named or path in links:
            return True
        if parts[-1] in _RUNNER_FILES or parts[-1].startswith(_RUNNER_NAMES):
            return True
        if path.endswith((".pth", ".pyc", ".pyo")):
            return True
        modules = [_MODULE_SUFFIX.sub("", part) for part in parts]
        packages = accumulate(modules, posixpath.join)
        if not _RUNNER_MODULES.isdisjoint(modules) or not tested.isdisjoint(packages):
            return True
        return parts[0] not in top_level_names and modules[0] in runner_imports

    def is_tests_own(path: str) -> bool:
        return path in tests or any(path.startswith(f"{folder}/") for folder in task.hidden_files)

    return [path for path in changed if is_tests_own(path) or (path not in fixed and controls_runner(path))]


def _named(script: str) -> frozenset[str]:
    """Return the words of the test command, as paths."""
    command = script.partition(START_MARKER)[2].partition(END_MARKER)[0]
    return frozenset(word.strip("'\"").removeprefix("./") for word in command.split())


def _imported(pins: Iterable[str]) -> frozenset[str]:
    distributions = {pin.partition("==")[0].lower().replace("-", "_").replace(".", "_") for pin in pins}
    return frozenset(
        {*sys.stdlib_module_names, *distributions, "_pytest", "pkg_resources", "_distutils_hack"}
    )
