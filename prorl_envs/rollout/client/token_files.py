"""Token files: tokens of services on this machine. Only the user of the service can read its file.

A service on loopback without a configured token generates a token, which is in a file while the service runs.
Clients of the same user find the file by the address of the service, as Jupyter's clients do. Each start
generates a new token. So another user who binds the address after a stop, and receives the old token from a
client, cannot use it with the next service. The folder is private, so its files need no checks of their own.
"""

import contextlib
import functools
import ipaddress
import logging
import os
import re
import secrets
import socket
import stat
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import httpx

from prorl_envs.errors import InputError

log = logging.getLogger(__name__)

_TOKEN = re.compile(r"[A-Za-z0-9_-]{16,200}")


class Address(NamedTuple):
    """IP address and TCP port."""

    host: str
    port: int


def token_folder() -> Path:
    """Return the folder of token files: `prorl-envs/tokens` in `$XDG_STATE_HOME`, or in `~/.local/state`.

    Raises:
        InputError: the user has no home directory.
    """
    state_home = Path(os.environ.get("XDG_STATE_HOME") or "")
    try:
        state = state_home if state_home.is_absolute() else Path.home() / ".local" / "state"
    except RuntimeError as error:
        raise InputError("there is no home directory for the token", hint="set XDG_STATE_HOME") from error
    return state / "prorl-envs" / "tokens"


def new_token() -> str:
    """Return a new random token."""
    return secrets.token_urlsafe(32)


@contextmanager
def stored_token(token: str, address: Address) -> Iterator[Path]:
    """Write a token to the file of an address, and remove the file after the block.

    Yields:
        The file.

    Raises:
        InputError: the file cannot be written, or other users could change it.
    """
    folder = token_folder()
    file = folder / _name(address)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_private(folder)
        temporary = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
        temporary.touch(mode=0o600)
        temporary.write_text(f"{token}\n")
        temporary.replace(file)
    except OSError as error:
        variable = "XDG_STATE_HOME" if os.environ.get("XDG_STATE_HOME") else "HOME"
        raise InputError(
            f"the token cannot be written to {folder}: {error.strerror or error}",
            hint=f"set {variable} to a directory that you own and can write to",
        ) from error
    try:
        yield file
    finally:
        drop_token(address, only=token)


def drop_token(address: Address, *, only: str = "") -> None:
    """Remove the file of an address, if it exists. With `only`, remove it only if it has this token."""
    if not only or read_token(address) == only:
        with contextlib.suppress(OSError, InputError):
            (token_folder() / _name(address)).unlink(missing_ok=True)


def read_token(address: Address) -> str | None:
    """Return the token of an address. Return None if there is no file, or other users can access it."""
    try:
        folder = token_folder()
        _check_private(folder)
        token = (folder / _name(address)).read_text(errors="replace").strip()
    except FileNotFoundError:
        return None
    except (OSError, InputError) as error:
        _warn_unread(address, str(error))
        return None
    if not _TOKEN.fullmatch(token):
        _warn_unread(address, "it contains no token")
        return None
    return token


@functools.cache  # one warning per address, since clients read the file for each request
def _warn_unread(address: Address, reason: str) -> None:
    log.warning("the token file of %s:%d is ignored: %s", *address, reason)


def addresses_of(url: str) -> list[Address]:
    """Return the loopback addresses that a URL may refer to; empty if it refers to another machine."""
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or 80
    if parts.scheme != "http":
        return []
    if host == "localhost":
        return [Address("127.0.0.1", port), Address("::1", port)]
    try:
        ip_address = ipaddress.ip_address(host)
    except ValueError:
        return []
    return [Address(str(ip_address), port)] if ip_address.is_loopback else []


class LocalToken(httpx.Auth):
    """HTTP authentication with the token file of a service of the same user on this machine.

    If a token is refused, the file is read again, since the service may have restarted.
    """

    def __init__(self) -> None:
        self._cached: tuple[Address, str] | None = None

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response]:
        """See `httpx.Auth.auth_flow`."""
        url = str(request.url)
        sent = self._cached = self._cached or _find(url)
        response = yield _add_token(request, sent)
        if response.status_code == httpx.codes.UNAUTHORIZED:
            self._cached = _find(url)
            if self._cached not in (None, sent):
                yield _add_token(request, self._cached)


def _add_token(request: httpx.Request, cached: tuple[Address, str] | None) -> httpx.Request:
    """Add a token to a request. Change `localhost` in its URL to the exact address of the token file, since
    another user may listen at the other address of `localhost`."""
    if cached is not None:
        address, token = cached
        request.url = request.url.copy_with(host=address.host)
        request.headers["Authorization"] = f"Bearer {token}"
    return request


def _find(url: str) -> tuple[Address, str] | None:
    for address in addresses_of(url):
        if (token := read_token(address)) is not None:
            return address, token
    return None


def _name(address: Address) -> str:
    """Return the file name of an address, with the host name, since machines may share a home directory."""
    return f"service_{socket.gethostname().replace('/', '_')}_{address.host}_{address.port}"


def _check_private(folder: Path) -> None:
    """Check that a folder is private to this user.

    Raises:
        OSError: it is missing, a link or a file, of another owner, or other users have access.
    """
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(f"{folder} is not a directory")
    if status.st_uid != os.geteuid():
        raise OSError(f"{folder} belongs to another user")
    if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise OSError(f"{folder} is open to others; `chmod go=` removes their access")
