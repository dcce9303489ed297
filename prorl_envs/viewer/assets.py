"""Files of the pages, and the browser policy for them."""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from prorl_envs.viewer.bundle import bundle

STATIC = Path(__file__).parent / "static"
SCRIPT, STYLE = "pages.js", "style.css"

#: Permissions of a page. It may load its own scripts and styles, send requests to its own server, and show
#: images embedded in the data. Inline code, other origins, markup from strings, and frames are forbidden.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
    "trusted-types 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class Asset:
    """File of the pages."""

    content: bytes
    media_type: str


@cache
def assets() -> dict[str, Asset]:
    """Return the script and the style sheet by file name."""
    script = bundle(STATIC, "main.js").encode()
    return {
        SCRIPT: Asset(script, "text/javascript; charset=utf-8"),
        STYLE: Asset((STATIC / STYLE).read_bytes(), "text/css; charset=utf-8"),
    }


def page(source: str) -> Asset:
    """Return the HTML page.

    Args:
        source: kind of data source: `live`, `file`, `runs` or `embedded`.
    """
    text = (STATIC / "page.html").read_text(encoding="utf-8")
    text = re.sub(r'data-source="\w*"', f'data-source="{source}"', text, count=1)
    return Asset(text.encode(), "text/html; charset=utf-8")
