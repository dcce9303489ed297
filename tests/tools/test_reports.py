from hypothesis import given
from hypothesis import strategies as st

from prorl_envs.tools.reports import Reports

NONCE = "00112233445566ff"


@given(
    st.binary(max_size=300).filter(lambda garbage: NONCE.encode() not in garbage),
    st.integers(0, 255),
    st.integers(1, 30),
)
def test_a_report_is_found_behind_garbage_however_it_is_cut(garbage: bytes, status: int, step: int) -> None:
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


def test_a_directory_may_hold_newlines_and_bytes_that_are_no_unicode() -> None:
    assert Reports().feed(NONCE.encode() + b" 0 /a\nb \xff\0", NONCE) == (0, "/a\nb �")


def test_a_flood_is_forgotten_and_the_report_behind_it_found() -> None:
    reports = Reports()
    for _ in range(100):
        assert reports.feed(b"x" * 65536, NONCE) is None
    assert reports.feed(f"{NONCE} 3 /\0".encode(), NONCE) == (3, "/")


def test_a_status_that_is_no_number_is_no_report() -> None:
    assert Reports().feed(f"{NONCE} soon /\0".encode(), NONCE) is None
