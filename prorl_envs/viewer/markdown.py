"""Parser of the Markdown in prompts and answers. The pages build elements from the parser's trees.

The text is hostile, so it is never converted to HTML. A tree contains only elements of a fixed set, links
have an http, https or mailto address, and raw HTML stays text.
"""

import re
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.tree import SyntaxTreeNode

type Node = str | tuple[Any, ...]
"""Text, or an element: (name, children) or (name, children, value). The value is the level of `heading`,
the first number of `ol`, the language of `pre`, the alignment of `th` and `td`, the address of `a`, `img`."""

#: Longest parsed text, and limit for all texts of an episode, in characters. Longer texts are shown unparsed.
MAX_CHARS, MAX_TOTAL_CHARS = 30_000, 150_000
#: Largest number of opening brackets in a text. The parser takes quadratic time for unmatched brackets (2.5 s
#: for 15,000).
MAX_BRACKETS = 500
#: Largest number of Markdown tokens in a text. A table of empty cells has one token per two characters.
MAX_TOKENS = 10_000

_PARSER = MarkdownIt("commonmark", {"html": False, "maxNesting": 30}).enable(["table", "strikethrough"])
_NAMES = {
    "paragraph": "p",
    "bullet_list": "ul",
    "ordered_list": "ol",
    "list_item": "li",
    "softbreak": "br",
    "hardbreak": "br",
    **{name: name for name in ("heading", "blockquote", "strong", "em", "s", "hr")},
    **{name: name for name in ("table", "thead", "tbody", "tr", "th", "td")},
}
_ADDRESS = re.compile(r"(?:https?://|mailto:)[^\s]+", re.IGNORECASE)
_THOUGHT = re.compile(r"^\s*<think>[\s\S]*?</think>\s*")
_RENDERED = frozenset({"user", "system", "assistant"})


def parse_markdown(text: str) -> list[Node] | None:
    """Parse a text, or return None if it is too large to be parsed quickly."""
    if len(text) > MAX_CHARS or text.count("[") > MAX_BRACKETS:
        return None
    tokens = _PARSER.parse(text)
    if sum(1 + len(token.children or ()) for token in tokens) > MAX_TOKENS:
        return None
    return _children(SyntaxTreeNode(tokens))


def markdown_of(result: Any) -> list[list[list[Node] | None]]:
    """Parse the texts of a result.

    Args:
        result: the parsed JSON of the result.

    Returns:
        For each message, one tree per part of its content, or None for a part that is shown as raw text. The
        list of a tool's message is empty. Reasoning between think tags is not included, because the pages
        show it separately.
    """
    remaining = MAX_TOTAL_CHARS
    found: list[list[list[Node] | None]] = []
    for message in result.get("messages") or []:
        trees: list[list[Node] | None] = []
        for text in _texts(message):
            remaining -= len(text or "")
            trees.append(parse_markdown(text) if text is not None and remaining >= 0 else None)
        found.append(trees)
    return found


def _texts(message: Any) -> list[str | None]:
    """Return the text of each part of a message's content; None for a part without text."""
    if not isinstance(message, dict) or message.get("role") not in _RENDERED:
        return []
    content = message.get("content")
    if isinstance(content, str):
        return [_THOUGHT.sub("", content, count=1)] if content else []
    if not isinstance(content, list):
        return []
    texts = [part.get("text") if isinstance(part, dict) else part for part in content]
    return [text if isinstance(text, str) else None for text in texts]


def _children(node: SyntaxTreeNode) -> list[Node]:
    return [element for child in node.children for element in _nodes(child)]


def _nodes(node: SyntaxTreeNode) -> list[Node]:
    kind = node.type
    if kind == "text":
        return [node.content] if node.content else []
    # A list without blank lines has hidden paragraphs.
    if kind == "inline" or (kind == "paragraph" and node.hidden):
        return _children(node)
    if kind == "code_inline":
        return [("code", [node.content])]
    if kind in ("fence", "code_block"):
        return [("pre", [node.content.removesuffix("\n")], node.info.strip() if kind == "fence" else "")]
    if kind == "image":
        return [("img", [node.content], str(node.attrs.get("src", "")))]
    if kind == "link":
        address = str(node.attrs.get("href", ""))
        return [("a", _children(node), address)] if _ADDRESS.fullmatch(address) else _children(node)
    if kind not in _NAMES:
        return [node.content] if node.content else []
    return [(_NAMES[kind], _children(node), *_value(node))]


def _value(node: SyntaxTreeNode) -> tuple[int | str, ...]:
    if node.type == "heading":
        return (int(node.tag[1:]),)
    if node.type == "ordered_list":
        return (int(node.attrs.get("start", 1)),)
    if node.type in ("th", "td"):
        return (str(node.attrs.get("style", "")).removeprefix("text-align:"),)
    return ()
