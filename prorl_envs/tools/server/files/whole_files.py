"""Reading and writing of whole files in the sandbox's mount namespace with the sandbox's own rights."""

import errno
import os
import stat


def _check(path: str) -> None:
    if not path.startswith("/") or "\0" in path:
        raise OSError(errno.EINVAL, "is not an absolute path", path)


def read_file(path: str, limit: int) -> tuple[bytes, int]:
    """Read a regular file.

    Args:
        path: absolute path.
        limit: maximum number of bytes to read.

    Returns:
        the first bytes of the file, and its size.

    Raises:
        OSError: the file cannot be read, or is not a regular file.
    """
    _check(path)
    # Non-blocking, because opening a named pipe would otherwise wait for a writer.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb", buffering=0) as file:  # noqa: PTH123 - a descriptor
        status = os.fstat(fd)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, "is a directory", path)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "is not a regular file", path)
        data = bytearray()
        # Files under /proc report size 0, and a file may grow: read until the end or the limit.
        while len(data) < limit and (chunk := file.read(min(limit - len(data), 1 << 20))):
            data += chunk
        return bytes(data), max(status.st_size, len(data))


def write_file(path: str, data: bytes, *, mode: int | None) -> None:
    """Replace or create a file atomically: a reader sees the complete old or the complete new content.

    Links are followed: the file that a link names is replaced, not the link.

    Args:
        path: absolute path; missing directories are created.
        mode: permissions; None keeps those of the replaced file, or uses the default.

    Raises:
        OSError: the file cannot be written.
    """
    _check(path)
    target = os.path.realpath(path)
    if os.path.isdir(target):  # noqa: PTH112
        raise IsADirectoryError(errno.EISDIR, "is a directory", path)
    folder = os.path.dirname(target)  # noqa: PTH120
    try:
        os.makedirs(folder, exist_ok=True)  # noqa: PTH103
    except FileExistsError as error:  # the message "file exists" would be misleading
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path) from error
    temporary = os.path.join(folder, f".{os.urandom(8).hex()}.tmp")  # noqa: PTH118
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(fd, "wb", buffering=0) as file:  # noqa: PTH123
            os.fchmod(fd, _mode(target) if mode is None else mode)
            view = memoryview(data)
            while view:
                view = view[file.write(view) :]
        os.replace(temporary, target)  # noqa: PTH105
    except BaseException:
        os.unlink(temporary)  # noqa: PTH108
        raise


def _mode(path: str) -> int:
    try:
        return stat.S_IMODE(os.stat(path).st_mode)  # noqa: PTH116
    except FileNotFoundError:
        return 0o644
