"""Full-text index of a folder, in one SQLite file: built at first use, kept in the cache.

A folder holds `.txt`, `.md` and `.jsonl` files. The title of a Markdown file is its first heading; otherwise
the file name is the title. A `.jsonl` file has one object per line: `text`, and optionally `title` and `url`
or `id`. Texts are split into passages at paragraphs. Hits are ranked by BM25 (SQLite's FTS5).
"""

import asyncio
import hashlib
import json
import os
import re
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path

from prorl_envs.envs.stem.search import Hit, SearchFailed
from prorl_envs.errors import InputError

#: Target length of a passage in characters, and maximum number of query words that count.
PASSAGE_CHARS = 1_500
MAX_WORDS = 32
#: Format version of the file; an index of another version is rebuilt.
_FORMAT = 1
_KINDS = (".txt", ".md", ".jsonl")
#: Limit of SQLite virtual machine steps per query.
_STEPS = 200_000_000
_WORD = re.compile(r"\w+")


class IndexSearch:
    """Index of one folder. Implements `SearchBackend`.

    Args:
        corpus: the folder.
        cache_dir: where the index is kept.
    """

    def __init__(self, corpus: Path, cache_dir: Path) -> None:
        self._corpus = corpus
        self._cache_dir = cache_dir
        self._path: Path | None = None
        self._opening = asyncio.Lock()

    async def open(self) -> None:
        async with self._opening:
            if self._path is None:
                self._path = await asyncio.to_thread(build_index, self._corpus, self._cache_dir)

    async def search(self, query: str, limit: int) -> list[Hit]:
        await self.open()
        assert self._path is not None
        try:
            return await asyncio.to_thread(_find, self._path, query, limit)
        except sqlite3.Error as error:
            raise SearchFailed(f"the index {self._path} cannot be searched: {error}") from error


def build_index(corpus: Path, cache_dir: Path) -> Path:
    """Return the index of the current contents of a folder; build it if it is missing. Blocks.

    Raises:
        InputError: `corpus` is not a folder, holds no text, or a file in it is wrong.
    """
    files = sorted(path for path in corpus.rglob("*") if path.suffix in _KINDS and path.is_file())
    if not files:
        raise InputError(f"{corpus}: no folder with {', '.join(_KINDS)} files", hint="set search.corpus")
    stats = [(str(path.relative_to(corpus)), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    name = hashlib.sha256(repr((_FORMAT, str(corpus.resolve()), stats)).encode()).hexdigest()[:24]
    target = cache_dir / "search" / f"{name}.sqlite"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    # Write under a unique name, then rename: other processes may build the same index at the same time.
    handle, draft = tempfile.mkstemp(dir=target.parent, suffix=".draft")
    os.close(handle)
    try:
        _write(Path(draft), corpus, files)
        Path(draft).replace(target)
    finally:
        Path(draft).unlink(missing_ok=True)
    return target


def _write(draft: Path, corpus: Path, files: list[Path]) -> None:
    database = sqlite3.connect(draft)
    try:
        with database:
            database.execute(
                "CREATE VIRTUAL TABLE passages USING fts5(title, text, source UNINDEXED, tokenize='porter')"
            )
            rows = (row for path in files for row in _passages(corpus, path))
            database.executemany("INSERT INTO passages VALUES (?, ?, ?)", rows)
    finally:
        database.close()


def _passages(corpus: Path, path: Path) -> Iterator[tuple[str, str, str]]:
    """Yield title, text and source of each passage of a file."""
    name = str(path.relative_to(corpus))
    try:
        # JSON lines end at line feeds only.
        with path.open(encoding="utf-8-sig", newline="\n" if path.suffix == ".jsonl" else None) as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from error
    if path.suffix != ".jsonl":
        heading = re.search(r"^#+ (.+)$", text, re.MULTILINE) if path.suffix == ".md" else None
        title = heading[1].strip() if heading else path.stem.replace("-", " ").replace("_", " ")
        yield from ((title, part, f"{name}#{number}") for number, part in enumerate(_cut(text), start=1))
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield from _line(line, name, number)


def _line(line: str, name: str, number: int) -> Iterator[tuple[str, str, str]]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{name}:{number}: not JSON: {error}") from error
    if not isinstance(row, dict) or not isinstance(row.get("text"), str):
        raise InputError(f"{name}:{number}: text: not an object with a text")
    source = str(row.get("url") or row.get("id") or f"{name}:{number}")
    for part in _cut(row["text"]):
        yield str(row.get("title") or source), part, source


def _cut(text: str) -> Iterator[str]:
    """Split a text into passages of whole paragraphs; a paragraph that is too long is cut."""
    passage = ""
    for paragraph in re.split(r"\n\s*\n", text):
        paragraph = paragraph.strip()
        if passage and len(passage) + len(paragraph) > PASSAGE_CHARS:
            yield passage
            passage = ""
        while len(paragraph) > PASSAGE_CHARS:
            yield paragraph[:PASSAGE_CHARS]
            paragraph = paragraph[PASSAGE_CHARS:]
        passage = f"{passage}\n\n{paragraph}".strip()
    if passage:
        yield passage


def _find(path: Path, query: str, limit: int) -> list[Hit]:
    # The words are quoted, so that FTS5 never treats them as operators.
    words = [f'"{word}"' for word in _WORD.findall(query)[:MAX_WORDS]]
    if not words:
        return []
    database = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro&immutable=1", uri=True)
    try:
        database.set_progress_handler(lambda: 1, _STEPS)
        found = database.execute(
            "SELECT title, text, source FROM passages WHERE passages MATCH ?"
            " ORDER BY bm25(passages, 4.0, 1.0) LIMIT ?",
            (" OR ".join(words), limit),
        )
        return [Hit(title=title, text=text, source=source) for title, text, source in found]
    finally:
        database.close()
