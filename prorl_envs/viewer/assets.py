"""The files of the pages, and what a browser may do with them."""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

STATIC = Path(__file__).parent / "static"
_TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html"}

#: What a page may do: load its own scripts and styles, ask its own server, show images that are in the data.
#: Nothing inline, nothing from elsewhere, no markup from strings, in nobody's frame.
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
    """A file of the pages."""

    name: str
    content: bytes
    media_type: str


@cache
def assets() -> dict[str, Asset]:
    """Every script and style by its name."""
    return {
        path.name: Asset(path.name, path.read_bytes(), f"{_TYPES[path.suffix]}; charset=utf-8")
        for path in sorted(STATIC.iterdir())
        if path.suffix in _TYPES and path.name != "page.html"
    }


def page(source: str) -> Asset:
    """The page.

    Args:
        source: where its data comes from: `live`, `file` or `embedded`.
    """
    text = (STATIC / "page.html").read_text(encoding="utf-8")
    text = re.sub(r'data-source="\w*"', f'data-source="{source}"', text, count=1)
    return Asset("page.html", text.encode(), "text/html; charset=utf-8")
