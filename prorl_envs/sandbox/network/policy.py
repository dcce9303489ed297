"""Allowlist policy of a sandbox. Pure: takes names, ports and addresses, returns the reason for a refusal.

Hosts are compared in one canonical spelling: names in lower-case ASCII, addresses as the standard library
prints them. Any other spelling that some resolver would understand (a trailing dot, `127.1`, `0x7f.1`, names
not in ASCII, a user before an `@`) is refused, not translated.
"""

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass

from prorl_envs.errors import SandboxError

type Address = ipaddress.IPv4Address | ipaddress.IPv6Address

#: Ports of a pattern without a port.
DEFAULT_PORTS = frozenset({80, 443})
PATTERNS_LIMIT = 1000

_LABEL = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*")
#: A last label that makes some resolvers read the whole name as an address
#: (https://url.spec.whatwg.org/#hosts).
_NUMBER = re.compile(r"(?:.*\.)?(?:[0-9]+|0x[0-9a-f]*)")
#: Before a name that may lead to any address.
_PRIVATE = "private:"
_PORT = re.compile(r"[1-9][0-9]{0,4}")
_GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")
#: Global addresses that contain an IPv4 address, to which a gateway connects: 6to4 and Teredo.
_TUNNELS = (ipaddress.IPv6Network("2002::/16"), ipaddress.IPv6Network("2001::/32"))


@dataclass(frozen=True, slots=True)
class Target:
    """Destination of a connection.

    Args:
        host: name or address in the canonical spelling.
        port: 1 to 65535.
    """

    host: str
    port: int

    @property
    def address(self) -> Address | None:
        """The IP address in `host`; None if `host` is a name."""
        try:
            return ipaddress.ip_address(self.host)
        except ValueError:
            return None

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Pattern:
    """Entry of an allowlist.

    Args:
        host: as in `Target`.
        port: None means `DEFAULT_PORTS`.
        below: True means the names below `host`, at any depth, and not `host` itself.
        private: True means that the names may lead to any address, also to one that is not public.
    """

    host: str
    port: int | None
    below: bool
    private: bool

    def matches(self, host: str, port: int) -> bool:
        if port not in DEFAULT_PORTS if self.port is None else port != self.port:
            return False
        return host.endswith(f".{self.host}") if self.below else host == self.host


class Policy:
    """Allowlist of a sandbox.

    Args:
        patterns: `host`, `host:port`, `*.host` or `*.host:port`; a host is a name, an IPv4 address or an IPv6
            address in brackets. With `private:` before it, a name may lead to any address.

    Raises:
        SandboxError: a pattern is none of these, or there are too many.
    """

    def __init__(self, patterns: Iterable[str]) -> None:
        if isinstance(patterns, str):
            raise SandboxError("`allow` is one string", hint=f"make it a tuple: ({patterns!r},)")
        self._patterns = tuple(map(_pattern, patterns))
        if len(self._patterns) > PATTERNS_LIMIT:
            raise SandboxError(f"more than {PATTERNS_LIMIT} hosts are allowed", hint="allow `*.domain`")

    def lists(self, host: str, port: int) -> bool:
        """Return whether a pattern matches this host and port."""
        return any(pattern.matches(host, port) for pattern in self._patterns)

    def refusal(self, target: Target) -> str:
        """Return why `target` is refused before its name is looked up; empty if it is not."""
        if self.lists(target.host, target.port):
            return ""
        return f"{target} is not on the allowlist of this sandbox"

    def address_refusal(self, target: Target, address: Address, *, local: bool) -> str:
        """Return why an address of the target's name is refused; empty if it is not.

        Args:
            local: whether the address belongs to this machine.
        """
        named = any(p.private and p.matches(target.host, target.port) for p in self._patterns)
        if named or self.lists(str(address), target.port):
            return ""
        if local or not is_public(address):
            return f"{target} leads to an address that is not public and not on the allowlist of this sandbox"
        return ""


def is_public(address: Address) -> bool:
    """Return whether this is a public internet address of a single machine."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return is_public(address.ipv4_mapped)
        if address not in _GLOBAL_UNICAST or any(address in network for network in _TUNNELS):
            return False
    return address.is_global and not address.is_multicast and not address.is_reserved


def parse_target(text: str, default_port: int | None = None) -> Target | None:
    """Parse `host` and port of a request; None unless the spelling is canonical, ignoring case.

    Args:
        default_port: used if `text` has no port; None makes the port mandatory.
    """
    if not text.isascii():
        return None
    host, port = _split(text.lower())
    if not port and text.endswith(":"):
        return None
    number = _port(port) if port else default_port
    if number is None or not _is_host(host):
        return None
    return Target(host.strip("[]"), number)


def _pattern(text: str) -> Pattern:
    lower = text.lower()
    host, port = _split(lower.removeprefix(_PRIVATE))
    private, below = lower.startswith(_PRIVATE), host.startswith("*.")
    name = host.removeprefix("*.")
    number = _port(port) if port else None
    valid = _is_name(name) if below or private else _is_host(name)
    if not text.isascii() or not valid or (port and number is None) or text.endswith(":"):
        raise SandboxError(
            f"not a host that can be allowed: {text!r}",
            hint="host, host:port, *.host or *.host:port, in ASCII (xn--...) and without a scheme; IPv6 "
            "addresses in brackets and in their shortest form; private: only before names",
        )
    return Pattern(name.strip("[]"), number, below, private)


def _split(text: str) -> tuple[str, str]:
    """Return the host (with its brackets) and the port (empty if it is missing)."""
    if text.startswith("["):
        host, bracket, rest = text.partition("]")
        # Only a port may follow the bracket; any other text becomes an invalid port.
        return host + bracket, rest.removeprefix(":") if rest.startswith(":") or not rest else "?"
    host, _, port = text.partition(":")
    return host, port


def _port(text: str) -> int | None:
    return int(text) if _PORT.fullmatch(text) and int(text) < 65536 else None


def _is_host(host: str) -> bool:
    return _is_name(host) or _is_address(host)


def _is_name(host: str) -> bool:
    return len(host) <= 253 and bool(_NAME.fullmatch(host)) and not _NUMBER.fullmatch(host)


def _is_address(host: str) -> bool:
    bracketed = host.startswith("[")
    try:
        address = ipaddress.ip_address(host[1:-1] if bracketed else host)
    except ValueError:
        return False
    written = f"[{address}]" if address.version == 6 else str(address)
    return written == host and "%" not in host
