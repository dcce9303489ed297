"""Conversion of Harbor and Terminal-Bench tasks to our rows. Pure.

Only instructions of the Dockerfile that need no container are supported: FROM (replaced by the host's own
system), WORKDIR, COPY, and RUN if it installs nothing. The workspace is the last WORKDIR. A task with another
instruction is refused, because it would run in an incomplete system.
"""

import json
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

import yaml

from prorl_envs.errors import InputError

type Files = Mapping[str, Any]

#: Output file of Harbor's verifiers, and the directory of tests.
REWARD = "/logs/verifier/reward.txt"
TESTS = "/tests"
_INSTALLS = re.compile(r"\b(apt|apt-get|apk|yum|dnf|pip3?|uv|conda|npm|cargo|gem|curl|wget)\s")
_NOTHING_TO_DO = frozenset({"CMD", "ENTRYPOINT", "EXPOSE", "LABEL", "MAINTAINER", "SHELL", "STOPSIGNAL"})
_WORKDIR = "/app"
_TEST_S = 120.0


def convert_row(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Convert `row` if it holds a task directory; return any other row unchanged.

    Raises:
        InputError: a file of the task is wrong or needs an unsupported feature; the message names the file.
    """
    files = row.get("directory")
    if files is None:
        return row
    if not isinstance(files, Mapping):
        raise InputError("directory: an object of files is expected")
    harbor = "task.toml" in files
    config = _config(files, "task.toml" if harbor else "task.yaml")
    prefix = "environment/" if harbor else ""
    workdir, copied, setup = _environment(files, prefix)
    tests = {name.removeprefix("tests/"): files[name] for name in files if name.startswith("tests/")}
    script = "test.sh" if harbor else "run-tests.sh"
    if not harbor:
        tests[script] = files.get(script)
    if tests.get(script) is None:
        raise InputError(f"tests/{script}: missing" if harbor else f"{script}: missing")
    solution = _text(files, "solution/solve.sh" if harbor else "solution.sh", required=False)
    calls = [{"tool": "bash", "arguments": {"command": solution}}, {"tool": "finish", "arguments": {}}]
    check = {
        "type": "tests",
        "files": tests,
        "command": f"bash {TESTS}/{script}",
        "reward": REWARD if harbor else None,
        "timeout_s": _seconds(config, harbor),
    }
    return {
        "id": row.get("id"),
        "instruction": _text(files, "instruction.md") if harbor else str(config.get("instruction") or ""),
        "workdir": workdir,
        "files": copied,
        "setup": setup,
        "checks": [check],
        "scoring": "weighted",
        "reference": calls if solution else [],
    }


def _config(files: Files, name: str) -> Mapping[str, Any]:
    text = _text(files, name)
    try:
        config = tomllib.loads(text) if name.endswith("toml") else yaml.safe_load(text)
    except (tomllib.TOMLDecodeError, yaml.YAMLError) as error:
        raise InputError(f"{name}: {str(error)[:300]}") from None
    if not isinstance(config, Mapping):
        raise InputError(f"{name}: not a mapping")
    return config


def _seconds(config: Mapping[str, Any], harbor: bool) -> float:
    verifier = config.get("verifier") if harbor else config
    name = "timeout_sec" if harbor else "max_test_timeout_sec"
    timeout = verifier.get(name, _TEST_S) if isinstance(verifier, Mapping) else _TEST_S
    return float(timeout) if isinstance(timeout, int | float) else _TEST_S


def _text(files: Files, name: str, *, required: bool = True) -> str:
    content = files.get(name, None if required else "")
    text = content.get("text") if isinstance(content, Mapping) else content
    if not isinstance(text, str):
        raise InputError(f"{name}: {'missing' if content is None else 'not a text'}")
    return text


def _environment(files: Files, prefix: str) -> tuple[str, dict[str, Any], str]:
    """Return the workspace's path and files, and its setup commands."""
    workdir, copies, setup = _WORKDIR, [], []
    for line, (verb, rest) in enumerate(_lines(files, f"{prefix}Dockerfile"), start=1):
        where = f"{prefix}Dockerfile: instruction {line} ({verb})"
        match verb:
            case "WORKDIR":
                workdir = str(PurePosixPath(workdir, rest.strip("\"'")))
            case "COPY":
                copies.append((where, workdir, _words(where, rest)))
            case "RUN" if not _INSTALLS.search(rest):
                setup.append(rest)
            case "RUN":
                raise InputError(
                    f"{where} installs something", hint="the environment `terminal` builds images"
                )
            case "FROM" if not setup and not copies:
                pass
            case verb if verb in _NOTHING_TO_DO:
                pass
            case _:
                raise InputError(f"{where} is not supported", hint="use only FROM, WORKDIR, COPY and RUN")
    copied: dict[str, Any] = {}
    for where, base, words in copies:
        copied |= _copied(files, prefix, where, base, words, workdir)
    return workdir, copied, "\n".join(["set -e", *setup]) if setup else ""


def _lines(files: Files, name: str) -> Iterator[tuple[str, str]]:
    text = re.sub(r"\\\n", " ", _text(files, name, required=False))
    for line in text.split("\n"):
        if line.strip() and not line.lstrip().startswith("#"):
            verb, _, rest = line.strip().partition(" ")
            yield verb.upper(), rest.strip()


def _words(where: str, rest: str) -> list[str]:
    try:
        words = json.loads(rest) if rest.startswith("[") else shlex.split(rest)
    except ValueError as error:
        raise InputError(f"{where}: {error}") from None
    if len(words) < 2 or not all(isinstance(word, str) and not word.startswith("--") for word in words):
        raise InputError(f"{where} is not supported", hint="use COPY SOURCE... TARGET without options")
    return list(words)


def _copied(
    files: Files, prefix: str, where: str, base: str, words: list[str], workdir: str
) -> dict[str, Any]:
    """Return the files of a COPY, by path in the workspace."""
    *sources, target = words
    into_directory = target.endswith("/") or len(sources) > 1 or target in (".", "./")
    found: dict[str, Any] = {}
    for source in sources:
        relative = PurePosixPath(source.lstrip("/"))
        root = prefix if str(relative) == "." else f"{prefix}{relative}/"
        if (name := f"{prefix}{relative}") in files:
            path = PurePosixPath(base, target, relative.name if into_directory else "")
            found[str(path)] = files[name]
            continue
        inside = {n: c for n, c in files.items() if n.startswith(root) and n != f"{prefix}Dockerfile"}
        if not inside:
            raise InputError(f"{where}: there is no {source}")
        found |= {str(PurePosixPath(base, target, n.removeprefix(root))): c for n, c in inside.items()}
    if outside := [path for path in found if not PurePosixPath(path).is_relative_to(workdir)]:
        raise InputError(f"{where}: {outside[0]} is outside the workspace {workdir}")
    return {str(PurePosixPath(path).relative_to(workdir)): content for path, content in found.items()}
