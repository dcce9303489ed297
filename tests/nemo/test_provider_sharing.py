"""A sandbox that one process owns and another uses."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nemo_gym", reason="run by scripts/test-nemo.sh in an environment of its own")

# mypy: disable-error-code="import-not-found,import-untyped"
from nemo_gym.sandbox import AsyncSandbox, SandboxSpec
from nemo_gym.sandbox.providers import create_provider
from nemo_gym.sandbox.providers.base import SandboxStatus

from prorl_envs.errors import InputError, SandboxError

pytestmark = [pytest.mark.nemo, pytest.mark.anyio]

BORROWER = """
import asyncio, json, sys
from nemo_gym.sandbox.providers import create_provider

async def main():
    provider = create_provider({"prorl": {}})
    handle = await provider.connect(json.loads(sys.argv[1]))
    done = await provider.exec(handle, sys.argv[2])
    print(done.stdout, (await provider.status(handle)).value, end="")
    if sys.argv[3] == "end":
        await provider.close(handle)
    await provider.aclose()

asyncio.run(main())
"""


async def borrow(descriptor: dict[str, Any], command: str, then: str = "") -> str:
    argv = [sys.executable, "-c", BORROWER, json.dumps(descriptor), command, then]
    child = await asyncio.create_subprocess_exec(
        *argv, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, errors = await child.communicate()
    assert child.returncode == 0, errors.decode()
    return out.decode()


async def test_another_process_works_in_the_same_sandbox() -> None:
    provider = create_provider({"prorl": {}})
    handle = await provider.create(SandboxSpec(workdir="/w", env={"A": "b"}))
    await provider.exec(handle, "echo owner > file")
    descriptor = await provider.serialize_handle(handle)
    said = await borrow(json.loads(json.dumps(descriptor)), "pwd; cat file; echo $A; echo borrower > file")
    assert said == "/w\nowner\nb\n running"
    assert (await provider.exec(handle, "cat file")).stdout == "borrower\n"
    # Disconnected, not stopped; and the id alone is enough.
    assert await borrow({"sandbox_id": handle.sandbox_id}, "cat file") == "borrower\n running"
    await borrow(descriptor, "true", "end")
    assert await provider.status(handle) == SandboxStatus.STOPPED
    assert (await provider.exec(handle, "true")).error_type == "sandbox"
    await provider.aclose()


async def test_a_borrower_sees_that_the_owner_closed_the_sandbox() -> None:
    owner, borrower = create_provider({"prorl": {}}), create_provider({"prorl": {}})
    handle = await owner.create(SandboxSpec())
    lent = await borrower.connect(await owner.serialize_handle(handle))
    running = asyncio.create_task(borrower.exec(lent, "echo begun > /tmp/begun; sleep 1000"))
    await owner.exec(handle, "until [ -s /tmp/begun ]; do sleep 0.01; done")
    await owner.close(handle)
    assert (await running).error_type == "sandbox"
    assert await borrower.status(lent) == SandboxStatus.STOPPED
    await borrower.close(lent)
    with pytest.raises(SandboxError):
        await borrower.connect({"sandbox_id": handle.sandbox_id})
    await borrower.aclose()
    await owner.aclose()


@pytest.mark.parametrize(
    ("descriptor", "error"),
    [
        ({}, InputError),
        ({"sandbox_id": "../../x-1"}, InputError),
        ({"sandbox_id": "abcdefgh-1", "provider": "docker"}, InputError),
        ({"sandbox_id": "abcdefgh-1", "hostname": "elsewhere"}, InputError),
        ({"sandbox_id": "abcdefgh-1"}, SandboxError),
    ],
)
async def test_an_invalid_descriptor_is_refused(descriptor: dict[str, Any], error: type[Exception]) -> None:
    provider = create_provider({"prorl": {}})
    with pytest.raises(error):
        await provider.connect(descriptor)
    await provider.aclose()


def shares(run_dir: Path) -> list[Path]:
    return list(run_dir.glob("*/share"))


async def test_the_socket_is_not_visible_in_the_sandbox(run_dir: Path) -> None:
    provider = create_provider({"prorl": {}})
    handle = await provider.create(SandboxSpec())
    assert shares(run_dir)
    found = await provider.exec(
        handle, "find / -xdev -name share -type s 2>/dev/null; cat /proc/net/unix | wc -l"
    )
    assert found.stdout.splitlines() == ["1"]  # only the header
    await provider.aclose()


@pytest.mark.skipif(not hasattr(AsyncSandbox, "connect"), reason="0.4 cannot lend sandboxes")
async def test_nemo_gyms_own_calls_share_a_sandbox() -> None:
    async with AsyncSandbox({"prorl": {}}, SandboxSpec()) as owner:
        await owner.start()
        provider = create_provider({"prorl": {}})
        borrowed = await AsyncSandbox.connect(await owner.serialize(), provider=provider)
        assert (await borrowed.exec("echo hi")).stdout == "hi\n"
        async with await borrowed.pty.create("cat") as session:
            await session.write(b"x\n")
            assert b"x" in await session.read(timeout_s=20)
        await borrowed.disconnect()
        assert (await owner.exec("echo still")).stdout == "still\n"
