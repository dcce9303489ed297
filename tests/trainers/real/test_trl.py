"""TRL's own trainers with rollouts of a service."""

import ast
import inspect
import itertools
import math
import runpy
from pathlib import Path
from typing import Any

import pytest

from prorl_envs.exports.chat import training_messages
from prorl_envs.exports.formats import ExportFormat, export
from prorl_envs.rollout.api.types import GroupRequest, JobState
from prorl_envs.trainers.asking import connect_sync
from prorl_envs.trainers.trl import TrlRollouts, prompts, service_reward
from prorl_envs.trainers.trl_async import TrlAsyncWorker, TrlWeightTransfer
from tests.trainers.conftest import ToyService, task, toy_service
from tests.trainers.real.conftest import command_of

pytestmark = [pytest.mark.trainers, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]


def grpo(model: Path, output: Path, rollouts: TrlRollouts, **options: Any) -> Any:
    import trl
    from datasets import Dataset
    from transformers import AutoTokenizer

    args = trl.GRPOConfig(
        output_dir=str(output),
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=256,
        learning_rate=1e-2,
        max_steps=2,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        **options,
    )
    return trl.GRPOTrainer(
        model=str(model),
        args=args,
        train_dataset=Dataset.from_list(prompts(task(name) for name in ("a", "b", "c", "d"))),
        processing_class=AutoTokenizer.from_pretrained(str(model)),
        reward_funcs=service_reward,
        rollout_func=rollouts,
    )


def test_grpo_trains_on_the_rows_of_the_service(tiny_model: Path, tmp_path: Path) -> None:
    """Run two steps in which a quarter of the samples fails. Failed samples count for no mean and no loss."""
    uploads: list[int] = []

    def upload(trainer: Any, version: int) -> None:
        assert toy.server.counts.running == 0
        uploads.append(version)

    with toy_service("solve=2,wrong=1,error500=1") as toy:
        rollouts = TrlRollouts(toy.url, "toy", weights=upload)
        trainer = grpo(tiny_model, tmp_path, rollouts)
        before = trainer.model.lm_head.weight.detach().clone()
        batches: list[dict[str, Any]] = []
        generate = trainer._generate_and_score_completions

        def generate_and_keep(inputs: Any) -> Any:
            batches.append(generate(inputs))
            return batches[-1]

        trainer._generate_and_score_completions = generate_and_keep
        trainer.train()
        rollouts.close()
    assert uploads == [0, 1]
    for batch in batches:
        advantages = batch["advantages"].tolist()
        assert sorted(round(advantage, 2) for advantage in advantages) == [-1.15, 0.0, 0.58, 0.58]
        failed = advantages.index(0.0)
        assert batch["tool_mask"][failed, 0] == 0
        loss_mask = batch["completion_mask"] * batch["tool_mask"]
        assert (loss_mask.sum(dim=1) > 0).sum() == 3 and loss_mask[failed].sum() == 0
    logs = [log for log in trainer.state.log_history if "reward" in log]
    assert len(logs) == 2
    for log in logs:
        assert {"reward_std", "frac_reward_zero_std"} <= set(log)  # as named on the page
        assert log["reward"] == pytest.approx(2 / 3) and log["rollouts/failed"] == pytest.approx(0.25)
        assert math.isfinite(log["loss"]) and log["grad_norm"] > 0
    assert not (trainer.model.lm_head.weight == before).all()


def test_trl_accepts_the_examples() -> None:
    """The examples' imports, and the names of their options."""
    import trl
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    assert command_of("trl.md", "examples/trainers/trl/train.py")[1:] == ["tasks.jsonl"]
    kinds = (trl.GRPOConfig, trl.GRPOTrainer, AsyncGRPOConfig, AsyncGRPOTrainer)
    known = {kind.__name__: set(inspect.signature(kind).parameters) for kind in kinds}
    checked = set()
    for path in sorted((Path(__file__).parents[3] / "examples" / "trainers" / "trl").glob("*.py")):
        runpy.run_path(str(path), run_name="imported")
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in known:
                assert {keyword.arg for keyword in node.keywords} <= known[node.func.id]
                checked.add(node.func.id)
    assert checked == set(known)


