"""Clients of web search services. Requests are sent from this process, so the user's key stays here."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import httpx

from prorl_envs.env.search import SearchSettings
from prorl_envs.envs.stem.search import Hit, SearchFailed
from prorl_envs.errors import InputError

#: Maximum bytes of an answer, and maximum characters of one hit's text.
MAX_BYTES = 4 * 2**20
MAX_TEXT = 4_000
_ATTEMPTS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class WebApi:
    """Request format of a service, and the location of the hits in its answer.

    Args:
        url: usual address; empty if the user must give one.
        method: GET sends the query as a URL parameter, POST sends it in a JSON body.
        query, count: names of the query and of the number of hits; "" for none.
        key_header: header of the key, "" if the service needs none; `Authorization` is sent as a bearer
            token.
        more: further parameters.
        path: keys that lead to the list of hits.
        title, text, source: keys of one hit.
    """

    url: str
    method: Literal["GET", "POST"]
    query: str
    count: str
    key_header: str
    more: tuple[tuple[str, str], ...] = ()
    path: tuple[str, ...]
    title: str = "title"
    text: str
    source: str


#: Source: the reference pages of the services.
APIS: Mapping[str, WebApi] = {
    "brave": WebApi(
        url="https://api.search.brave.com/res/v1/web/search", method="GET", query="q", count="count",
        key_header="X-Subscription-Token", path=("web", "results"), text="description", source="url",
    ),
    "serper": WebApi(
        url="https://google.serper.dev/search", method="POST", query="q", count="num",
        key_header="X-API-KEY", path=("organic",), text="snippet", source="link",
    ),
    "tavily": WebApi(
        url="https://api.tavily.com/search", method="POST", query="query", count="max_results",
        key_header="Authorization", path=("results",), text="content", source="url",
    ),
    "searxng": WebApi(
        url="", method="GET", query="q", count="", key_header="", more=(("format", "json"),),
        path=("results",), text="content", source="url",
    ),
}  # fmt: skip


class WebSearch:
    """Client of one web search service. Implements `SearchBackend`.

    Args:
        settings: service, address and key.

    Raises:
        InputError: there is no such service, or its key or address is missing.
    """

    def __init__(self, settings: SearchSettings) -> None:
        if settings.backend not in APIS:
            known = ", ".join(("index", *APIS))
            raise InputError(f"no search back end is called {settings.backend!r}", hint=f"known: {known}")
        self._api = APIS[settings.backend]
        self._settings = settings
        self._url = settings.url or self._api.url
        if not self._url:
            raise InputError(f"{settings.backend} needs an address", hint="set search.url")
        if self._api.key_header and not settings.key:
            raise InputError(f"{settings.backend} needs a key", hint="set PRORL_SEARCH__KEY")

    async def open(self) -> None:
        """Do nothing."""

    async def search(self, query: str, limit: int) -> list[Hit]:
        problem = ""
        async with httpx.AsyncClient(timeout=self._settings.timeout_s, follow_redirects=False) as client:
            for _ in range(_ATTEMPTS):
                try:
                    return self._hits(await self._ask(client, query, limit), limit)
                except httpx.TransportError as error:
                    problem = type(error).__name__
                except httpx.HTTPStatusError as error:
                    problem = f"HTTP {error.response.status_code}"
                    if error.response.status_code < 500:
                        break
        # The message contains neither the address nor the answer, because either may hold a key.
        raise SearchFailed(f"{self._settings.backend} did not answer: {problem}", hint="is the key right?")

    async def _ask(self, client: httpx.AsyncClient, query: str, limit: int) -> Any:
        api = self._api
        parameters: dict[str, Any] = {
            api.query: query,
            **dict(api.more),
            **({api.count: limit} if api.count else {}),
        }
        key = self._settings.key
        bearer = api.key_header == "Authorization"
        headers = {api.key_header: f"Bearer {key}" if bearer else key} if api.key_header else {}
        request: dict[str, Any] = {"params" if api.method == "GET" else "json": parameters}
        async with client.stream(api.method, self._url, headers=headers, **request) as response:
            response.raise_for_status()
            body = bytearray()
            async for chunk in response.aiter_bytes():
                body += chunk
                if len(body) > MAX_BYTES:
                    raise SearchFailed(f"{self._settings.backend} sent more than {MAX_BYTES} bytes")
        try:
            return httpx.Response(200, content=bytes(body)).json()
        except (ValueError, RecursionError) as error:
            raise SearchFailed(f"{self._settings.backend} sent an answer that is not JSON") from error

    def _hits(self, answer: Any, limit: int) -> list[Hit]:
        for key in self._api.path:
            answer = answer.get(key) if isinstance(answer, Mapping) else None
        found = [item for item in answer if isinstance(item, Mapping)] if isinstance(answer, list) else []
        api = self._api
        return [
            Hit(title=_text(item, api.title), text=_text(item, api.text), source=_text(item, api.source))
            for item in found[:limit]
        ]


def _text(item: Mapping[str, Any], key: str) -> str:
    return str(item.get(key) or "").encode("utf-8", "replace").decode()[:MAX_TEXT]
