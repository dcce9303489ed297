import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_envs.tools.protocol.messages import (
    Bash,
    BashDone,
    Edit,
    Framer,
    WireError,
    decode_cell_done,
    decode_reply,
    decode_request,
    encode,
)


@st.composite
def cut_streams(draw: st.DrawFn) -> tuple[list[bytes], list[bytes]]:
    """Generate frames, and their stream cut at arbitrary places."""
    frames = draw(st.lists(st.binary(max_size=50), max_size=8))
    stream = b"".join(struct.pack(">I", len(frame)) + frame for frame in frames)
    cuts = sorted(draw(st.lists(st.integers(0, len(stream)), max_size=10)))
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    return frames, pieces


@given(cut_streams())
def test_frames_are_the_same_however_the_stream_is_cut(
    case: tuple[list[bytes], list[bytes]],
) -> None:
    frames, pieces = case
    framer = Framer()
    assert [frame for piece in pieces for frame in framer.feed(piece)] == frames


@given(st.integers(101, 2**32 - 1))
def test_a_frame_over_the_limit_is_refused_by_its_header(length: int) -> None:
    with pytest.raises(WireError, match="announced"):
        Framer(limit=100).feed(struct.pack(">I", length))


@given(st.text(), st.integers(0, 2**40), st.floats(0, 1e6))
def test_requests_survive_a_round_trip(command: str, id_: int, timeout_s: float) -> None:
    request = Bash(id_, "main", command, timeout_s)
    [frame] = Framer().feed(encode(request))
    assert decode_request(frame) == request


def test_optional_fields_survive_a_round_trip() -> None:
    request = Edit(3, "view", "/a", view_range=[1, -1])
    [frame] = Framer().feed(encode(request))
    assert decode_request(frame) == request


@given(st.binary(max_size=200))
def test_garbage_raises_only_a_wire_error(data: bytes) -> None:
    for decode in (decode_request, decode_reply, decode_cell_done):
        try:
            decode(data)
        except WireError:
            continue


def test_wrong_types_are_refused() -> None:
    frame = encode(BashDone(1, "out", 0, 0, "/", False, ""))[4:]
    assert decode_reply(bytes(frame)) == BashDone(1, "out", 0, 0, "/", False, "")
    with pytest.raises(WireError, match="not a reply"):
        decode_reply(bytes(frame.replace(b"\xa3out", b"\xc4\x03out")))  # bytes instead of text
