"""The faults. Each function is one round: it injects the fault at random moments and checks the results.

The caller of a round checks for leaked processes.
"""

import asyncio
import contextlib
import os
import shutil
import signal
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

from faults.processes import Nursery, free_port, model_server, service_on_a_small_disk
from faults.world import World
from prorl_envs.errors import InputError
from prorl_envs.rollout.api.errors import Conflict, NotFound
from prorl_envs.rollout.api.types import AgentLimits, GroupRequest, JobState, Result, StopReason, job_id
from prorl_envs.rollout.client.client import RolloutClient
from prorl_envs.rollout.service.recovery import MAX_INTERRUPTIONS
from prorl_envs.rollout.store.sqlite import SqliteStore
from tests.support.audit import AuditCounts
from tests.support.clock import FakeClock
from tests.support.leaks import OpenResources
from tests.support.toy import Fault

type Scenario = Callable[[World], Coroutine[Any, Any, None]]

#: Time that clients of a killed service may have to wait: until its next start.
_PATIENT: dict[str, Any] = {"attempts": 2000, "max_pause_s": 0.2}
_TOY: dict[str, Any] = {"environment": "toy"}
#: Names of the processes of a sandbox that run no command of the model: templates, tool servers, bubblewrap
#: and the first process.
_SANDBOX_PROGRAMS = ("(python", "(bwrap)", "(sh)")


async def service_killed(world: World) -> None:
    """kill -9 of the service, at random moments, while clients submit, read and follow"""
    groups = world.groups(3 * world.scale)
    port = free_port()
    with Nursery(world.run_dir) as nursery:
        await _kill_services(world, nursery, port, groups)


async def _kill_services(world: World, nursery: Nursery, port: int, groups: list[GroupRequest]) -> None:
    async with (
        world.model("solve=1") as model,
        RolloutClient(f"http://127.0.0.1:{port}", **_PATIENT) as client,
    ):
        before = OpenResources.now(world.run_dir)

        async def follow() -> list[Result]:
            await client.submit(groups[:2])
            return [result async for result in client.follow([group.id for group in groups[:2]])]

        async def submit() -> None:
            for group in groups:  # twice, like a caller that missed the first answer
                await asyncio.gather(client.submit([group]), client.submit([group]))

        async with asyncio.TaskGroup() as tasks:
            submitting = tasks.create_task(submit())
            reading = tasks.create_task(world.read(client))
            following = tasks.create_task(follow())
            # Not more often than the number at which the job itself is blamed.
            for _ in range(min(3 * world.scale, MAX_INTERRUPTIONS - 1)):
                target = model.counts.requests + world.chance.randrange(20)
                with nursery.service(model.url, port) as process:
                    await model.until(partial(_asked, target))
                    process.kill()
                await world.nothing_new(before)
            with nursery.service(model.url, port) as process:
                await submitting
                followed, results = await following, await reading
                kept = (await client.page(0, limit=1000)).results
                process.terminate()
        assert process.returncode == 0, "the service did not end in order"
        assert model.counts.violations == 0
    world.check(results)
    assert results == kept, "a result was written again"
    assert followed == [r for r in results if r.group_id in {group.id for group in groups[:2]}]
    assert max(result.attempts for result in results) <= 3 * world.scale + 1


async def sandboxes_killed(world: World) -> None:
    """kill -9 of tool servers, templates and first processes of sandboxes, while jobs run"""
    async with world.model("solve=1") as model, world.service(model.url) as rollouts:
        before = OpenResources.now(world.run_dir)
        await rollouts.groups.submit(world.groups(2 * world.scale))
        reading = asyncio.create_task(world.read(rollouts))
        for _ in range(6 * world.scale):
            target = model.counts.requests + world.chance.randrange(6)
            await _first_of(reading, model.until(partial(_asked, target)))
            found = OpenResources.now(world.run_dir).processes
            names = [pid for pid, text in found.items() if any(name in text for name in _SANDBOX_PROGRAMS)]
            victims = sorted(set(names) - before.processes.keys()) or sorted(names)
            if victims and not reading.done():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(world.chance.choice(victims)[0], signal.SIGKILL)
        world.check(await reading, warned="what this one held is lost")


async def model_server_killed(world: World) -> None:
    """kill -9 of the model server, and its return at the same address"""
    port = free_port()
    async with world.service(f"http://127.0.0.1:{port}") as rollouts:
        await rollouts.groups.submit(world.groups(2 * world.scale))
        reading = asyncio.create_task(world.read(rollouts))
        while not reading.done():
            with model_server(port, world.path("model.log")) as process:
                await _first_of(reading, asyncio.sleep(0.5 + world.chance.random()))
                process.kill()
            await asyncio.sleep(world.chance.random() / 10)
        world.check(await reading)


