"""What an allowlist lets through, and how requests to the proxy are read."""

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_envs.errors import SandboxError
from prorl_envs.sandbox.network_policy import Policy, Target, is_public, parse_target
from prorl_envs.sandbox.proxy_request import Refused, parse_request

LABEL = st.from_regex(r"[a-z0-9_]([a-z0-9_-]{0,8}[a-z0-9_])?", fullmatch=True)
NAME = (
    st.lists(LABEL, min_size=1, max_size=4)
    .map(".".join)
    .filter(lambda name: (target := parse_target(name, 80)) is not None and target.address is None)
)
PORT = st.integers(1, 65535)
POLICY = Policy(["pypi.org", "*.example.com", "git.example.net:22", "10.1.2.3:8000", "[2001:db8::1]:80"])

LISTED = """pypi.org:443 PyPI.org:80 a.example.com:443 a.b.EXAMPLE.com:80 git.example.net:22 10.1.2.3:8000
    [2001:db8::1]:80 [2001:DB8::1]:80"""
UNLISTED = """pypi.org:22 www.pypi.org:443 example.com:443 aexample.com:443 git.example.net:443
    pypi.org.evil.net:443 10.1.2.3:80 10.1.2.4:8000 [2001:db8::2]:80 xn--pypi-1.org:443"""
SPELLINGS = """pypi.org.:443 user@pypi.org:443 pypi.org pypi.org: pypi.org:0 pypi.org:65536 pypi.org:+1
    pypi.org:80:80 pуpi.org:443 pypi.org:४४३ 127.1:80 0x7f.1:80 2130706433:80 0177.0.0.1:80 1.2.3.4.5:80
    ::1:80 [::1%eth0]:80 [0:0::1]:80 [::1]80 [pypi.org]:80 [10.1.2.3]:80 :80 a..b:80 -a.org:80
    *.example.com:80"""
NO_PATTERNS = """* *. *.*.org a.* http://a.org a.org/x a.org:x a.org: a.org. ü.org ::1 *.1.2.3 127.1 [::01]
    *.[::1] u@a.org 10.0.0.0/8"""
NOT_PUBLIC = """127.0.0.1 127.9.9.9 10.0.0.1 172.16.0.1 192.168.1.1 169.254.169.254 100.64.0.1 0.0.0.0
    224.0.0.1 255.255.255.255 240.0.0.1 198.18.0.1 192.0.2.1 :: ::1 fe80::1 fe80::1%1 fd00::1 fec0::1 ff02::1
    ::ffff:127.0.0.1 ::127.0.0.1 64:ff9b::7f00:1 2002:7f00:1:: 2001:0:4136:e378:8000:63bf:3fff:fdd2
    2001:db8::1 fd00:ec2::254"""


@pytest.mark.parametrize("asked", LISTED.split())
def test_what_is_listed_is_allowed(asked: str) -> None:
    target = parse_target(asked)
    assert target is not None
    assert POLICY.refusal(target) == ""


@pytest.mark.parametrize("asked", UNLISTED.split())
def test_what_is_not_is_refused(asked: str) -> None:
    target = parse_target(asked)
    assert target is not None
    assert "not on the allowlist" in POLICY.refusal(target)


@pytest.mark.parametrize(
    "text", [*SPELLINGS.split(), "", "pypi.org\n:80", "pypi.org:80\n", f"{'a' * 64}.org:80"]
)
def test_other_spellings_are_no_target(text: str) -> None:
    assert parse_target(text) is None


@pytest.mark.parametrize("pattern", ["", *NO_PATTERNS.split()])
def test_what_is_no_pattern_is_said_so(pattern: str) -> None:
    with pytest.raises(SandboxError, match="not a host"):
        Policy([pattern])


@given(NAME, NAME, PORT)
def test_a_name_is_allowed_only_by_itself_or_a_pattern_above_it(listed: str, asked: str, port: int) -> None:
    target = Target(asked, port)
    assert (Policy([f"{listed}:{port}"]).refusal(target) == "") == (listed == asked)
    below = Policy([f"*.{listed}:{port}"])
    assert (below.refusal(target) == "") == asked.endswith(f".{listed}")
    assert below.refusal(Target(f"{asked}.{listed}", port)) == ""
    assert (Policy([listed]).refusal(Target(listed, port)) == "") == (port in (80, 443))