def test_an_interrupted_step_leaves_no_jobs_at_the_service(
    tiny_model: Path, tmp_path: Path, toy: ToyService
) -> None:
    """The trainer is interrupted while it waits for the service."""
    toy.close_gate("eval")
    rollouts = TrlRollouts(toy.url, "toy")
    follow = rollouts._client.follow

    def interrupted(*args: Any) -> Any:
        toy.until_entered("eval", 4)
        raise KeyboardInterrupt

    rollouts._client.follow = interrupted  # type: ignore[method-assign, assignment]
    trainer = grpo(tiny_model, tmp_path, rollouts)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    rollouts._client.follow = follow  # type: ignore[method-assign]
    with connect_sync(toy.url) as client:
        results = client.page().results
        assert {result.state for result in results} == {JobState.CANCELLED}
    toy.until_empty()
    rollouts.close()


class PlainAttention:
    """Replace TRL's GPU kernel (FlashAttention 3): causal attention of packed sequences."""

    @staticmethod
    def flash_attn_varlen_func(
        query: Any, key: Any, value: Any, cu_q: Any, cu_k: Any, *_: Any, softmax_scale: float, **__: Any
    ) -> Any:
        import torch

        heads = query.shape[1] // key.shape[1]
        parts = []
        for (q0, q1), (k0, k1) in zip(
            itertools.pairwise(cu_q.tolist()), itertools.pairwise(cu_k.tolist()), strict=True
        ):
            q = query[q0:q1].transpose(0, 1)
            k, v = (x[k0:k1].repeat_interleave(heads, dim=1).transpose(0, 1) for x in (key, value))
            seen = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool).tril(k1 - k0 - (q1 - q0))
            scores = (q @ k.transpose(1, 2) * softmax_scale).masked_fill(~seen, -math.inf)
            parts.append((scores.softmax(-1) @ v).transpose(0, 1))
        return torch.cat(parts)


