"""Atropos's own API server between the service and a trainer."""

import asyncio

import httpx
import pytest

from prorl_envs.trainers.asking import connect_sync
from prorl_envs.trainers.atropos import AtroposFeed, AtroposRefused, feed
from tests.support.serving import served
from tests.trainers.conftest import ToyService, task, toy_service

pytestmark = [pytest.mark.trainers, pytest.mark.filterwarnings("ignore"), pytest.mark.anyio]


def register(api: str) -> None:
    """Register as a trainer does."""
    names = {"wandb_group": "g", "wandb_project": "p", "checkpoint_dir": ""}
    numbers = {"batch_size": 4, "max_token_len": 8192, "save_checkpoint_interval": 0, "starting_step": 0}
    body = names | numbers | {"num_steps": 10}
    httpx.post(f"{api}/register", json=body).raise_for_status()
    assert httpx.get(f"{api}/batch").json() == {"batch": None}


async def test_a_trainer_reads_whole_groups_from_atropos() -> None:
    from atroposlib.api.server import app

    with toy_service() as toy, served(app) as api:
        await asyncio.to_thread(register, api)
        asked = AtroposFeed(api, toy.url, "toy", [task("a"), task("b")], samples=2, groups=2, steps=2)
        assert await feed(asked) >= 2
        [*groups] = (await asyncio.to_thread(httpx.get, f"{api}/batch")).json()["batch"]
        with connect_sync(toy.url) as client:
            results = {result.job_id: result for result in client.page().results}
    assert sum(len(group["tokens"]) for group in groups) == 4
    for group in groups:
        assert sorted(group["scores"]) == [0.0, 1.0]
        columns = (group[key] for key in ("tokens", "masks", "inference_logprobs", "overrides", "scores"))
        for tokens, mask, logprobs, override, score in zip(*columns, strict=True):
            result = results[override["job_id"]]
            assert result.trajectory is not None and result.reward == score
            assert tokens == result.trajectory.ids[: len(tokens)]
            bits = result.trajectory.loss_mask[: len(tokens)]
            assert [token != -100 for token in mask] == [bit == 1 for bit in bits]
            assert all((p == 1.0) != bool(bit) for p, bit in zip(logprobs, bits, strict=True) if not bit)


async def test_a_stopped_feed_leaves_no_jobs_at_the_service(toy: ToyService) -> None:
    from atroposlib.api.server import app

    toy.close_gate("eval")
    with served(app) as api:
        await asyncio.to_thread(httpx.get, f"{api}/reset_data")
        await asyncio.to_thread(register, api)
        feeding = asyncio.create_task(feed(AtroposFeed(api, toy.url, "toy", [task()], samples=2, groups=1)))
        await asyncio.to_thread(toy.until_entered, "eval", 2)
        feeding.cancel()
        await asyncio.wait([feeding])
        assert feeding.cancelled()
    await asyncio.to_thread(toy.until_empty)


async def test_an_unreachable_server_is_an_error() -> None:
    with pytest.raises(AtroposRefused, match="register-env"):
        await feed(AtroposFeed("http://127.0.0.1:9", "http://127.0.0.1:9", "toy", [task()]))