@given(st.text(max_size=40) | st.from_regex(r"\A[\[\]:@.%*0-9a-fx-]{1,30}\Z"))
def test_a_target_is_in_the_one_spelling_whatever_the_text(text: str) -> None:
    target = parse_target(text, 80)
    if target is not None:
        assert parse_target(str(target)) == target
        assert target.host == target.host.lower() and not set(target.host) & set("@%[]/ \r\n*")
        if target.address is not None:
            assert str(target.address) == target.host


@pytest.mark.parametrize("address", NOT_PUBLIC.split())
def test_these_addresses_are_not_public(address: str) -> None:
    assert not is_public(ipaddress.ip_address(address))
    assert "not public" in POLICY.address_refusal(
        Target("pypi.org", 443), ipaddress.ip_address(address), own=False
    )


def test_a_public_address_is_refused_only_where_it_is_the_machines_own() -> None:
    name = Target("pypi.org", 443)
    assert POLICY.address_refusal(name, ipaddress.ip_address("8.8.8.8"), own=False) == ""
    assert "not public" in POLICY.address_refusal(name, ipaddress.ip_address("8.8.8.8"), own=True)


def test_an_address_that_is_listed_may_be_private() -> None:
    private = ipaddress.ip_address("10.1.2.3")
    policy = Policy(["*.example.com:8000", "10.1.2.3:8000", "*.example.com"])
    assert policy.address_refusal(Target("a.example.com", 8000), private, own=True) == ""
    assert "not public" in policy.address_refusal(Target("a.example.com", 443), private, own=False)


def test_a_request_is_passed_on_without_what_is_between_neighbours() -> None:
    request = parse_request(
        b"POST http://PyPI.org:8080?q HTTP/1.1\r\nHost: evil.net\r\nProxy-Authorization: x\r\n"
        b"Connection: keep-alive, X-Own\r\nX-Own: 1\r\nX-Kept:  2 \r\ncontent-length: 3\r\n\r\n"
    )
    assert request.target == Target("pypi.org", 8080)
    assert request.head == (
        b"POST /?q HTTP/1.1\r\nHost: PyPI.org:8080\r\nX-Kept: 2\r\ncontent-length: 3\r\n"
        b"Connection: close\r\n\r\n"
    )
    assert request.body_bytes == 3


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET / HTTP/1.1", 400),
        (b"GET https://a.org/ HTTP/1.1", 400),
        (b"get http://a.org/ HTTP/1.1", 400),
        (b"GET  http://a.org/ HTTP/1.1", 400),
        (b"GET http://a.org/ HTTP/2.0", 400),
        (b"GET http://a.org/ HTTP/1.1\nX: y", 400),
        (b"GET http://a.org/\xff HTTP/1.1", 400),
        (b"\x16\x03\x01", 400),
        (b"", 400),
        (b"GET http://a.org/ HTTP/1.1\r\n folded: x", 400),
        (b"GET http://a.org/ HTTP/1.1\r\nName : x", 400),
        (b"GET http://a.org/ HTTP/1.1\r\nName: a\rb", 400),
        (b"GET http://a.org/ HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 1", 400),
        (b"GET http://a.org/ HTTP/1.1\r\nContent-Length: -1", 400),
        (b"GET http://a.org/ HTTP/1.1\r\nConnection: content-length\r\nContent-Length: 1", 400),
        (b"GET http://a.org/ HTTP/1.1\r\nTransfer-Encoding: chunked", 501),
        (b"GET http://u@a.org/ HTTP/1.1", 403),
        (b"GET http://a.org./ HTTP/1.1", 403),
        (b"GET http:///x HTTP/1.1", 403),
        (b"CONNECT a.org HTTP/1.1", 403),
        (b"CONNECT http://a.org:80 HTTP/1.1", 403),
    ],
)
def test_other_requests_are_refused(head: bytes, status: int) -> None:
    with pytest.raises(Refused) as refused:
        parse_request(head + b"\r\n\r\n")
    assert refused.value.status == status


@given(st.binary(max_size=200) | st.binary(max_size=60).map(lambda b: b"GET http://a.org/ HTTP/1.1\r\n" + b))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    """And what is passed on is one head: nothing of it could be a second request."""
    try:
        request = parse_request(data + b"\r\n\r\n")
    except Refused:
        return
    if request.head is not None:
        assert request.head.count(b"\r\n\r\n") == 1
        assert request.head.count(b"\n") == request.head.count(b"\r") == request.head.count(b"\r\n")
