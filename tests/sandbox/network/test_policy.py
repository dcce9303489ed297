"""Allowlist decisions, and the parsing of requests to the proxy."""

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_envs.errors import SandboxError
from prorl_envs.sandbox.network.policy import PATTERNS_LIMIT, Policy, Target, is_public, parse_target
from prorl_envs.sandbox.network.proxy_request import ProxyRefused, parse_request

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
    *.[::1] *.10.1.2.3 u@a.org 10.0.0.0/8 private: private:* private:10.1.2.3 private:[::1]
    private:private:a.org private:*.10.1.2.3 a.org:private"""
NOT_PUBLIC = """127.0.0.1 127.9.9.9 10.0.0.1 172.16.0.1 192.168.1.1 169.254.169.254 100.64.0.1 0.0.0.0
    224.0.0.1 255.255.255.255 240.0.0.1 198.18.0.1 192.0.2.1 :: ::1 fe80::1 fe80::1%1 fd00::1 fec0::1 ff02::1
    ::ffff:127.0.0.1 ::127.0.0.1 64:ff9b::7f00:1 2002:7f00:1:: 2001:0:4136:e378:8000:63bf:3fff:fdd2
    2001:db8::1 fd00:ec2::254"""


@pytest.mark.parametrize("asked", LISTED.split())
def test_listed_targets_are_allowed(asked: str) -> None:
    target = parse_target(asked)
    assert target is not None
    assert POLICY.refusal(target) == ""


@pytest.mark.parametrize("asked", UNLISTED.split())
def test_unlisted_targets_are_refused(asked: str) -> None:
    target = parse_target(asked)
    assert target is not None
    assert "not on the allowlist" in POLICY.refusal(target)


@pytest.mark.parametrize(
    "text", [*SPELLINGS.split(), "", "pypi.org\n:80", "pypi.org:80\n", f"{'a' * 64}.org:80"]
)
def test_other_spellings_of_an_address_are_no_target(text: str) -> None:
    assert parse_target(text) is None


@pytest.mark.parametrize("pattern", ["", *NO_PATTERNS.split()])
def test_an_invalid_pattern_is_reported(pattern: str) -> None:
    with pytest.raises(SandboxError, match="not a host"):
        Policy([pattern])


@given(NAME, NAME, PORT)
def test_a_name_is_allowed_only_by_itself_or_a_parents_pattern(listed: str, asked: str, port: int) -> None:
    target = Target(asked, port)
    assert (Policy([f"{listed}:{port}"]).refusal(target) == "") == (listed == asked)
    below = Policy([f"*.{listed}:{port}"])
    assert (below.refusal(target) == "") == asked.endswith(f".{listed}")
    assert below.refusal(Target(f"{asked}.{listed}", port)) == ""
    assert (Policy([listed]).refusal(Target(listed, port)) == "") == (port in (80, 443))


@given(st.text(max_size=40) | st.from_regex(r"\A[\[\]:@.%*0-9a-fx-]{1,30}\Z"))
def test_a_target_has_one_spelling_whatever_the_input(text: str) -> None:
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
        Target("pypi.org", 443), ipaddress.ip_address(address), local=False
    )


def test_a_public_address_is_refused_only_if_it_is_the_machines_own() -> None:
    name = Target("pypi.org", 443)
    assert POLICY.address_refusal(name, ipaddress.ip_address("8.8.8.8"), local=False) == ""
    assert "not public" in POLICY.address_refusal(name, ipaddress.ip_address("8.8.8.8"), local=True)


def test_a_listed_address_may_be_private() -> None:
    private = ipaddress.ip_address("10.1.2.3")
    policy = Policy(["*.example.com:8000", "10.1.2.3:8000", "*.example.com"])
    assert policy.address_refusal(Target("a.example.com", 8000), private, local=True) == ""
    assert "not public" in policy.address_refusal(Target("a.example.com", 443), private, local=False)


def test_a_name_may_be_allowed_wherever_it_leads() -> None:
    private = ipaddress.ip_address("10.1.2.3")
    policy = Policy(["private:mirror.example.com", "PRIVATE:*.corp.example.com:8000", "*.example.com"])
    for asked in ("mirror.example.com:443", "a.corp.example.com:8000"):
        target = parse_target(asked)
        assert target is not None
        assert policy.refusal(target) == "" == policy.address_refusal(target, private, local=True)
    for asked in ("a.mirror.example.com:443", "a.corp.example.com:443", "corp.example.com:443"):
        target = parse_target(asked)
        assert target is not None
        assert "not public" in policy.address_refusal(target, private, local=False)
    assert "not on the allowlist" in policy.refusal(Target("mirror.example.com", 8000))


def test_a_request_is_forwarded_without_hop_by_hop_headers() -> None:
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
    with pytest.raises(ProxyRefused) as refused:
        parse_request(head + b"\r\n\r\n")
    assert refused.value.status == status


@given(st.binary(max_size=200) | st.binary(max_size=60).map(lambda b: b"GET http://a.org/ HTTP/1.1\r\n" + b))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    """A forwarded request is one head: no part of it can be read as a second request."""
    try:
        request = parse_request(data + b"\r\n\r\n")
    except ProxyRefused:
        return
    if request.head is not None:
        assert request.head.count(b"\r\n\r\n") == 1
        assert request.head.count(b"\n") == request.head.count(b"\r") == request.head.count(b"\r\n")


def test_an_allowlist_is_bounded() -> None:
    hosts = [f"h{number}.org" for number in range(PATTERNS_LIMIT + 1)]
    assert Policy(hosts[:-1]).lists("h0.org", 443)
    with pytest.raises(SandboxError, match="more than 1000"):
        Policy(hosts)


def test_the_longest_name_is_a_host() -> None:
    name = ".".join(["a" * 49] * 5 + ["org"])
    assert len(name) == 253 and parse_target(f"{name}:80") == Target(name, 80)
    assert parse_target(f"a{name}:80") is None


def test_a_colon_without_a_port_is_no_spelling_of_the_default() -> None:
    assert parse_target("pypi.org", 80) == Target("pypi.org", 80)
    assert parse_target("pypi.org:", 80) is None


@pytest.mark.parametrize(
    ("address", "line"),
    [
        (b"http://pypi.org", b"GET / HTTP/1.1"),
        (b"http://pypi.org?a=1", b"GET /?a=1 HTTP/1.1"),
        (b"http://pypi.org/a?b", b"GET /a?b HTTP/1.1"),
    ],
)
def test_the_path_for_the_server_is_derived_from_the_target(address: bytes, line: bytes) -> None:
    request = parse_request(b"GET %s HTTP/1.1\r\nAccept: x-kept\r\nX-Kept: 1\r\n\r\n" % address)
    assert request.head is not None and request.head.split(b"\r\n") == [
        line,
        b"Host: pypi.org",
        b"Accept: x-kept",
        b"X-Kept: 1",
        b"Connection: close",
        b"",
        b"",
    ]
    assert request.body_bytes == 0


@pytest.mark.parametrize("named", [b"Transfer-Encoding", b"close, content-length"])
def test_headers_that_frame_a_body_cannot_be_dropped(named: bytes) -> None:
    with pytest.raises(ProxyRefused, match="lists a header that frames the body"):
        parse_request(b"GET http://a.org/ HTTP/1.1\r\nConnection: %s\r\n\r\n" % named)
