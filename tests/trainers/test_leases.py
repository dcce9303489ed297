"""Jobs with a lease are cancelled when no client follows them."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from prorl_envs.errors import InputError
from prorl_envs.rollout.api.batches import BatchRequest, BatchState, BatchTask
from prorl_envs.rollout.api.types import GroupRequest, JobState
from prorl_envs.rollout.http.middleware import named_items
from prorl_envs.rollout.service.leases import TICK_S, Leases
from prorl_envs.trainers.asking import LEASE, GroupTemplate, connect_sync
from tests.support.clock import FakeClock
from tests.trainers.conftest import ToyService, task

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("path", "query", "about"),
    [
        ("/v1/groups/run/a", b"", {("groups", "run/a")}),
        ("/v1/jobs/run/a/0", b"", {("groups", "run/a")}),
        ("/v1/jobs/run/a/0/result", b"", {("groups", "run/a")}),
        ("/v1/batches/run/a/results", b"after=3", {("batches", "run/a")}),
        ("/v1/batches/run/a", b"", {("batches", "run/a")}),
        ("/v1/results", b"after=1&group=run%2Fa&group=b", {("groups", "run/a"), ("groups", "b")}),
        ("/v1/results", b"after=1", set()),
        ("/v1/groups", b"", set()),
        ("/v1", b"", set()),
        ("/", b"", set()),
        ("/health", b"", set()),
        ("/v2/groups/a", b"", set()),
    ],
)
def test_the_objects_named_by_a_request(path: str, query: bytes, about: set[tuple[str, str]]) -> None:
    assert named_items(path, query) == about


async def test_a_lease_expires_unless_a_client_sends_requests_or_waits() -> None:
    clock, ended = FakeClock(), list[str]()

    async def end(name: str) -> None:
        ended.append(name)
        if name == "odd":
            raise RuntimeError("and the others end all the same")

    leases = Leases(clock)
    leases.start({"groups": end})
    for name in ("left", "odd", "asked", "waited"):
        leases.grant("groups", name, 10.0)
    leases.grant("groups", "free", None)

    async def passes(seconds: float) -> None:
        for _ in range(int(seconds / TICK_S)):
            await clock.wait_for_sleepers()
            clock.advance(TICK_S)
            for _ in range(5):
                await asyncio.sleep(0)

    try:
        with leases.keep_alive({("groups", "waited"), ("groups", "unknown")}):
            await passes(6)
            with leases.keep_alive({("groups", "asked")}):
                pass
            await passes(6)
            assert ended == ["left", "odd"]
            await passes(8)
            assert ended == ["left", "odd", "asked"]
        await passes(9)
        assert "waited" not in ended
        await passes(1)
        assert ended[-1] == "waited" and not leases
    finally:
        await leases.aclose()


CLIENT = """
import json, sys
from prorl_envs.rollout.api.batches import BatchRequest
from prorl_envs.rollout.client.sync import SyncRolloutClient
from prorl_envs.rollout.api.types import GroupRequest
url, groups, batch = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
client = SyncRolloutClient(url)
client.submit([GroupRequest.model_validate(group) for group in groups])
client.submit_batch(BatchRequest.model_validate(batch))
print("submitted", flush=True)
client.batch(batch["id"], wait_s=1)
"""


def test_groups_and_batches_of_a_killed_client_are_cancelled(toy: ToyService) -> None:
    """With SIGKILL, during a request that waits. Jobs without a lease continue, and so do those that another
    client follows."""
    toy.close_gate("call")

    def group(name: str, **fields: Any) -> dict[str, Any]:
        return GroupRequest(id=name, environment="toy", task=task(), **fields).model_dump(mode="json")

    groups = [group("leased", lease_s=1), group("followed", lease_s=1), group("free")]
    rows = [BatchTask(task=task(name)) for name in "ab"]
    batch = BatchRequest(id="batch", groups=2, samples=2, environment="toy", tasks=rows, lease_s=1)
    given = [toy.url, json.dumps(groups), batch.model_dump_json()]
    command = [sys.executable, "-c", CLIENT, *given]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None and program.stdout.readline() == "submitted\n"
        toy.until_entered("call", 7)
        os.kill(program.pid, signal.SIGKILL)
    wanted = {"leased/0", *(f"batch/{index}/{sample}" for index in (0, 1) for sample in (0, 1))}
    with connect_sync(toy.url) as client:
        while not wanted <= (ended := {result.job_id for result in client.page().results}):
            client.group("followed", wait_s=0.2)
        assert ended == wanted
        states = {name: client.group(name).jobs[0].state for name in ("leased", "followed", "free")}
        assert client.batch("batch").state is BatchState.CANCELLED
    assert states == {"leased": JobState.CANCELLED, "followed": JobState.RUN, "free": JobState.RUN}


def test_adapters_take_the_lease_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert GroupTemplate("http://h:1", "toy").group("g", {}, 1).lease_s is None
    monkeypatch.setenv(LEASE, "90")
    assert GroupTemplate("http://h:1", "toy").group("g", {}, 1).lease_s == 90
    for wrong in ("soon", "5", "nan"):
        monkeypatch.setenv(LEASE, wrong)
        with pytest.raises(InputError, match=LEASE):
            GroupTemplate("http://h:1", "toy")
