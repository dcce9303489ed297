"""The search tool: the index, and web services replaced by a server on loopback."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from prorl_envs.env.search import SearchSettings
from prorl_envs.envs.stem.search import SearchFailed
from prorl_envs.envs.stem.search_index import PASSAGE_CHARS, IndexSearch, build_index
from prorl_envs.envs.stem.web_search import APIS, WebSearch
from prorl_envs.errors import InputError
from tests.http_server import answering

pytestmark = pytest.mark.anyio


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    (folder / "more").mkdir(parents=True)
    (folder / "whales.md").write_text("# Blue whales\n\nThey sing.\n\n" + "They are large. " * 300)
    (folder / "more" / "on_bees.txt").write_text("Bees dance to tell where flowers are.")
    rows = [
        {"title": "Ants", "text": "Ants carry leaves.", "url": "http://ants"},
        {"text": "Moths fly at night."},
    ]
    (folder / "rest.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


async def test_the_index_holds_every_kind_of_file(corpus: Path, tmp_path: Path) -> None:
    index = IndexSearch(corpus, tmp_path / "cache")
    (hit,) = await index.search("dancing bee", 5)
    assert (hit.title, hit.source) == ("on bees", "more/on_bees.txt#1")
    (hit,) = await index.search("ants", 5)
    assert (hit.title, hit.text, hit.source) == ("Ants", "Ants carry leaves.", "http://ants")
    assert (await index.search("night", 5))[0].source == "rest.jsonl:2"
    whales = await index.search("whales", 50)
    assert len(whales) > 2 and all(len(hit.text) <= PASSAGE_CHARS for hit in whales)
    assert len(await index.search("whales", 2)) == 2


async def test_lines_of_json_end_at_line_feeds_only(corpus: Path, tmp_path: Path) -> None:
    odd = "Newts\u2028swim\u2029in\x85ponds."
    rows = [{"title": "Newts", "text": odd, "url": "http://newts"}, {"text": "Toads\x0bjump."}]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    (corpus / "odd.jsonl").write_bytes("\r\n".join([*lines, '{"text":\r"Eels glide."}']).encode())
    index = IndexSearch(corpus, tmp_path / "cache")
    (hit,) = await index.search("newts", 5)
    assert (hit.text.split(), hit.source) == (odd.split(), "http://newts")
    assert [hit.source for hit in await index.search("eels", 5)] == ["odd.jsonl:3"]
    (corpus / "old.md").write_bytes(b"# Otters\r\n\r\nThey dive.\r\n")
    assert (await IndexSearch(corpus, tmp_path / "cache").search("otters", 5))[0].title == "Otters"


async def test_the_index_is_built_once_and_again_after_a_change(corpus: Path, tmp_path: Path) -> None:
    first = build_index(corpus, tmp_path)
    assert build_index(corpus, tmp_path) == first
    (corpus / "new.txt").write_text("Wasps sting.")
    assert build_index(corpus, tmp_path) != first
    assert not list((tmp_path / "search").glob("*.draft"))


@pytest.mark.parametrize(
    "query", ["", "?!", '"', "a" * 5000, "x OR y NOT", "\0", "title:x", "\ud800", "* ^ ( ) -"]
)
async def test_an_empty_query_is_an_error(corpus: Path, tmp_path: Path, query: str) -> None:
    assert await IndexSearch(corpus, tmp_path / "cache").search(query, 5) == []


async def test_a_wrong_folder_or_file_is_named(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nothing"):
        await IndexSearch(tmp_path / "nothing", tmp_path).open()
    (corpus / "rest.jsonl").write_text('{"title": "no text"}\n')
    with pytest.raises(InputError, match=r"rest\.jsonl:1: text"):
        await IndexSearch(corpus, tmp_path / "cache").open()
    assert not list((tmp_path / "cache" / "search").iterdir())


type Answer = Callable[[BaseHTTPRequestHandler, bytes], tuple[int, bytes]]


@contextmanager
def service(answer: Answer) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def _serve(self) -> None:
            status, body = answer(self, self.rfile.read(int(self.headers.get("Content-Length", 0))))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = _serve

        def log_message(self, format: str, *args: object) -> None:
            pass

    with answering(Handler) as place:
        yield f"http://{place}/search"


def nested(api: str, items: list[dict[str, Any]]) -> bytes:
    answer: Any = items
    for key in reversed(APIS[api].path):
        answer = {key: answer}
    return json.dumps(answer).encode()


@pytest.mark.parametrize("name", sorted(APIS))
async def test_each_service_gets_its_own_request_format(name: str) -> None:
    api, asked = APIS[name], []

    def answer(request: BaseHTTPRequestHandler, body: bytes) -> tuple[int, bytes]:
        asked.append((request.command, request.path, dict(request.headers), body))
        item = {api.title: "Title", api.text: "Text", api.source: "http://source"}
        return 200, nested(name, [item, {}, "none"])  # type: ignore[list-item]

    with service(answer) as url:
        search = WebSearch(SearchSettings(backend=name, url=url, key="secret-key"))
        hits = await search.search("blue whales", 5)
    assert [(hit.title, hit.text, hit.source) for hit in hits] == [
        ("Title", "Text", "http://source"),
        ("", "", ""),
    ]
    ((method, path, headers, body),) = asked
    assert method == api.method
    assert "blue" in (path if method == "GET" else body.decode())
    assert "secret-key" not in path and b"secret-key" not in body
    sent = {key.lower(): value for key, value in headers.items()}
    assert not api.key_header or sent[api.key_header.lower()].removeprefix("Bearer ") == "secret-key"


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        (401, b"secret-key is wrong", "HTTP 401"),
        (500, b"", "HTTP 500"),
        (302, b"", "HTTP 302"),
        (200, b"<html>", "not JSON"),
        (200, b" " * (5 * 2**20), "more than"),
    ],
)
async def test_a_failing_service_is_a_typed_failure_without_the_key(
    status: int, body: bytes, says: str
) -> None:
    with service(lambda request, given: (status, body)) as url:
        search = WebSearch(SearchSettings(backend="brave", url=f"{url}?key=secret-key", key="secret-key"))
        with pytest.raises(SearchFailed, match=says) as caught:
            await search.search("whales", 5)
    assert "secret-key" not in f"{caught.value} {caught.value.__cause__}"


@pytest.mark.parametrize("body", [b"[]", b"{}", b'{"web": 5}', b'{"web": {"results": {}}}', b"null"])
async def test_an_answer_in_another_format_has_no_hits(body: bytes) -> None:
    with service(lambda request, given: (200, body)) as url:
        assert await WebSearch(SearchSettings(backend="brave", url=url, key="k")).search("whales", 5) == []


async def test_an_unreachable_service_is_a_typed_failure() -> None:
    with service(lambda request, given: (200, b"")) as url:
        pass
    with pytest.raises(SearchFailed, match="ConnectError"):
        await WebSearch(SearchSettings(backend="searxng", url=url)).search("whales", 5)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"backend": "other"}, "other"),
        ({"backend": "brave"}, "needs a key"),
        ({"backend": "searxng"}, "address"),
    ],
)
async def test_requirements_of_a_service_are_checked(settings: dict[str, str], says: str) -> None:
    with pytest.raises(InputError, match=says):
        WebSearch(SearchSettings(**settings))  # type: ignore[arg-type]


async def test_settings_are_read_from_variables() -> None:
    found = SearchSettings.from_environ(
        {
            "PRORL_SEARCH__BACKEND": "tavily",
            "PRORL_SEARCH__KEY": "k",
            "PRORL_SEARCH__TIMEOUT_S": "3",
            "PATH": "/bin",
        }
    )
    assert (found.backend, found.key, found.timeout_s) == ("tavily", "k", 3.0)
    assert "'k'" not in repr(found)
    for wrong in ({"PRORL_SEARCH__KYE": "k"}, {"PRORL_SEARCH__TIMEOUT_S": "soon"}):
        with pytest.raises(InputError, match="search"):
            SearchSettings.from_environ(wrong)


@pytest.mark.parametrize("name", ["a#b", "a?b", "a%20b", "a b"])
async def test_the_cache_may_have_any_name(corpus: Path, tmp_path: Path, name: str) -> None:
    assert await IndexSearch(corpus, tmp_path / name).search("ants", 5)
    assert sorted(os.listdir(tmp_path)) == sorted(["corpus", name])  # noqa: PTH208
