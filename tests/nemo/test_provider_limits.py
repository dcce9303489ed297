"""Resource limits of a harness are enforced and reported: real NeMo Gym, small real bombs."""

import asyncio
import logging
from typing import Any

import pytest

pytest.importorskip("nemo_gym", reason="run by scripts/test-nemo.sh in an environment of its own")

# mypy: disable-error-code="import-not-found,import-untyped"
from nemo_gym.sandbox import AsyncSandbox, SandboxSpec
from nemo_gym.sandbox.providers import create_provider
from nemo_gym.sandbox.providers.base import SandboxCreateError, SandboxStatus

from prorl_envs.errors import SandboxError
from prorl_envs.sandbox.drivers.local import NoIsolationWarning
from tests.conftest import existing_driver

pytestmark = [pytest.mark.nemo, pytest.mark.anyio]

HOARD = "python3 -c 'x = bytearray(300 << 20); print(\"had it\")'"
SMALL = {"memory_mib": 96}


@pytest.fixture(autouse=True)
def _watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRORL_LIMITS__ENFORCEMENT", "watchdog")


def sandbox(config: dict[str, Any] | None = None, **spec: Any) -> Any:
    return AsyncSandbox({"prorl": config or {}}, SandboxSpec(**spec))


async def test_a_command_that_uses_too_much_memory_is_killed_with_the_reason() -> None:
    async with sandbox(resources=SMALL) as box:
        await box.start()
        done = await box.exec(f"echo before; {HOARD}", timeout_s=60)
        assert (done.stdout, done.return_code, done.error_type) == ("before\n", 137, None)
        assert "[the sandbox's memory limit of 96 MB was reached: python3 was killed]" in done.stderr
        after = await box.exec("echo after")
        assert (after.stdout, after.stderr, after.return_code) == ("after\n", "", 0)  # reported once
    async with sandbox() as box:
        await box.start()
        assert (await box.exec(HOARD, timeout_s=60)).stdout == "had it\n"


async def test_all_running_commands_are_notified() -> None:
    async with sandbox(resources=SMALL) as box:
        await box.start()
        waits = "mkfifo go; echo ready > ready; read x < go; echo $x"
        waiting, killed = await asyncio.gather(
            box.exec(waits, timeout_s=60),
            box.exec(f"until [ -s ready ]; do sleep 0.01; done; {HOARD}; echo on > go", timeout_s=60),
        )
        assert waiting.stdout == "on\n"
        for done in (waiting, killed):
            assert "memory limit of 96 MB was reached" in done.stderr


async def test_a_background_process_over_the_limit_is_reported_by_the_next_command() -> None:
    async with sandbox(resources=SMALL) as box:
        await box.start()
        begun = await box.exec(f"mkfifo go; (read x < go; {HOARD}; echo over > over) > /dev/null 2>&1 &")
        assert begun.stderr == ""
        done = await box.exec("echo now > go; until [ -s over ]; do sleep 0.05; done", timeout_s=60)
        assert "memory limit of 96 MB was reached" in done.stderr


async def test_a_sandbox_stopped_for_a_limit_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRORL_LIMITS__LIFETIME_S", "2")
    async with sandbox() as box:
        await box.start()
        done = await box.exec("sleep 1000", timeout_s=60)
        assert (done.error_type, done.return_code) == ("sandbox", 125)
        assert "2 s" in done.stderr
        assert await box.status() == SandboxStatus.STOPPED
        assert "2 s" in (await box.exec("true")).stderr


async def test_unenforced_limits_are_logged_or_refused(caplog: pytest.LogCaptureFixture) -> None:
    spec = {"resources": {"cpu": 2, "memory_mib": 512, "disk_gib": 1}}
    with caplog.at_level(logging.WARNING, logger="prorl_envs.nemo"):
        async with sandbox(**spec) as box:
            await box.start()
    assert caplog.messages == ["a limit of 2 CPUs is not enforced here"]
    strict = sandbox({"unenforced": "error"}, **spec)
    with pytest.raises(SandboxCreateError, match="2 CPUs"):
        await strict.start()
    await strict.stop()


@pytest.mark.parametrize("driver", ["auto", "bubblewrap", "apptainer"])
async def test_a_driver_is_chosen_by_its_name(driver: str, monkeypatch: pytest.MonkeyPatch) -> None:
    existing_driver(driver)
    async with sandbox({"driver": driver}) as box:
        await box.start()
        assert (await box.exec("id -u")).stdout == "0\n"
    monkeypatch.setenv("PRORL_DRIVER", driver)
    async with sandbox() as box:
        await box.start()
        assert (await box.exec("id -u")).stdout == "0\n"


async def test_the_local_driver_can_be_chosen(caplog: pytest.LogCaptureFixture) -> None:
    provider = create_provider({"prorl": {"driver": "local"}})
    with pytest.warns(NoIsolationWarning), caplog.at_level(logging.WARNING, logger="prorl_envs.nemo"):
        handle = await provider.create(SandboxSpec(resources=SMALL))
    assert caplog.messages == ["a limit of 96 MiB of memory is not enforced here"]
    assert (await provider.exec(handle, "echo x > file; cat file")).stdout == "x\n"
    # It would stop every process of this user, this one too.
    with pytest.raises(SandboxError, match="pause"):
        await provider.pause(handle)
    with pytest.raises(SandboxCreateError, match="local driver cannot run the image"):
        await provider.create(SandboxSpec(image="/usr"))
    await provider.aclose()
