"""Promises about file transfers."""

from collections.abc import Awaitable

from prorl_envs.conformance.promise import NO_IMAGE, NOT_LOCAL, PromiseBroken, Promises
from prorl_envs.conformance.world import PromiseContext

promises = Promises("files")

_ANY_BYTES = bytes(range(256)) * 5 + "☃".encode()


async def fails(call: Awaitable[object]) -> OSError:
    """Return the OSError with which a call fails. Raise PromiseBroken if the call succeeds."""
    try:
        result = await call
    except OSError as error:
        return error
    raise PromiseBroken(f"it gave {result!r}"[:200])


@promises.add(
    "FILE-010",
    "The system, and files without write permission, cannot be written.",
    harmful=True,
    needs=(NO_IMAGE,),
    exempt=NOT_LOCAL,
)
async def not_writable(world: PromiseContext) -> None:
    for path in ("/usr/bin/env", "/etc/passwd", "/proc/self/comm-x", "/x"):
        await fails(world.box.tools.write(path, b"x"))
