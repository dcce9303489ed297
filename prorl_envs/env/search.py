"""What a search tool asks: an index on this machine, or a web search service. The host asks, never a sandbox.

A back end is chosen by `SearchSettings`; a new web service is one more `WebApi` in `web_search.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Protocol, Self

from prorl_envs.errors import InputError, ToolError


class SearchFailed(ToolError):
    """The search back end did not answer, or refused us."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """One thing found. Text of unknown authors.

    Args:
        title: of the document.
        text: the passage, or a summary.
        source: where it is from: a file with a place in it, or a URL.
    """

    title: str
    text: str
    source: str


class SearchBackend(Protocol):
    """Finds passages."""

    async def open(self) -> None:
        """Get ready; called before each episode, and cheap after the first.

        Raises:
            InputError: what the settings name is not there.
        """
        ...

    async def search(self, query: str, limit: int) -> list[Hit]:
        """The best hits, best first.

        Args:
            query: words; hostile.
            limit: most hits.

        Raises:
            SearchFailed.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSettings:
    """Which back end, and what it needs.

    Args:
        backend: `index`, or the name of a web service.
        corpus: for `index`: a folder of texts; None takes the family's sample.
        url: of a web service, where it is not the usual one.
        key: of a web service. Stays in this process.
        timeout_s: seconds for one answer of a web service.
    """

    backend: str = "index"
    corpus: Path | None = None
    url: str = ""
    key: str = field(default="", repr=False)
    timeout_s: float = 20.0

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Self:
        """From `PRORL_SEARCH__BACKEND` and its like, for callers that read no settings file.

        Raises:
            InputError: a variable is unknown, or the time is no number.
        """
        prefix = "PRORL_SEARCH__"
        found = {
            name.removeprefix(prefix).lower(): text
            for name, text in environ.items()
            if name.startswith(prefix)
        }
        if unknown := found.keys() - {each.name for each in fields(cls)}:
            raise InputError(f"unknown setting search.{min(unknown)}")
        try:
            timeout_s = float(found.get("timeout_s", 20.0))
        except ValueError as error:
            raise InputError("setting search.timeout_s: not a number") from error
        corpus = Path(found["corpus"]).expanduser() if found.get("corpus") else None
        texts = {key: found[key] for key in ("backend", "url", "key") if key in found}
        return cls(corpus=corpus, timeout_s=timeout_s, **texts)
