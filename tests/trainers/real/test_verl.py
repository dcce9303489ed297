"""verl's own agent loop worker, and its TransferQueue one, with episodes of a service."""

import importlib.util
import pkgutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from prorl_envs.testing.tokenizer import tokenizer_folder
from prorl_envs.trainers.asking import connect_sync
from prorl_envs.trainers.rollouts import EpisodeFailed, close_shared
from prorl_envs.trainers.verl import RolloutManager, announce_updates, rows
from tests.trainers.conftest import ToyService, task, toy_service

EXAMPLE = Path(__file__).parents[3] / "examples" / "trainers" / "verl"

pytestmark = [pytest.mark.trainers, pytest.mark.filterwarnings("ignore"), pytest.mark.anyio]


def worker(url: str, kind: type[Any] | None = None) -> Any:
    """verl's worker as it is within its Ray actor, without the actor."""
    from omegaconf import OmegaConf
    from transformers import AutoTokenizer
    from verl.experimental.agent_loop import agent_loop

    lengths = {"prompt_length": 1024, "response_length": 512}
    config = OmegaConf.create(
        {"actor_rollout_ref": {"rollout": lengths}, "data": {}, "trainer": {"project_name": "p"}}
    )
    agent_loop._agent_loop_registry["prorl"] = OmegaConf.create(
        {
            "_target_": "prorl_envs.trainers.verl.RolloutAgentLoop",
            "url": url,
            "environment": "toy",
            "attempts": 1,
        }
    )
    made = object.__new__(kind or agent_loop.AgentLoopWorker)
    made.config, made.rollout_config = config, SimpleNamespace(**lengths)
    made.tokenizer = AutoTokenizer.from_pretrained(str(tokenizer_folder()))
    made.processor = made.hf_model_type = made.llm_client = made.reward_loop_worker_handles = None
    made.dataset_cls, made.tools, made.distillation_enabled, made.mm_processor_kwargs = object, [], False, {}
    return made


async def run(worker: Any, name: str, **fields: Any) -> Any:
    [row] = rows([task(name)], environment="toy")
    trajectory = {"step": 1, "sample_index": 0, "rollout_n": 0, "validate": False}
    row["raw_prompt"] = row.pop("prompt")
    return await worker._run_agent_loop(
        {"temperature": 1.0, "top_p": 1.0}, trajectory, trace=False, **row, **fields
    )


async def test_the_padded_batch() -> None:
    with toy_service() as toy:
        loop = worker(toy.url)
        try:
            outputs = [await run(loop, "a") for _ in range(2)]
        finally:
            await close_shared()
    batch = loop._postprocess(outputs)
    assert sorted(batch.batch["rm_scores"].sum(dim=1).tolist()) == [0.0, 1.0]
    responses, mask = batch.batch["responses"], batch.batch["response_mask"]
    assert responses.shape == mask.shape == batch.batch["rollout_log_probs"].shape == (2, 512)
    ids = [loop.tokenizer.decode(responses[0][mask[0].bool()].tolist())]
    assert "<tool_call>" in ids[0] and "<|im_start|>tool" not in ids[0]
    assert batch.meta_info["reward_extra_keys"] == ["turns", "truncated"]


async def test_what_goes_to_the_transfer_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """The queue itself is Ray actors on ten processors; what the worker puts into it is looked at."""
    from verl.trainer.ppo.v1 import agent_loop_tq

    put: list[dict[str, Any]] = []

    async def keep(**given: Any) -> None:
        put.append(given)

    monkeypatch.setattr(agent_loop_tq.tq, "async_kv_batch_put", keep)
    kind = agent_loop_tq.AgentLoopWorkerTQ.__ray_metadata__.modified_class
    with toy_service(weight_version="4") as toy:
        try:
            await run(worker(toy.url, kind), "a", uid="u", session_id=1, global_steps=5)
        finally:
            await close_shared()
    [given] = put
    assert given["keys"] == ["u_1_0"] and given["partition_id"] == "train"
    [tag], fields = given["tags"], given["fields"]
    assert (tag["status"], tag["min_global_steps"], tag["max_global_steps"]) == ("success", 4, 4)
    assert tag["response_len"] == fields["responses"][0].shape[0] == fields["loss_mask"][0].shape[0]
    assert fields["rm_scores"][0].sum().item() in (0.0, 1.0)


async def test_a_failure_is_raised_and_so_makes_the_group_one() -> None:
    with toy_service("error500=1") as toy:
        try:
            with pytest.raises(EpisodeFailed):
                await run(worker(toy.url), "a")
        finally:
            await close_shared()


def test_an_update_of_weights_is_announced(toy: ToyService, monkeypatch: pytest.MonkeyPatch) -> None:
    """verl's own manager; its workers, which are Ray actors on GPUs, are not there."""
    from verl.checkpoint_engine import base

    seen: list[tuple[int, bool]] = []

    def update_weights(global_steps: int, mode: str) -> None:
        with connect_sync(toy.url) as client:
            router = client.status().router
        seen.append((global_steps, router is not None and router.paused))

    monkeypatch.setattr(base.ray, "get", lambda value: value)
    monkeypatch.setattr(
        base.CheckpointEngineManager, "update_weights", base.CheckpointEngineManager.update_weights
    )
    announce_updates(toy.url)
    manager = object.__new__(base.CheckpointEngineManager)
    manager.backend, manager.actor_wg = "naive", SimpleNamespace(update_weights=update_weights)
    assert manager.update_weights(7) == {}
    assert seen == [(7, True)]
    with connect_sync(toy.url) as client:
        [server] = client.model_servers()
        router = client.status().router
    assert server.weight_version == "7" and router is not None and not router.paused


def test_verl_knows_every_setting_of_the_example(tmp_path: Path) -> None:
    """The script as a user calls it, up to verl: a setting that verl's own files lack ends it at once."""
    from hydra import compose, initialize_config_dir

    shim = tmp_path / "python"
    shim.write_text('#!/bin/sh\n[ "$1" != -m ] || printf "%s\\n" "$@"\n')
    shim.chmod(0o755)
    command = ["sh", str(EXAMPLE / "train.sh"), "tasks.jsonl", "trainer.n_gpus_per_node=1"]
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    told = subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout
    _, module, *overrides = told.splitlines()
    spec = importlib.util.find_spec("verl")
    assert module == "verl.trainer.main_ppo" and spec is not None and spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0]) / "trainer" / "config"
    with initialize_config_dir(str(folder), version_base=None):
        config = compose("ppo_trainer", overrides=overrides)
    agent = config.actor_rollout_ref.rollout.agent
    named = pkgutil.resolve_name(agent.agent_loop_manager_class.replace(".Rollout", ":Rollout"))
    assert named is RolloutManager
    [loop] = yaml.safe_load(Path(agent.agent_loop_config_path).read_text())
    assert loop["name"] == rows([task("a")], environment="bash")[0]["agent_name"]
