"""Searches in the agent's sandbox: leaked solutions, missing files, files outside of the workspace."""

import re
import shlex
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from prorl_envs.env.audit.contents import hidden_texts
from prorl_envs.env.audit.episodes import make_calls
from prorl_envs.env.audit.findings import AuditFinding, FindingKind
from prorl_envs.env.base import Environment, Task
from prorl_envs.env.conversation import MessageLog
from prorl_envs.env.node import Node

#: Name of the probe.
SEARCH = "search"
#: Folders that are searched, beside the workspace. Links in them are not followed.
_FOLDERS = '. "$HOME" /tmp /var/tmp /app /data /srv /mnt /tests /solution /solutions /logs'
#: Lines of hidden texts that are searched for: their minimum length, and their maximum number.
_LINE_CHARS, _LINES = 16, 400
#: Share of a hidden text's lines in one file that makes the file a leak; minimum length of a single line.
_LEAKED_SHARE, _SINGLE_CHARS = 0.7, 32
#: Most files that are read, and bytes of each.
_FILES, _FILE_BYTES = 40, 200_000
#: Maximum length of an answer that is searched for only in files with a telling name; parts of such names.
_ANSWER_CHARS = 200
TELLING_NAMES = [
    "answer",
    "solution",
    "expected",
    "secret",
    "golden",
    "oracle",
    "reference",
    "grader",
    "rubric",
]
#: Prints the files that contain a line of standard input, also in other commits than the current one.
_FIND_LINES = rf"""
cat > /tmp/.prorl-lines
grep -rIlF -f /tmp/.prorl-lines --exclude=.prorl-lines --exclude-dir=site-packages {_FOLDERS} 2>/dev/null |
    head -n {_FILES}
if [ -d .git ]; then
    commits=$(git rev-list --all --reflog --not HEAD 2>/dev/null | head -n 100)
    [ -z "$commits" ] || git grep -IlF -f /tmp/.prorl-lines $commits 2>/dev/null |
        head -n {_FILES} | sed 's/^/git:/'
fi
rm -f /tmp/.prorl-lines
"""
_FIND_NAMES = rf"""
find {_FOLDERS} -xdev \( {" -o ".join(f"-iname '*{name}*'" for name in TELLING_NAMES)} \) \
    -type f -size -64k -print 2>/dev/null | head -n {_FILES}
"""
_READ = "head -c {bytes} -- {path}"
_READ_COMMIT = "git show {path} | head -c {bytes}"
_MARK = "/tmp/.prorl-mark"
#: Prints the files that have changed since the mark, outside of the workspace and of temporary directories.
_FIND_OUTSIDE = rf"""
here=$(pwd -P)
find / -xdev \( -path "$here" -o -path /proc -o -path /sys -o -path /dev -o -path /tmp -o -path /run \
    -o -path /var/tmp -o -path '*/.cache' -o -path '*/.ipython' -o -name __pycache__ \) -prune -o \
    -type f -newer {_MARK} ! -name '.*history' -print 2>/dev/null | head -n 20
"""
#: Names of files in instructions: quoted with a known suffix, but no arguments of code; or absolute.
_EXTENSIONS = (
    "py|txt|csv|tsv|jsonl?|md|sh|ya?ml|toml|ini|cfg|log|html|xml|sql|db|sqlite|[jt]s|cc?|cpp|h|rs|go|java"
    "|gz|zip|tar|conf|env|dat|bin"
)
_NAMED = re.compile(
    rf"(?<![(\[=,])[`'\"](?P<quoted>[\w./-]+\.(?:{_EXTENSIONS}))[`'\"]"
    rf"|(?<![\w.:/-])(?P<absolute>/(?:[\w.-]+/)+[\w-]+\.(?:{_EXTENSIONS}))(?![\w/*-]|\.\w)"
)


