"""One HTML file with episodes and all that shows them: to send to somebody, to open without a server.

The modules of the page become one script, in the order in which they need each other, each a function that
returns what it exports. The file's own policy names the hashes of that script and of the style, so nothing
else in it can run, whatever the episodes say.
"""

import base64
import hashlib
import html
import json
import re
from collections.abc import Iterable, Sequence

import msgspec

from prorl_envs.errors import InputError
from prorl_envs.viewer.assets import assets, page
from prorl_envs.viewer.rows import Texts, rows_of
from prorl_envs.viewer.summary import Summary, summary_of

ENTRY = "main.js"
_IMPORT = re.compile(r'^import \{ ([^}]+) \} from "\./([\w.-]+)";\n', re.MULTILINE)
_WHOLE = re.compile(r'^import \* as (\w+) from "\./([\w.-]+)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (async function|function|const|class) (\w+)", re.MULTILINE)


def export_html(lines: Iterable[bytes], title: str, texts: Texts | None = None) -> bytes:
    """The file.

    Args:
        lines: results as JSON.
        title: what it is called.
        texts: reads tokens; None leaves them numbers.

    Raises:
        InputError: a line is no result.
    """
    summaries: list[Summary] = []
    results: list[str] = []
    tokens: list[list[list[str]] | None] = []
    for line in lines:
        summaries.append(summary_of(line))
        result = json.loads(line)
        results.append(json.dumps(result, ensure_ascii=False))
        tokens.append([texts(row["ids"]) for row in rows_of(result)] if texts else None)
    if not results:
        raise InputError("there is nothing to export")
    entries = msgspec.json.encode(summaries).decode()
    parts = [
        f'"title": {json.dumps(title)}, "entries": {entries}, "tokens": {json.dumps(tokens)}',
        '"results": [' + ",\n".join(results) + "]",
    ]
    return _document("{" + ", ".join(parts) + "}", title).encode("utf-8", "replace")


def _document(data: str, title: str) -> str:
    script, style = bundle(ENTRY), assets()["style.css"].content.decode()
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )
    # In a data block only `</script` and `<!--` mean anything; both begin with what JSON can write otherwise.
    data = data.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    text = page("embedded").content.decode()
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
    text = text.replace('<meta charset="utf-8">\n', f'<meta charset="utf-8">\n{head}')
    text = re.sub(r"<title>.*?</title>", lambda _: f"<title>{html.escape(title)}</title>", text)
    text = re.sub(r'<link rel="stylesheet"[^>]*>', lambda _: f"<style>{style}</style>", text)
    block = f'<script type="application/json" id="data">{data}</script>\n'
    tag = f'<script type="module">{script}</script>'
    return re.sub(r'<script type="module"[^>]*></script>', lambda _: block + tag, text)


def bundle(entry: str) -> str:
    """A module and all it needs as one script.

    Args:
        entry: name of the module.
    """
    ordered: list[str] = []
    _visit(entry, ordered, ())
    return "\n".join(_wrapped(name) for name in ordered)


def _visit(name: str, ordered: list[str], above: Sequence[str]) -> None:
    if name in above:
        raise ValueError(f"modules import each other: {' -> '.join([*above, name])}")
    if name in ordered:
        return
    source = assets()[name].content.decode()
    for _, needed in [*_IMPORT.findall(source), *_WHOLE.findall(source)]:
        _visit(needed, ordered, [*above, name])
    ordered.append(name)


def _wrapped(name: str) -> str:
    source = assets()[name].content.decode()
    exported = [found for _, found in _EXPORT.findall(source)]
    source = _IMPORT.sub(lambda found: f"const {{ {_renamed(found[1])} }} = {_variable(found[2])};\n", source)
    source = _WHOLE.sub(lambda found: f"const {found[1]} = {_variable(found[2])};\n", source)
    source = _EXPORT.sub(r"\1 \2", source)
    return f"const {_variable(name)} = (() => {{\n{source}\nreturn {{ {', '.join(exported)} }};\n}})();"


def _renamed(names: str) -> str:
    return names.replace(" as ", ": ")


def _variable(name: str) -> str:
    return "module_" + re.sub(r"\W", "_", name)


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
