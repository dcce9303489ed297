"""Export of episodes to one self-contained HTML file, which opens without a server.

The file's content security policy contains the hashes of its script and style. The browser therefore runs
nothing else in the file, even if the episodes are hostile.
"""

import base64
import hashlib
import html
import json
import re
from collections.abc import Iterable
from typing import Any

import msgspec

from prorl_envs.errors import InputError
from prorl_envs.rollout.api.summary import Summary, summary_of
from prorl_envs.viewer.assets import SCRIPT, STYLE, assets, page
from prorl_envs.viewer.episodes import Texts, rows_of
from prorl_envs.viewer.markdown import markdown_of
from prorl_envs.viewer.runs import RunView


def export_html(
    lines: Iterable[bytes], title: str, texts: Texts | None = None, run: RunView | None = None
) -> bytes:
    """Return the content of the file.

    Args:
        lines: results as JSON.
        title: title of the page.
        texts: decoder of token ids; None shows the ids.
        run: run of the results.

    Raises:
        InputError: a line is not a result, or there are no lines.
    """
    summaries: list[Summary] = []
    results: list[str] = []
    tokens: list[list[list[str]] | None] = []
    markdown: list[Any] = []
    for line in lines:
        summaries.append(summary_of(line))
        result = json.loads(line)
        results.append(json.dumps(result, ensure_ascii=False))
        tokens.append([texts(row["ids"]) for row in rows_of(result)] if texts else None)
        markdown.append(markdown_of(result))
    if not results:
        raise InputError("there is nothing to export")
    entries = msgspec.json.encode(summaries).decode()
    groups = {summary.group_id: run.request(summary.group_id) for summary in summaries} if run else {}
    parts = [
        f'"overview": {json.dumps(run.overview(summaries) if run else None)}',
        f'"requests": {json.dumps(groups)}, "markdown": {json.dumps(markdown)}',
        f'"title": {json.dumps(title)}, "entries": {entries}, "tokens": {json.dumps(tokens)}',
        '"results": [' + ",\n".join(results) + "]",
    ]
    return _document("{" + ", ".join(parts) + "}", title).encode("utf-8", "replace")


def _document(data: str, title: str) -> str:
    script, style = (assets()[name].content.decode() for name in (SCRIPT, STYLE))
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )
    # In a data block only `</script` and `<!--` are special. JSON can escape their first character.
    data = data.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    text = page("embedded").content.decode()
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
    text = text.replace('<meta charset="utf-8">\n', f'<meta charset="utf-8">\n{head}')
    text = re.sub(r"<title>.*?</title>", lambda _: f"<title>{html.escape(title)}</title>", text)
    text = re.sub(r'<link rel="stylesheet"[^>]*>', lambda _: f"<style>{style}</style>", text)
    block = f'<script type="application/json" id="data">{data}</script>\n'
    tag = f'<script type="module">{script}</script>'
    return re.sub(r'<script type="module"[^>]*></script>', lambda _: block + tag, text)


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