async def search_sandbox[TaskT: Task](
    family: type[Environment[TaskT]], node: Node, task: TaskT
) -> list[AuditFinding]:
    """Start an episode, search what the agent can read, and play the reference to see which files it makes.

    Raises:
        RolloutFailure: the episode failed.
    """
    async with family(node) as env:
        prompt = await env.init(task)
        if await env.examine(f": > {_MARK}; sleep 0.01") is None:
            return []
        question = "\n".join(str(message["content"]) for message in prompt.messages)
        solution = "\n".join(str(call.arguments) for call in task.reference)
        missing = await _missing(env, set(_named(task.instruction)))
        findings = await _leaks(env, hidden_texts(family, task), question, f"{question}\n{solution}")
        await make_calls(env, [c for c in task.reference if c.tool != env.finish_tool], MessageLog(prompt))
        if task.reference:
            findings += [
                AuditFinding(
                    kind=FindingKind.MISSING_FILE,
                    text=f"the instruction names {name}, which neither the workspace nor the reference has",
                    probe=SEARCH,
                )
                for name in sorted(await _missing(env, missing))
            ]
            if outside := _lines(await env.examine(_FIND_OUTSIDE)):
                text = f"the reference leaves files outside of the workspace: {', '.join(outside[:3])}"
                findings.append(AuditFinding(kind=FindingKind.OUTSIDE_FILES, text=text, probe=SEARCH))
        return findings


def _named(instruction: str) -> Iterator[str]:
    for match in _NAMED.finditer(instruction):
        yield match["quoted"] or match["absolute"]


async def _missing(env: Environment[Any], names: set[str]) -> set[str]:
    """Return the names of files that do not exist in the sandbox, also in no folder of the workspace."""
    if not names:
        return set()
    script = "\n".join(
        f'[ -e {shlex.quote(name)} ] || [ -n "$(find . -name {shlex.quote(name.rpartition("/")[2])} '
        f'-print 2>/dev/null | head -n 1)" ] || echo {shlex.quote(name)}'
        for name in sorted(names)
    )
    return set(_lines(await env.examine(script)))


async def _leaks(
    env: Environment[Any], hidden: Sequence[str], question: str, mentioned: str
) -> list[AuditFinding]:
    """Return a finding for each file that holds a hidden text.

    Args:
        question: what the agent is told; its lines are no secret.
        mentioned: the question and the reference. Files that they name are known, or changed by the
            reference.
    """
    secrets = [lines for text in hidden if (lines := distinctive_lines(text, question))]
    answers = {text.strip() for text in hidden if 0 < len(text.strip()) <= _ANSWER_CHARS} - set(
        question.split()
    )
    patterns = list(dict.fromkeys(line for lines in secrets for line in lines))[:_LINES]
    found: dict[str, str] = {}
    paths = _lines(await env.examine(_FIND_LINES, stdin="\n".join(patterns).encode())) if patterns else []
    for path in paths:
        content = await _content(env, path, mentioned)
        if any(holds(content, lines) for lines in secrets):
            found[path] = "most lines of a hidden text"
    for path in _lines(await env.examine(_FIND_NAMES)) if answers else []:
        content = await _content(env, path, mentioned)
        if path not in found and answers.intersection(line.strip() for line in content.splitlines()):
            found[path] = "an expected answer"
    return [
        AuditFinding(kind=FindingKind.LEAK, text=f"{path} has {what}", probe=SEARCH)
        for path, what in found.items()
    ]


async def _content(env: Environment[Any], path: str, mentioned: str) -> str:
    """Return the content of a file, "" if it is mentioned."""
    name = path.rpartition("/")[2]
    if re.search(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", mentioned):
        return ""
    script = _READ_COMMIT if path.startswith("git:") else _READ
    read = script.format(path=shlex.quote(path.removeprefix("git:")), bytes=_FILE_BYTES)
    return (await env.examine(read) or b"").decode(errors="replace")


def holds(content: str, lines: Collection[str]) -> bool:
    """Return whether a text has most of the lines by which another one is recognised."""
    held = {line.strip() for line in content.splitlines()}
    return len(held.intersection(lines)) >= _LEAKED_SHARE * len(lines)


def distinctive_lines(text: str, question: str) -> set[str]:
    """Return the lines by which a text is recognised; empty if it is too short."""
    # Lines that start a here-document are those of a reference's commands, not of the file that it writes.
    stripped = {line.strip() for line in text.splitlines() if "<<" not in line}
    lines = {line for line in stripped if len(line) >= _LINE_CHARS and line not in question}
    return lines if len(lines) > 1 or any(len(line) >= _SINGLE_CHARS for line in lines) else set()


def _lines(output: bytes | None) -> list[str]:
    return (output or b"").decode(errors="replace").splitlines()
