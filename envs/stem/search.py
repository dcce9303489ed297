"""Search tool: an index on this machine, or a web service. Queries run on the host, never in a sandbox.

A new web service is one more `WebApi` in `web_search.py`.
"""

from dataclasses import dataclass
from typing import Protocol

from prorl_envs.errors import ToolError


class SearchFailed(ToolError):
    """Error: the search back end did not answer, or refused the request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """Search result. Its text comes from unknown authors.

    Args:
        title: title of the document.
        text: the passage, or a summary.
        source: a file with a position in it, or a URL.
    """

    title: str
    text: str
    source: str


class SearchBackend(Protocol):
    """Searched by all episodes of a node."""

    async def open(self) -> None:
        """Prepare the back end. Called before each episode.

        Raises:
            InputError: the texts to search are missing or wrong.
        """
        ...

    async def search(self, query: str, limit: int) -> list[Hit]:
        """Return at most `limit` hits for a hostile query, best first.

        Raises:
            SearchFailed: the back end does not answer, or refuses the request.
        """
        ...
