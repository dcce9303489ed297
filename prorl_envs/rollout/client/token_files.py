"""Token files: tokens of services on this machine. Only the user of the service can read its file.

A service on loopback without a configured token generates a token, which is in a file while the service runs.
Clients of the same user find the file by the address of the service, as Jupyter's clients do. Each start
generates a new token. So another user who binds the address after a stop, and receives the old token from a
client, cannot use it with the next service.
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
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
#: Non-blocking, since another user may have put a pipe in place of the file.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_BY_OTHERS = stat.S_IRWXG | stat.S_IRWXO


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
    folder, name = token_folder(), _name(address)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _open_folder(folder) as directory:
            _write(directory, name, token)
    except OSError as error:
        variable = "XDG_STATE_HOME" if os.environ.get("XDG_STATE_HOME") else "HOME"
        raise InputError(
            f"the token cannot be written to {folder}: {error.strerror or error}",
            hint=f"set {variable} to a directory that you own and can write to",
        ) from error
    try:
        yield folder / name
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
        with _open_folder(token_folder()) as directory:
            return _read(directory, _name(address))
    except FileNotFoundError:
        return None
    except (OSError, InputError) as error:
        _warn_unread(address, str(error))
        return None


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


@contextmanager
def _open_folder(folder: Path) -> Iterator[int]:
    """Open the folder and yield its file descriptor.

    Raises:
        OSError: the folder cannot be opened, is a link, or other users have access.
    """
    directory = os.open(folder, _DIRECTORY)
    try:
        _check(os.fstat(directory), directory=True)
        yield directory
    finally:
        os.close(directory)


def _write(directory: int, name: str, token: str) -> None:
    """Replace the file atomically, also if its name is a link."""
    temporary = f".{name}.{secrets.token_hex(8)}"
    try:
        file = os.open(temporary, _WRITE, 0o600, dir_fd=directory)
        with os.fdopen(file, "w", encoding="ascii") as stream:
            os.fchmod(file, 0o600)
            stream.write(f"{token}\n")
        os.replace(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
    except OSError:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=directory)
        raise


def _read(directory: int, name: str) -> str:
    file = os.open(name, _READ, dir_fd=directory)
    try:
        _check(os.fstat(file), directory=False)
        text = os.read(file, 1000).decode("ascii", "replace").strip()
    finally:
        os.close(file)
    if not _TOKEN.fullmatch(text):
        raise OSError(f"{name} contains no token")
    return text


def _check(status: os.stat_result, *, directory: bool) -> None:
    """Check that a file or directory is of the right kind and private to this user.

    Raises:
        OSError: wrong kind, another owner, or other users have access.
    """
    if not (stat.S_ISDIR if directory else stat.S_ISREG)(status.st_mode):
        raise OSError("it is not a regular file")
    if status.st_uid != os.geteuid():
        raise OSError("its file or folder belongs to another user")
    if status.st_mode & _BY_OTHERS:
        raise OSError("its file or folder is open to others; `chmod go=` removes their access")
