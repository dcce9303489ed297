"""verl's own agent loop worker, and its trainer's queue on a real Ray, with episodes of a service."""

import asyncio
import importlib.util
import json
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from prorl_envs.rollout.api.types import Trajectory
from prorl_envs.testing.tokenizer import tokenizer_folder
from prorl_envs.trainers.asking import GroupTemplate, collect, connect_sync
from prorl_envs.trainers.rollouts import EpisodeFailed, close_shared
from prorl_envs.trainers.verl import RolloutManager, as_verl, patch_weight_updates, rows
from prorl_envs.trainers.weights import weights_change_sync
from tests.trainers.conftest import ToyService, task, toy_service
from tests.trainers.real.conftest import command_of

EXAMPLE = Path(__file__).parents[3] / "examples" / "trainers" / "verl"

pytestmark = [
    pytest.mark.trainers,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.anyio,
    pytest.mark.timeout(400),  # Ray starts a dozen processes, of which two import verl
]


def worker(url: str, kind: type[Any] | None = None) -> Any:
    """verl's worker without its Ray actor."""
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


@pytest.fixture(scope="module")
def queue() -> Iterator[Any]:
    """Start verl's queue as its `main_ppo` does: the controller and the storage are Ray actors."""
    environ = {
        "RAY_USAGE_STATS_ENABLED": "0",
        # Its processes may be slow to start on a busy machine.
        "RAY_agent_register_timeout_ms": "120000",
        "RAY_gcs_server_request_timeout_seconds": "60",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environ.items():
            patch.setenv(name, value)
        import ray
        import transfer_queue

        ray.init(num_cpus=4, include_dashboard=False, object_store_memory=80 << 20)
        try:
            transfer_queue.init()
            yield transfer_queue
            transfer_queue.close()
        finally:
            ray.shutdown()


def example(folder: Path, *more: str) -> Any:
    """Return the configuration that the example's script passes to verl when called as a user does. A setting
    that is missing in verl's own files is an error."""
    from hydra import compose, initialize_config_dir

    shim = folder / "python"
    shim.write_text('#!/bin/sh\n[ "$1" != -m ] || printf "%s\\n" "$@"\n')
    shim.chmod(0o755)
    command = ["sh", str(EXAMPLE / "train.sh"), "tasks.jsonl", *more]
    environ = {"PATH": f"{folder}:/usr/bin:/bin"}
    told = subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout
    _, module, *overrides = told.splitlines()
    spec = importlib.util.find_spec("verl")
    assert module == "verl.trainer.main_ppo" and spec is not None and spec.submodule_search_locations
    own = Path(spec.submodule_search_locations[0]) / "trainer" / "config"
    with initialize_config_dir(str(own), version_base=None):
        return compose("ppo_trainer", overrides=overrides)


def small_example(folder: Path, tasks: list[dict[str, Any]], url: str, model: Path) -> Any:
    """Return the example with these tasks: batches of two groups of two, and two workers."""
    given, train, agent = (folder / name for name in ("tasks.jsonl", "train.parquet", "agent.yaml"))
    given.write_text("".join(json.dumps(one) + "\n" for one in tasks))
    make = [sys.executable, str(EXAMPLE.parent / "make_data.py"), "verl", str(given), str(train)]
    subprocess.run([*make, "--environment", "toy"], check=True)
    [loop] = yaml.safe_load((EXAMPLE / "agent.yaml").read_text())
    agent.write_text(yaml.safe_dump([loop | {"url": url, "environment": "toy", "attempts": 1}]))
    data = {
        "train_files": train,
        "val_files": train,
        "max_prompt_length": 1024,
        "max_response_length": 512,
        "train_batch_size": 2,
        "gen_batch_size": 1,
        "shuffle": False,
        "dataloader_num_workers": 0,
    }
    rest = {
        "model.path": model,
        "actor.ppo_mini_batch_size": 2,
        "rollout.agent.agent_loop_config_path": agent,
        "rollout.agent.num_workers": 2,
        "rollout.n": 2,
    }
    settings: dict[str, Any] = {"trainer.v1.separate_async.parameter_sync_step": 1}
    settings |= {f"data.{name}": value for name, value in data.items()}
    settings |= {f"actor_rollout_ref.{name}": value for name, value in rest.items()}
    return example(folder, *(f"++{name}={value}" for name, value in settings.items()))


def trainer_of(config: Any) -> Any:
    """Return the part of verl's trainer that requests and receives rollouts, without workers on GPUs."""
    from verl.trainer.ppo.v1 import get_trainer_cls

    trainer = get_trainer_cls(config.trainer.v1.trainer_mode)(config)
    trainer._init_tokenizer()
    trainer._init_dataloader()
    trainer.agent_loop_manager = RolloutManager.create(config=config, llm_client=None)
    return trainer


def read(queue: Any, keys: list[str]) -> list[dict[str, Any]]:
    """Fetch the rows of these keys like verl's trainer."""
    fields = queue.kv_batch_get(keys=keys, partition_id="train")
    return [{name: fields[name][at] for name in fields.keys()} for at in range(len(keys))]  # noqa: SIM118


def assert_same(row: dict[str, Any], output: dict[str, Any]) -> None:
    """Check that rows from the queue equal those of `as_verl`, token by token."""
    prompt, response = output["prompt_ids"], output["response_ids"]
    assert row["prompts"].tolist() == prompt and row["responses"].tolist() == response
    assert row["input_ids"].tolist() == prompt + response
    assert row["response_mask"].tolist() == row["loss_mask"].tolist() == output["response_mask"]
    assert row["rollout_log_probs"].tolist() == pytest.approx(output["response_logprobs"])
    assert row["rm_scores"].tolist() == [0.0] * (len(response) - 1) + [output["reward_score"]]


def test_the_trainer_reads_the_rollouts_of_the_service(
    queue: Any, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps. A group of the first fails and is refilled; the weights change during all of the second."""
    from verl.checkpoint_engine.base import CheckpointEngineManager

    monkeypatch.setattr(CheckpointEngineManager, "update_weights", CheckpointEngineManager.update_weights)
    tasks = [task(name) for name in "abcde"]
    tasks[1]["faults"] = {"init": "sandbox"}
    with toy_service(weight_version="4") as toy:
        trainer = trainer_of(small_example(tmp_path, tasks, toy.url, tiny_model))

        def sampled() -> list[tuple[dict[str, Any], dict[str, Any]]]:
            batch, metrics = trainer.replay_buffer.sample(trainer.global_steps, "train", batch_size=2)
            evicted.append(metrics.get("training/rollout_failure/evicted_samples", 0))
            return list(zip(batch.tags, read(queue, batch.keys), strict=True))

        evicted: list[int] = []
        trainer.global_steps = 1
        trainer._add_prompts_to_generate(2)
        taken = sampled()
        trainer.global_steps = 2
        calls = sum(count for (_, step), count in toy.world.entered.items() if step == "call")
        toy.close_gate("call")
        trainer._add_prompts_to_generate(2)
        toy.until_entered("call", calls + 4)
        with connect_sync(toy.url) as client, weights_change_sync(client, 5):
            pass
        toy.open_gate("call")
        taken += sampled()
        with connect_sync(toy.url) as client:
            results = [one for one in client.page(limit=1000).results if one.reward is not None]
    outputs = {one.job_id: as_verl(one, 1024, 512) for one in results}
    assert sorted(row["extra_fields"]["job_id"] for _, row in taken) == sorted(outputs)
    assert len(taken) == 8 and evicted == [1, 0]
    for tag, row in taken:
        [output] = outputs[row["extra_fields"]["job_id"]]
        assert_same(row, output)
        assert tag["status"] == "success" and tag["response_len"] == len(output["response_ids"])
        versions = (tag["min_global_steps"], tag["max_global_steps"])
        assert versions == {1: (4, 4), 2: (4, 5)}[tag["global_steps"]]


def test_a_forked_episode_is_several_rows_of_the_queue(queue: Any, toy: ToyService) -> None:
    """As verl's worker puts them there, without its actor."""
    from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
    from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ

    with connect_sync(toy.url) as client:
        [[result]] = collect(client, [GroupTemplate(toy.url, "toy").group("g", task(), 1)])
    whole = result.trajectory
    assert whole is not None
    end = whole.turns[0].end
    before = Trajectory(
        ids=whole.ids[:end],
        loss_mask=whole.loss_mask[:end],
        logprobs=whole.logprobs[:end],
        turns=whole.turns[:1],
    )
    outputs = as_verl(result.model_copy(update={"forks": [before]}), 1024, 512)
    made = worker(toy.url, AgentLoopWorkerTQ.__ray_metadata__.modified_class)
    given = [AgentLoopOutput(**output) for output in outputs]
    asyncio.run(made._agent_loop_postprocess(given, False, uid="u", session_id=1, global_steps=5))
    taken = read(queue, ["u_1_0", "u_1_1"])
    assert len(taken[0]["responses"]) < len(taken[1]["responses"])
    for row, output in zip(taken, outputs, strict=True):
        assert_same(row, output)


async def test_a_failure_is_raised_so_that_the_group_fails() -> None:
    with toy_service("error500=1") as toy:
        try:
            with pytest.raises(EpisodeFailed):
                await run(worker(toy.url), "a")
        finally:
            await close_shared()


def test_an_update_of_weights_is_announced(toy: ToyService, monkeypatch: pytest.MonkeyPatch) -> None:
    """verl's own manager; its workers, Ray actors on GPUs, are absent."""
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
    patch_weight_updates(toy.url)
    manager = object.__new__(base.CheckpointEngineManager)
    manager.backend, manager.actor_wg = "naive", SimpleNamespace(update_weights=update_weights)
    assert manager.update_weights(7) == {}
    assert seen == [(7, True)]
    with connect_sync(toy.url) as client:
        [server] = client.model_servers()
        router = client.status().router
    assert server.weight_version == "7" and router is not None and not router.paused


def test_verl_accepts_the_example(tmp_path: Path) -> None:
    """The requirements that verl checks before it starts workers on GPUs."""
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.trainer.ppo.v1 import get_trainer_cls
    from verl.utils.config import validate_config

    config = example(tmp_path, *command_of("verl.md", "examples/trainers/verl/train.sh")[2:])
    validate_config(config, need_reference_policy(config), need_critic(config))
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    longest = rollout.prompt_length + rollout.response_length
    assert actor.ppo_max_token_len_per_gpu >= longest <= rollout.log_prob_max_token_len_per_gpu
    get_trainer_cls(config.trainer.v1.trainer_mode)(config)
    named = pkgutil.resolve_name(rollout.agent.agent_loop_manager_class.replace(".Rollout", ":Rollout"))
    assert named is RolloutManager
    [loop] = yaml.safe_load(Path(rollout.agent.agent_loop_config_path).read_text())
    assert loop["name"] == rows([task("a")], environment="bash")[0]["agent_name"]
