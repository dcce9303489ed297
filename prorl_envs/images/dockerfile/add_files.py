"""Archives and addresses as sources of ADD."""

import asyncio
import bz2
import hashlib
import lzma
import os
import posixpath
import socket
import stat
import tarfile
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast
from urllib.parse import urlsplit

from prorl_envs.errors import InputError
from prorl_envs.images.unpack import UnpackLimits, unpack_layer
from prorl_envs.sandbox.base import Network
from prorl_envs.sandbox.network.proxy import Gateway

if TYPE_CHECKING:
    import httpx

_BLOCK = 512
_CHUNK = 1 << 20
_DECODERS = ((b"BZh", bz2.open), (b"\xfd7zXZ\0", lzma.open))
_GZIP = b"\x1f\x8b"
_REDIRECTS = 5
_IDLE_S = 60.0


def is_address(source: str) -> bool:
    """Return True if a source of ADD is an address, not a file of the context."""
    return source.startswith(("http://", "https://", "git://", "git@", "ssh://"))


def is_archive(path: Path) -> bool:
    """Return True if a file is a tar, plain or compressed with gzip, bzip2 or xz."""
    try:
        with _decompressed(path) as stream:
            block = _first_block(path, stream)
        tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except (OSError, EOFError, ValueError, lzma.LZMAError, zlib.error, tarfile.TarError):
        return False
    return True


def _first_block(path: Path, stream: BinaryIO) -> bytes:
    start = stream.read(_BLOCK)
    if start.startswith(_GZIP):
        return zlib.decompressobj(wbits=31).decompress(start + stream.read(_CHUNK), _BLOCK)
    return start


def unpack_archive(path: Path, place: Path, limits: UnpackLimits) -> None:
    """Unpack an archive. It is hostile: names and links are resolved below `place`. Blocks.

    Args:
        place: empty directory for the files.

    Raises:
        SandboxError: the archive is damaged, or exceeds a limit.
        InputError: the archive cannot be decompressed.
    """
    try:
        with _decompressed(path) as stream:
            unpack_layer(stream, place, limits=limits)
    except (EOFError, lzma.LZMAError, ValueError) as error:
        raise InputError(f"the archive {path.name} is damaged: {error}") from error


@contextmanager
def _decompressed(path: Path) -> Iterator[BinaryIO]:
    """Open a file. Decompress bzip2 and xz, which `unpack_layer` cannot."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise InputError(f"{path.name} is not a regular file")
        start = file.read(6)
        file.seek(0)
        decode = next((decode for magic, decode in _DECODERS if start.startswith(magic)), None)
        if decode is None:
            yield file
            return
        with decode(file) as stream:
            yield cast(BinaryIO, stream)


def address_name(address: str) -> str:
    """Return the file name of an address.

    Raises:
        InputError: the address has no file name, or is not supported.
    """
    if not address.startswith(("http://", "https://")):
        raise InputError(f"{address} is not supported", hint="clone a repository with RUN git clone")
    name = posixpath.basename(urlsplit(address).path)
    if not name or name in (".", "..") or "\0" in name:
        raise InputError(
            f"{address} has no file name", hint="give a file as destination, without / at its end"
        )
    return name


async def download(
    network: Network, address: str, target: Path, *, limit: int, seconds: float, checksum: str = ""
) -> None:
    """Download a file. All hosts must be allowed, those of redirections too.

    Args:
        target: path of the new file.
        limit: most bytes of the file.
        seconds: timeout.
        checksum: checksum that the file must have (`sha256:...`); "" accepts any.

    Raises:
        InputError: the download failed, or the file has another checksum.
    """
    import httpx  # only a download needs it

    try:
        async with (
            asyncio.timeout(seconds),
            _proxy(network) as proxy,
            httpx.AsyncClient(
                proxy=proxy, timeout=_IDLE_S, follow_redirects=True, max_redirects=_REDIRECTS
            ) as client,
        ):
            digest = await _fetch(client, address, target, limit)
    except (httpx.HTTPError, httpx.InvalidURL, TimeoutError, OSError) as error:
        raise InputError(
            f"cannot download {address}: {error or type(error).__name__}",
            hint="is its host allowed (--allow)? For a name with a private address: --allow private:HOST",
        ) from error
    if checksum and checksum != f"sha256:{digest}":
        raise InputError(f"{address} has the checksum sha256:{digest}, not {checksum}")


@asynccontextmanager
async def _proxy(network: Network) -> AsyncIterator[str | None]:
    """Run a proxy for an allowlist on loopback. Yield its address, or None for an open network."""
    if network.open:
        yield None
        return
    gateway = Gateway()
    listener = socket.create_server(("127.0.0.1", 0))
    proxy = gateway.serve("build", listener, network.allow)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        await proxy.aclose()
        await gateway.aclose()


async def _fetch(client: "httpx.AsyncClient", address: str, target: Path, limit: int) -> str:
    digest, size = hashlib.sha256(), 0
    with target.open("xb") as file:
        async with client.stream("GET", address) as answer:
            answer.raise_for_status()
            async for chunk in answer.aiter_bytes(_CHUNK):
                size += len(chunk)
                if size > limit:
                    raise InputError(f"{address} has more than {limit} bytes")
                digest.update(chunk)
                file.write(chunk)
    return digest.hexdigest()