async def slow_models(world: World) -> None:
    """model servers that are slow, that never answer, and that stop answering after the first turn"""
    limits = AgentLimits(max_turns=8, run_s=2)
    mix = "solve=2,hang=1,hang_later=1"
    async with (
        world.model(mix, latency_s=0.05 * world.chance.random()) as model,
        world.service(model.url, attempts=1, run=16) as rollouts,
    ):
        await rollouts.groups.submit(world.groups(world.scale, limits=limits))
        results = await world.read(rollouts)
    world.check(results, reward=None)
    left = [result for result in results if result.failure and result.failure.kind == "model"]
    graded = [result for result in results if result.reward is not None]
    # On a busy machine an agent may have used half of its time before its model stalls: so not too often, or
    # no answer would arrive in time, and never before the first answer.
    late = [result for result in graded if result.stop_reason is StopReason.TIME_LIMIT]
    assert len(left) >= world.scale, "an episode was graded whose model never answered"
    assert len(left) + len(late) >= 2 * world.scale, "an episode was graded that its model left"
    assert all(result.trajectory and result.trajectory.turns for result in graded)
    assert {result.reward for result in graded} <= {0.0, 1.0}


async def broken_answers(world: World) -> None:
    """model servers that answer with wrong ids, too few numbers, half an answer, or errors"""
    mix = "solve=1,flaky=1,bad_ids=1,short_logprobs=1,disconnect=1,error500=1"
    async with world.model(mix) as model, world.service(model.url) as rollouts:
        await rollouts.groups.submit(world.groups(world.scale, samples=6))
        results = await world.read(rollouts)
    world.check(results)
    assert {result.failure.kind.value for result in results if result.failure} <= {"model"}
    assert sum(result.state is JobState.DONE for result in results) >= world.scale


async def full_disk(world: World) -> None:
    """a disk that is temporarily full, below the store of a busy service"""
    if shutil.which("unshare") is None:
        raise InputError("unshare is not installed", hint="apt-get install util-linux")
    disk, port = world.path("disk"), free_port()
    disk.mkdir()
    before = OpenResources.now(world.run_dir)
    async with (
        world.model("solve=1") as model,
        RolloutClient(f"http://127.0.0.1:{port}", **_PATIENT) as client,
    ):
        # SQLite's write-ahead log alone may take 4 MB.
        with service_on_a_small_disk(model.url, port, world.run_dir, disk, "8m") as process:
            await client.submit(world.groups(3 * world.scale))
            reading = asyncio.create_task(world.read(client))
            await model.until(partial(_asked, 2))
            ballast = Path(f"/proc/{process.pid}/root{disk}/ballast")
            await asyncio.to_thread(_fill, ballast)
            log = world.path("service.log")
            halted = asyncio.create_task(_says(log, "are tried again"))
            await asyncio.wait([reading, halted], return_when=asyncio.FIRST_COMPLETED)
            assert halted.done(), "the disk was never full"
            await asyncio.to_thread(ballast.unlink)
            results = await reading
            process.terminate()
        await world.nothing_new(before)
    disk.rmdir()
    world.check(results)


async def broken_frames(world: World) -> None:
    """clients that send garbage, half requests and nothing at all, beside a correct one"""
    async with world.served_toys() as url:
        port = int(url.rpartition(":")[2])
        async with RolloutClient(url) as client:
            garbage = [
                asyncio.create_task(_send_garbage(port, world.chance.randbytes(world.chance.randrange(400))))
                for _ in range(20 * world.scale)
            ]
            await client.submit(world.groups(2 * world.scale, **_TOY, task=_toy_task()))
            results = await world.read(client)
            await asyncio.gather(*garbage)
            assert (await client.status()).internal_errors == 0
    world.check(results)


async def clock_jumps(world: World) -> None:
    """a clock that jumps ahead at random moments, during every timeout"""
    clock = FakeClock()
    store = SqliteStore(world.path("store.db"))
    try:
        async with world.toys(store, clock, attempts=2) as (rollouts, toys):
            toys.gates["call"] = asyncio.Event()
            await rollouts.groups.submit(world.groups(10 * world.scale, **_TOY, task=_toy_task()))
            reading = asyncio.create_task(world.read(rollouts))
            for _ in range(200):
                clock.advance(world.chance.choice([0.001, 1, 60, 4000]))
                if world.chance.random() < 0.3:
                    toys.gates["call"].set()
                for _ in range(world.chance.randrange(5)):
                    await asyncio.sleep(0)
            toys.gates["call"].set()
            while not reading.done():
                clock.advance(1)  # pauses and waits must end too
                await asyncio.sleep(0)
            world.check(await reading, reward=None)
    finally:
        await store.aclose()


