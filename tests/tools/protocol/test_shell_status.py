from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from prorl_envs.tools.protocol.shell_status import Reports

NONCE = "00112233445566ff"


@given(
    st.binary(max_size=300).filter(lambda garbage: NONCE.encode() not in garbage),
    st.integers(0, 255),
    st.integers(1, 30),
)
def test_a_report_is_found_after_garbage_however_it_is_cut(garbage: bytes, status: int, step: int) -> None:
    stream = garbage + f"{NONCE} {status} /some dir\0".encode()
    reports = Reports()
    found = [
        report
        for start in range(0, len(stream), step)
        if (report := reports.feed(stream[start : start + step], NONCE))
    ]
    assert found == [(status, "/some dir")]


def test_another_commands_report_is_ignored() -> None:
    assert Reports().feed(b"ffffffffffffffff 0 /\0", NONCE) is None


def test_a_directory_may_hold_newlines_and_invalid_unicode() -> None:
    assert Reports().feed(NONCE.encode() + b" 0 /a\nb \xff\0", NONCE) == (0, "/a\nb �")


def test_a_flood_is_discarded_and_the_report_after_it_found() -> None:
    reports = Reports()
    for _ in range(100):
        assert reports.feed(b"x" * 65536, NONCE) is None
    assert reports.feed(f"{NONCE} 3 /\0".encode(), NONCE) == (3, "/")


def test_a_report_with_an_invalid_status_is_ignored() -> None:
    assert Reports().feed(f"{NONCE} soon /\0".encode(), NONCE) is None


#: Output of hostile commands: pieces of reports, real ones with other nonces, noise.
PIECES = st.one_of(
    st.binary(max_size=40),
    st.sampled_from(
        [b"\0", b" ", b"0 /\0", b"7 /etc\0", NONCE[:-1].encode() + b" 0 /\0", NONCE[1:].encode()]
    ),
    st.from_regex(rb"[0-9a-f]{16} [0-9]{1,3} /[a-z]{0,5}\0", fullmatch=True),
    st.integers(0, 3 * Reports.LIMIT).map(lambda size: b"x" * size),
)
STREAMS = st.lists(PIECES, max_size=12).map(b"".join)


def first_report(stream: bytes, cuts: list[int]) -> tuple[int, str] | None:
    places = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    reports = Reports()
    for start, end in pairwise(places):
        if report := reports.feed(stream[start:end], NONCE):
            return report
    return None


@given(STREAMS.filter(lambda stream: NONCE.encode() not in stream), st.lists(st.integers(0, 60_000)))
def test_without_the_nonce_no_report_is_accepted(stream: bytes, cuts: list[int]) -> None:
    assert first_report(stream, cuts) is None


@given(
    STREAMS,
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=4096),
    STREAMS,
    st.lists(st.integers(0, 100_000)),
)
def test_the_report_is_the_same_however_the_stream_is_cut(
    before: bytes, directory: str, after: bytes, cuts: list[int]
) -> None:
    stream = before + f"{NONCE} 7 /{directory}\0".encode() + after
    whole = first_report(stream, [])
    assert whole is not None
    assert first_report(stream, cuts) == whole
    if NONCE.encode() not in before + directory.encode():
        assert whole == (7, f"/{directory}")


@given(st.binary(max_size=30).filter(lambda status: not (status.isdigit() and len(status) <= 3)))
def test_a_status_is_a_small_number(status: bytes) -> None:
    if b" " not in status and b"\0" not in status:
        assert Reports().feed(NONCE.encode() + b" " + status + b" /\0", NONCE) is None
