import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_envs.tools.server.keys import KEYS, names_key, next_piece, to_type


def pieces(text: str, *, by_line: bool) -> list[bytes]:
    found: list[bytes] = []
    while text:
        piece, text = next_piece(text, by_line=by_line, first=not found)
        found.append(piece)
    return found


@pytest.mark.parametrize(
    ("text", "typed"),
    [
        ("C-c", "\x03"),
        ("C-D", "\x04"),
        ("C-[", "\x1b"),
        ("C-_", "\x1f"),
        ("ESC", "\x1b"),
        ("ENTER", "\n"),
        ("", ""),
        ("yes", "yes\n"),
        ("yes\n", "yes\n"),
        ("\n", "\n"),
        ("C-", "C-\n"),
        ("C-cc", "C-cc\n"),
        ("C-1", "C-1\n"),
        ("C-{", "C-{\n"),
        ("C-é", "C-é\n"),
    ],
)
def test_keys_have_names_and_enter_follows_text(text: str, typed: str) -> None:
    assert to_type(text) == typed


def test_a_line_too_long_for_terminals_is_refused() -> None:
    assert to_type("x" * 4000 + "\n" + "é" * 2000)
    with pytest.raises(ValueError, match="longer than 4000 bytes"):
        to_type("a\n" + "é" * 2001)


@given(st.text(alphabet="ab\né", max_size=40))
def test_lines_are_sent_one_by_one_and_completely(text: str) -> None:
    typed = to_type(text)
    lines = pieces(typed, by_line=True)
    assert b"".join(lines) == typed.encode()
    assert all(line.count(b"\n") == 1 and line.endswith(b"\n") for line in lines)


@given(st.text(alphabet="ab\né", max_size=40))
def test_in_key_mode_enter_is_sent_separately(text: str) -> None:
    typed = to_type(text)
    keys = pieces(typed, by_line=False)
    assert b"".join(keys) == typed.replace("\n", "\r").encode()
    assert all(key == b"\r" or b"\r" not in key for key in keys)


def test_the_first_key_is_sent_alone_unless_it_is_a_code() -> None:
    assert pieces("yes\n", by_line=False) == [b"y", b"es", b"\r"]
    assert pieces(KEYS["UP"], by_line=False) == [b"\x1b[A"]


def test_only_key_names_and_empty_text_are_keys() -> None:
    assert all(names_key(text) for text in ("", "C-c", *KEYS))
    assert not any(names_key(text) for text in ("ls", "C-cat", " ", "enter", "C-`", "C-?", "D-c", "C-"))