async def duplicates(world: World) -> None:
    """requests repeated, reordered, with ids already in use, and cancelled before they are sent"""
    async with world.served_toys() as url, RolloutClient(url) as client:
        groups = world.groups(20 * world.scale, samples=2, **_TOY, task=_toy_task())
        requests = [group for group in groups for _ in range(3)]
        world.chance.shuffle(requests)
        other = {group.id: group.model_copy(update={"samples": 3}) for group in groups}
        seen: set[str] = set()

        async def submit(number: int) -> None:
            group = requests[number]
            if group.id not in seen:
                with contextlib.suppress(NotFound):
                    await client.cancel_group(group.id)  # the job may be unknown yet, or not
            await client.submit([group])
            seen.add(group.id)
            with contextlib.suppress(Conflict):
                await client.submit([other[group.id]])
                raise AssertionError("another request under the same id was accepted")

        await asyncio.gather(*(submit(number) for number in range(len(requests))))
        results = await world.read(client)
        again = [result async for result in client.follow([group.id for group in groups])]
    world.check(results)
    assert sorted(r.cursor for r in again) == [r.cursor for r in results]


async def cancellations(world: World) -> None:
    """thousands of cancellations at random moments, of jobs and groups, in every stage"""
    store = SqliteStore(world.path("store.db"))
    faults = [{}, {}, {"init": Fault.ONCE_SANDBOX}, {"call": Fault.TOOL}, {"call": Fault.HANG}]
    try:
        async with world.toys(store, init=3, run=8, eval=2) as (rollouts, _):
            groups = [
                world.groups(1, samples=8, **_TOY, task=_toy_task(world.chance.choice(faults)))[0]
                for _ in range(40 * world.scale)
            ]
            await rollouts.groups.submit(groups)
            jobs = [job_id(group.id, n) for group in groups for n in range(8)]
            world.chance.shuffle(jobs)

            async def cancel(job: str) -> None:
                for _ in range(world.chance.randrange(2000)):
                    await asyncio.sleep(0)
                await rollouts.groups.cancel_job(job)
                await rollouts.groups.cancel_job(job)

            async with asyncio.TaskGroup() as tasks:
                for job in jobs:
                    tasks.create_task(cancel(job))
            results = await world.read(rollouts)
            assert rollouts.status().internal_errors == 0
            while rollouts.status().unfinished:  # closes
                await asyncio.sleep(0)
        world.check(results)
    finally:
        await store.aclose()


async def sandboxes_cancelled(world: World) -> None:
    """cancellations at random moments of jobs with real sandboxes"""
    async with world.model("solve=1,loop=1") as model, world.service(model.url) as rollouts:
        groups = world.groups(3 * world.scale)
        await rollouts.groups.submit(groups)
        jobs = [job_id(group.id, n) for group in groups for n in range(group.samples)]
        world.chance.shuffle(jobs)
        reading = asyncio.create_task(world.read(rollouts))
        for job in jobs:
            target = model.counts.requests + world.chance.randrange(3)
            await _first_of(reading, model.until(partial(_asked, target)), asyncio.sleep(0.2))
            await rollouts.groups.cancel_job(job)
        world.check(await reading, reward=None)


SCENARIOS: dict[str, Scenario] = {
    scenario.__name__: scenario
    for scenario in (
        service_killed,
        sandboxes_killed,
        model_server_killed,
        slow_models,
        broken_answers,
        full_disk,
        broken_frames,
        clock_jumps,
        duplicates,
        cancellations,
        sandboxes_cancelled,
    )
}


def _toy_task(faults: dict[str, Fault] | None = None) -> dict[str, object]:
    return {"id": "t", "instruction": "Say it.", "faults": faults or {}}


def _asked(target: int, counts: AuditCounts) -> bool:
    return counts.requests >= target


async def _first_of(*what: Awaitable[object]) -> None:
    """Return once one of them is done; cancel the others, if they were not started as tasks."""
    tasks = [asyncio.ensure_future(each) for each in what]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task, each in zip(tasks, what, strict=True):
        if task is not each:
            task.cancel()
            await asyncio.wait([task])


async def _says(log: Path, text: str) -> None:
    while text not in await asyncio.to_thread(log.read_text, errors="replace"):
        await asyncio.sleep(0.02)


def _fill(path: Path) -> None:
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1024))


async def _send_garbage(port: int, data: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = b"POST /v1/groups HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 4000\r\n\r\n"
    with contextlib.suppress(ConnectionError):
        writer.write(head + data if len(data) % 2 else data)
        if len(data) % 3:
            writer.write_eof()
            await reader.read(100)
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
