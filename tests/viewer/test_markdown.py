"""Markdown of hostile texts: parsed into a fixed set of elements, in bounded time."""

import time
from typing import Any

import pytest

from prorl_envs.viewer.markdown import MAX_CHARS, MAX_TOTAL_CHARS, markdown_of, parse_markdown

BLOCKS = {"p", "ul", "ol", "li", "blockquote", "hr", "heading", "pre"}
TABLES = {"table", "thead", "tbody", "tr", "th", "td"}
ELEMENTS = BLOCKS | TABLES | {"strong", "em", "s", "br", "code", "a", "img"}


def elements(nodes: Any) -> list[Any]:
    """Return all elements of a tree."""
    found = []
    for node in nodes:
        if not isinstance(node, str):
            found += [node, *elements(node[1])]
    return found


def test_elements_of_a_text() -> None:
    text = "# A *b*\n\n2. x\n3. y\n\n```py\n1 < 2\n```\n\n|h|\n|-:|\n|c|\n\none  \ntwo ~~z~~"
    assert parse_markdown(text) == [
        ("heading", ["A ", ("em", ["b"])], 1),
        ("ol", [("li", ["x"]), ("li", ["y"])], 2),
        ("pre", ["1 < 2"], "py"),
        (
            "table",
            [("thead", [("tr", [("th", ["h"], "right")])]), ("tbody", [("tr", [("td", ["c"], "right")])])],
        ),
        ("p", ["one", ("br", []), "two ", ("s", ["z"])]),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "<script>alert(1)</script>",
        "<img src=x onerror=alert(1)>",
        "a <b onclick=x>b</b>",
        "<!-- c -->",
        "[x](javascript:alert(1))",
        "[x](JaVaScRiPt:alert(1))",
        "[x](&#106;avascript:alert(1))",
        "[x](data:text/html;base64,PHN2Zz4=)",
        "[x](vbscript:y)",
        "[x](//evil.example/)",
        "[x](/dashboard)",
        "[x](#/episodes)",
        "[x](file:///etc/passwd)",
        "<javascript:alert(1)>",
        "[x]: javascript:y\n\n[x]",
        "![i](javascript:x)",
    ],
)
def test_no_markup_and_no_other_addresses(text: str) -> None:
    tree = parse_markdown(text)
    assert tree is not None
    found = elements(tree)
    assert {name for name, *_ in found} <= ELEMENTS - {"a"}, (
        "raw HTML is text; only web and mail addresses are links"
    )


def test_links_of_the_web() -> None:
    [paragraph] = parse_markdown("[a](https://e.example/x?y=1) <mailto:a@e.example>") or []
    assert [node[2] for node in elements([paragraph]) if node[0] == "a"] == [
        "https://e.example/x?y=1",
        "mailto:a@e.example",
    ]


@pytest.mark.parametrize(
    "piece", ["[", "![", "[a](", "*a ", "**a* ", ">", "- ", "`", "_a__b", "<", "&", "~~a ", "|x\n|-\n", "a\n"]
)
def test_hostile_text_takes_bounded_time(piece: str) -> None:
    text = (piece * MAX_CHARS)[:MAX_CHARS]
    began = time.process_time()
    parse_markdown(text)
    assert time.process_time() - began < 5


def test_large_texts_are_not_parsed() -> None:
    assert parse_markdown("a" * (MAX_CHARS + 1)) is None
    assert parse_markdown("|a" * 100 + "\n" + "|-" * 100 + "\n" + ("|a" * 100 + "\n") * 100) is None
    messages = [{"role": "user", "content": "a" * MAX_CHARS}] * (MAX_TOTAL_CHARS // MAX_CHARS + 1)
    trees = markdown_of({"messages": messages})
    assert [message[0] is None for message in trees] == [False] * (len(messages) - 1) + [True]


def test_parts_of_messages() -> None:
    messages: list[Any] = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "*a*"}, {"type": "image_url", "image_url": {"url": "x"}}],
        },
        {"role": "assistant", "content": "<think>*not*</think>\n**b**"},
        {"role": "tool", "content": "*output is shown as it is*"},
        {"role": "assistant", "content": None},
        7,
    ]
    assert markdown_of({"messages": messages}) == [
        [[("p", [("em", ["a"])])], None],
        [[("p", [("strong", ["b"])])]],
        [],
        [],
        [],
    ]
