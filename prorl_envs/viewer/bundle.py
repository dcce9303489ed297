"""Bundler of the pages' JavaScript modules into one script.

The modules are in dependency order; each becomes a function that returns the module's exports.
"""

import re
from collections.abc import Sequence
from pathlib import Path

_IMPORT = re.compile(r'^import \{ ([^}]+) \} from "\./([\w.-]+)";\n', re.MULTILINE)
_NAMESPACE_IMPORT = re.compile(r'^import \* as (\w+) from "\./([\w.-]+)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (async function|function|const|class) (\w+)", re.MULTILINE)


def bundle(folder: Path, entry: str) -> str:
    """Bundle a module and its dependencies into one script.

    Args:
        folder: folder of the modules.
        entry: file name of the module to start with.
    """
    ordered: list[str] = []
    _visit(folder, entry, ordered, ())
    return "\n".join(_wrapped(folder, name) for name in ordered)


def _visit(folder: Path, name: str, ordered: list[str], above: Sequence[str]) -> None:
    if name in above:
        raise ValueError(f"modules import each other: {' -> '.join([*above, name])}")
    if name in ordered:
        return
    source = (folder / name).read_text(encoding="utf-8")
    for _, needed in [*_IMPORT.findall(source), *_NAMESPACE_IMPORT.findall(source)]:
        _visit(folder, needed, ordered, [*above, name])
    ordered.append(name)


def _wrapped(folder: Path, name: str) -> str:
    source = (folder / name).read_text(encoding="utf-8")
    exported = [found for _, found in _EXPORT.findall(source)]
    source = _IMPORT.sub(lambda found: f"const {{ {_renamed(found[1])} }} = {_variable(found[2])};\n", source)
    source = _NAMESPACE_IMPORT.sub(lambda found: f"const {found[1]} = {_variable(found[2])};\n", source)
    source = _EXPORT.sub(r"\1 \2", source)
    return f"const {_variable(name)} = (() => {{\n{source}\nreturn {{ {', '.join(exported)} }};\n}})();"


def _renamed(names: str) -> str:
    return names.replace(" as ", ": ")


def _variable(name: str) -> str:
    return "module_" + re.sub(r"\W", "_", name)
