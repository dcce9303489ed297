"""Download pip for a Python without `ensurepip` (Debian's without python3-venv): fetch-pip.py DIRECTORY.

The script prints the path of the wheel; Python can import pip from it. PIP_INDEX_URL names another index than
PyPI, PIP_CERT a file of certificates. Runs on Python 3.9 and later with only the standard library.
"""

import hashlib
import html
import os
import re
import ssl
import sys
import urllib.parse
import urllib.request
from pathlib import Path

LINK = re.compile(r"<a\s([^>]*)>", re.IGNORECASE)
ATTRIBUTE = re.compile(r"""([\w-]+)\s*=\s*["']([^"']*)["']""")
WHEEL = re.compile(r"pip-(\d+(?:\.\d+)*)-py3-none-any\.whl$")
TIMEOUT_S = 60


def newest(page: str, url: str) -> str:
    """Return the URL of the newest release of pip on an index page that this Python can run."""
    found = {}
    for tag in LINK.findall(page):
        attributes = {name.lower(): html.unescape(value) for name, value in ATTRIBUTE.findall(tag)}
        link = urllib.parse.urljoin(url, attributes.get("href", ""))
        release = WHEEL.search(urllib.parse.urlsplit(link).path)
        needed = re.search(r">=\s*3\.(\d+)", attributes.get("data-requires-python", ""))
        fits = needed is None or int(needed[1]) <= sys.version_info[1]
        if release and fits and "data-yanked" not in tag:
            found[tuple(map(int, release[1].split(".")))] = link
    if not found:
        sys.exit(f"error: {url} lists no pip for Python 3.{sys.version_info[1]}")
    return found[max(found)]


def main(folder: Path) -> None:
    url = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/") + "/pip/"
    context = ssl.create_default_context(cafile=os.environ.get("PIP_CERT"))

    def get(address: str) -> bytes:
        with urllib.request.urlopen(address, timeout=TIMEOUT_S, context=context) as answer:
            return bytes(answer.read())

    try:
        link, _, expected = newest(get(url).decode(), url).partition("#sha256=")
        wheel = get(link)
    except OSError as error:
        sys.exit(f"error: {url}: {error}")
    if expected and hashlib.sha256(wheel).hexdigest() != expected:
        sys.exit(f"error: {link} does not have the SHA-256 that the index states")
    path = folder / link.rpartition("/")[2]
    path.write_bytes(wheel)
    sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
