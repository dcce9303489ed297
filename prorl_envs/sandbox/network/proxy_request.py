"""Strict parser of the head of a request to an HTTP proxy (RFC 9110, 9112). Pure.

It accepts `CONNECT host:port` and requests with an absolute `http://` address. Any text that two programs
could read in two ways is refused.
"""

import re
from dataclasses import dataclass

from prorl_envs.sandbox.network.policy import Target, parse_target

_LINE = re.compile(rb"([A-Z]{1,20}) ([\x21-\x7e]+) (HTTP/1\.[01])")
_ADDRESS = re.compile(r"http://([^/?#]*)([/?][^#]*)?", re.IGNORECASE)
_HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\0\r\n]*)")
#: Headers that apply to a single hop (RFC 9110, 7.6.1); `host` is rebuilt from the address.
_NOT_PASSED_ON = frozenset(
    {b"connection", b"keep-alive", b"proxy-authorization", b"proxy-connection", b"te", b"upgrade", b"host"}
)


class ProxyRefused(Exception):
    """Refusal of a request. The client receives only an error.

    Args:
        status: HTTP status of the answer.
        reason: one line of ASCII, for the model to read.
    """

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


@dataclass(frozen=True, slots=True)
class ProxyRequest:
    """Parsed proxy request.

    Args:
        target: destination of the connection.
        head: head to send to the server; None for a tunnel.
        body_bytes: length of the body that follows.
    """

    target: Target
    head: bytes | None = None
    body_bytes: int = 0


def parse_request(head: bytes) -> ProxyRequest:
    """Parse a head, including its empty line.

    Raises:
        ProxyRefused: the head is malformed, or its kind of request is not served.
    """
    first, *lines = head.removesuffix(b"\r\n\r\n").split(b"\r\n")
    line = _LINE.fullmatch(first)
    if line is None:
        raise ProxyRefused(400, "not an HTTP/1.1 request")
    method, address, version = line[1], line[2].decode(), line[3]
    headers = [_header(text) for text in lines]
    if method == b"CONNECT":
        return ProxyRequest(_checked(parse_target(address)))
    url = _ADDRESS.fullmatch(address)
    if url is None:
        raise ProxyRefused(400, "this is a proxy: request http://host/... or CONNECT host:port")
    target = _checked(parse_target(url[1], 80))
    path = url[2] or "/"
    path = path if path.startswith("/") else f"/{path}"
    dropped = _NOT_PASSED_ON | _named_by_connection(headers)
    if b"transfer-encoding" in dropped or b"content-length" in dropped:
        raise ProxyRefused(400, "the Connection header lists a header that frames the body")
    passed = [(name, value) for name, value in headers if name.lower() not in dropped]
    host = url[1].encode() if ":" in url[1] else target.host.encode()
    rewritten = [
        b"%s %s %s" % (method, path.encode(), version),
        b"Host: " + host,
        *(b"%s: %s" % header for header in passed),
        b"Connection: close",
    ]
    return ProxyRequest(target, b"\r\n".join(rewritten) + b"\r\n\r\n", _body_bytes(headers))


def _header(text: bytes) -> tuple[bytes, bytes]:
    header = _HEADER.fullmatch(text)
    if header is None:
        raise ProxyRefused(400, "a header of the request is malformed")
    return header[1], header[2].rstrip(b" \t")


def _named_by_connection(headers: list[tuple[bytes, bytes]]) -> set[bytes]:
    values = [value for name, value in headers if name.lower() == b"connection"]
    return {option.strip().lower() for value in values for option in value.split(b",")}


def _body_bytes(headers: list[tuple[bytes, bytes]]) -> int:
    if any(name.lower() == b"transfer-encoding" for name, _ in headers):
        raise ProxyRefused(501, "bodies without Content-Length are not served over http: use https")
    lengths = [value for name, value in headers if name.lower() == b"content-length"]
    if not lengths:
        return 0
    if len(lengths) > 1 or not re.fullmatch(rb"[0-9]{1,15}", lengths[0]):
        raise ProxyRefused(400, "the request has no single Content-Length")
    return int(lengths[0])


def _checked(target: Target | None) -> Target:
    if target is None:
        raise ProxyRefused(
            403, "not a host and port in plain spelling (no user, no trailing dot, ASCII, [] around IPv6)"
        )
    return target