def test_the_asynchronous_trainer_trains(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run three steps with weights that change during episodes. Groups without a gradient never arrive.

    Two parts of this trainer need a GPU and are replaced: the attention kernel, and the look-up of the GPU's
    speed for a metric.
    """
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing

    monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *_: None)
    monkeypatch.setattr(packing, "_flash_attn", lambda: PlainAttention)
    sent: list[int] = []

    def send(iterator: Any) -> None:
        assert toy.server.counts.running == 0
        sent.append(sum(1 for _ in iterator))

    args = AsyncGRPOConfig(
        output_dir=str(tmp_path),
        per_device_train_batch_size=4,
        num_generations=4,
        max_steps=3,
        max_staleness=1,
        token_budget=8192,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        disable_tqdm=True,
        dtype="float32",
    )
    tasks = [task(name) for name in ("a", "b", "c")]
    with toy_service("solve=2,wrong=1,error500=1") as toy:
        worker = TrlAsyncWorker(toy.url, "toy", tasks, samples=4, groups=2, max_staleness=args.max_staleness)
        transfer = TrlWeightTransfer(toy.url, send, mode="finish")
        trainer = AsyncGRPOTrainer(
            str(tiny_model),
            args=args,
            train_dataset=Dataset.from_list(prompts(tasks)),
            processing_class=AutoTokenizer.from_pretrained(str(tiny_model)),
            rollout_worker=worker,
            weight_transfer=transfer,
        )
        trainer.train()
        with connect_sync(toy.url) as client:
            toy.until_empty()  # no group continues after the trainer's end
            versions = {
                turn.weight_version
                for result in client.page().results
                if result.trajectory is not None
                for turn in result.trajectory.turns
            }
    assert len(sent) >= 3 and len(set(sent)) == 1
    assert {"1"} <= versions <= {str(version) for version in range(1, len(sent) + 1)}
    logs = [log for log in trainer.state.log_history if "reward" in log]
    assert logs and all(math.isfinite(log["loss"]) for log in logs)
    assert all(log["sample/staleness_max"] <= 1 for log in logs)


def test_stale_groups_are_cancelled_at_the_service(toy: ToyService) -> None:
    toy.close_gate("eval")
    worker = TrlAsyncWorker(toy.url, "toy", [task()], samples=2, groups=1, max_staleness=1)
    worker.start()
    try:
        toy.until_entered("eval", 2)
        worker.update_model_version(1)
        worker.update_model_version(2)  # two versions behind: one too many
        toy.until_entered("init", 4)  # the next group takes its place
        with connect_sync(toy.url) as client:
            [*old] = [result for result in client.page(wait_s=5).results if "/0/" in result.job_id]
        assert [result.state for result in old] == [JobState.CANCELLED] * 2
        assert worker.metrics_queue.get(timeout=5) == {"rollout/evicted_groups": 1.0}
        worker.check_health(60)
    finally:
        worker.stop()
    toy.until_empty()


def test_a_worker_whose_tasks_are_refused_is_unhealthy(toy: ToyService) -> None:
    worker = TrlAsyncWorker(toy.url, "toy", [{"id": 7}], samples=2)
    worker.start()
    assert worker._thread is not None
    worker._thread.join(60)
    with pytest.raises(RuntimeError, match="toy task"):
        worker.check_health(60)
    worker.stop()


@pytest.mark.parametrize("variant", [{"staleness": 1}, {"dynamic": True}, {"retokenise": True}])
def test_the_ablations_of_make_learn_affect_the_trainer(
    variant: dict[str, Any], tiny_model: Path, tmp_path: Path
) -> None:
    """Three steps of each ablation, with the trainer, rollouts and records of `make learn`."""
    from learn.plan import load_plan
    from learn.records import read_records
    from learn.system import Examination
    from learn.training import Run, train

    sizes = {"steps": 3, "prompts": 2, "samples": 4, "micro_batch": 8, "evaluate_every": 3, "max_tokens": 64}
    plan = load_plan(Path(__file__).parents[3] / "learn" / "tiny.yaml")
    plan = plan.changed({**sizes, **variant, "environment": "toy"})
    known = {"instruction": "Know it."}  # every sample of it is right
    rows = [task(f"row{number}", **(known if number % 2 else {})) for number in range(8)]
    uploads: list[int] = []
    with toy_service() as toy:
        run = Run(
            plan=plan,
            seed=1,
            start=str(tiny_model),
            folder=tmp_path,
            service=toy.url,
            weights=lambda _, version: uploads.append(version),  # type: ignore[arg-type]
            examination=Examination(toy.url, "toy", [task("held")], [1]),
            rows=rows,
            reserve=iter([task(f"more{number}") for number in range(20)]),
        )
        train(run, lambda _: None)
        toy.until_empty()
    steps = [line for line in read_records(tmp_path / "records.jsonl") if line["kind"] == "train"]
    assert [line["step"] for line in steps] == [1, 2, 3] and uploads == [0, 1, 2, 3]
    assert [line["staleness"] for line in steps] == ([0, 1, 1] if "staleness" in variant else [0, 0, 0])
    equal = [line["frac_reward_zero_std"] for line in steps]
    assert equal == [0.0] * 3 if "dynamic" in variant else min(equal) >= 0.5
    assert all(("drift" in line) == ("retokenise" in variant) for line in steps)
    assert all(line["grad_norm"] > 0 for line in steps)


@pytest.mark.parametrize("format_", [ExportFormat.SFT, ExportFormat.HF])
def test_sft_trains_on_exported_conversations(
    tiny_model: Path, tmp_path: Path, format_: ExportFormat
) -> None:
    """TRL renders the same tokens from an export as from the results' messages and tools."""
    import trl
    from datasets import load_dataset
    from transformers import AutoTokenizer

    with toy_service("solve=1") as toy, connect_sync(toy.url) as client:
        client.submit([GroupRequest(id="g", environment="toy", task=task(), samples=4)])
        results = list(client.follow(["g"]))
    path = tmp_path / ("export" if format_ is ExportFormat.HF else "export.jsonl")
    export(((one.job_id, one) for one in results), format_, path)
    cache = {"split": "train", "cache_dir": str(tmp_path / "cache")}
    if format_ is ExportFormat.HF:
        dataset = load_dataset(str(path), **cache).select_columns(["messages", "tools"])
    else:
        dataset = load_dataset("json", data_files=str(path), **cache)
    tokenizer = AutoTokenizer.from_pretrained(str(tiny_model))
    args = trl.SFTConfig(
        output_dir=str(tmp_path / "out"),
        per_device_train_batch_size=2,
        max_steps=2,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = trl.SFTTrainer(
        model=str(tiny_model), args=args, train_dataset=dataset, processing_class=tokenizer
    )
    rows = [row["input_ids"] for row in trainer.train_dataset]
    expected = [
        tokenizer.apply_chat_template(
            training_messages(one), tools=one.tools, tokenize=True, return_dict=False
        )
        for one in results
    ]
    assert sorted(rows) == sorted(expected)
    trainer.train()
    assert all(math.isfinite(log["loss"]) for log in trainer.state.log_history if "loss" in log)
