from hypothesis import given
from hypothesis import strategies as st

from prorl_envs.tools.protocol.output import OutputBuffer, clip


@given(st.lists(st.binary(max_size=40), max_size=30), st.integers(2, 60))
def test_both_ends_are_kept_and_the_rest_is_counted(pieces: list[bytes], limit: int) -> None:
    buffer = OutputBuffer(limit)
    for piece in pieces:
        buffer.feed(piece)
    captured = buffer.take()
    whole = b"".join(pieces)
    assert len(captured.head) + captured.omitted + len(captured.tail) == len(whole)
    assert len(captured.head) + len(captured.tail) <= limit
    assert whole.startswith(captured.head)
    assert whole.endswith(captured.tail)
    if len(whole) <= limit:
        assert captured.head + captured.tail == whole


@given(st.text(), st.integers(2, 60))
def test_a_cut_creates_no_new_character(text: str, limit: int) -> None:
    clipped, _ = clip(text.replace("�", ""), limit)
    assert "�" not in clipped


def test_the_cut_is_announced_with_its_size() -> None:
    buffer = OutputBuffer(10)
    buffer.feed(b"aaaaa" + b"b" * 90 + b"ccccc")
    captured = buffer.take()
    assert captured.omitted == 90
    assert captured.text() == "aaaaa\n[... 90 bytes of output left out ...]\nccccc"
    assert captured.data() == captured.text().encode()


def test_bytes_of_a_cut_character_are_counted_as_left_out() -> None:
    buffer = OutputBuffer(6)
    buffer.feed("aaé".encode()[:3] + "xé".encode() * 20 + "éz".encode()[1:])
    assert "�" not in buffer.take().text().splitlines()[0]


def test_taking_the_output_resets_it() -> None:
    buffer = OutputBuffer(4)
    buffer.feed(b"abcdefgh")
    assert buffer.take().omitted == 4
    buffer.feed(b"xy")
    assert buffer.take().text() == "xy"


def test_output_that_is_not_unicode_is_replaced() -> None:
    buffer = OutputBuffer(10)
    buffer.feed(b"a\xffb")
    assert buffer.take().text() == "a�b"
