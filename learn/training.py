"""One run: TRL's `GRPOTrainer`, with rollouts of the service, and evaluations on the held-out tasks."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from learn.ahead import AheadRollouts
from learn.drift import retokenised
from learn.plan import Plan
from learn.records import Records, curve, read_records
from learn.system import Examination, Weights
from prorl_envs import Sampling
from prorl_envs.trainers.asking import connect_sync
from prorl_envs.trainers.trl import TrlRollouts, prompts, service_reward
from prorl_envs.trainers.weights import weights_change_sync

#: Number of rollouts per step whose log-probabilities the trainer computes too.
_CHECKED = 8


@dataclass(frozen=True, slots=True)
class Run:
    """Inputs of one run.

    Args:
        plan: plan of the run.
        seed: seed of the trainer's order of tasks.
        start: the initial model, a folder or a name.
        folder: holds its records and checkpoints.
        service: URL of the rollout service.
        weights: puts weights into the model server.
        examination: evaluates on the held-out tasks.
        rows: training tasks, as many as its steps need.
        reserve: further tasks, for dynamic sampling.
    """

    plan: Plan
    seed: int
    start: str
    folder: Path
    service: str
    weights: Weights
    examination: Examination
    rows: Sequence[dict[str, Any]]
    reserve: Iterator[dict[str, Any]]


def train(run: Run, progress: Callable[[dict[str, Any]], None]) -> None:
    """Train to the plan's last step; resume from the last checkpoint if there is one.

    Args:
        progress: called with each record.
    """
    checkpoints = run.folder / "checkpoints"
    last = newest(checkpoints)
    records = Records(run.folder / "records.jsonl", since=step_of(last) if last else None)
    rollouts = _rollouts(run)
    watch = _Watch(run, rollouts, records, progress)
    trainer = (_OffPolicy if run.plan.staleness else GRPOTrainer)(
        model=run.start,
        args=_config(run, checkpoints),
        train_dataset=Dataset.from_list(prompts(run.rows)),
        processing_class=AutoTokenizer.from_pretrained(run.start),
        reward_funcs=service_reward,
        rollout_func=watch.rollouts,
        callbacks=[watch],
    )
    trainer.remove_callback(PrinterCallback)
    torch.set_num_threads(run.plan.threads)
    try:
        trainer.train(resume_from_checkpoint=str(last) if last else None)
        with connect_sync(run.service) as client, weights_change_sync(client, run.plan.steps):
            run.weights(trainer, run.plan.steps)
        watch.examine(run.plan.steps)
    finally:
        rollouts.close()


def _rollouts(run: Run) -> TrlRollouts | AheadRollouts:
    plan = run.plan
    if not plan.staleness:
        reserve = run.reserve if plan.dynamic else None
        return TrlRollouts(run.service, plan.environment, weights=run.weights, reserve=reserve)
    return AheadRollouts(
        run.service,
        plan.environment,
        run.rows,
        step=plan.prompts,
        samples=plan.samples,
        staleness=plan.staleness,
        weights=run.weights,
        sampling=Sampling(max_tokens=plan.max_tokens),
    )


class _OffPolicy(GRPOTrainer):  # type: ignore[misc]
    """Trainer that uses the log-probabilities of sampling as those of the old policy, so that the clipped
    ratio refers to the sampling policy. TRL does so only for rollouts of its own vLLM."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        output = super()._generate_and_score_completions(inputs)
        return {**output, "old_per_token_logps": output["sampling_per_token_logps"]}


def control(run: Run, progress: Callable[[dict[str, Any]], None]) -> None:
    """Do the same evaluations on the held-out tasks with the initial weights, unless they are recorded."""
    path = run.folder / "records.jsonl"
    seen = [step for step, _ in curve(read_records(path))]
    records = Records(path, since=max(seen) + 1 if seen else None)
    for step in examined(run.plan):
        if step in seen:
            continue
        with connect_sync(run.service) as client, weights_change_sync(client, step):
            run.weights.server.load(run.start)
        progress(records.add("held_out", step, run.examination()))


def examined(plan: Plan) -> list[int]:
    """Return the steps with an evaluation on the held-out tasks."""
    return sorted({*range(0, plan.steps, plan.evaluate_every), plan.steps})


def newest(checkpoints: Path) -> Path | None:
    """Return the checkpoint of the latest step, or None."""
    return max(checkpoints.glob("checkpoint-*"), key=step_of, default=None)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


class _Watch(TrainerCallback):  # type: ignore[misc]
    """Recorder of a run's progress, with an evaluation on the held-out tasks every few steps."""

    def __init__(
        self,
        run: Run,
        rollouts: TrlRollouts | AheadRollouts,
        records: Records,
        progress: Callable[[dict[str, Any]], None],
    ) -> None:
        self._run = run
        self._rollouts = rollouts
        self._records = records
        self._progress = progress
        self._notes: dict[str, Any] = {}

    def rollouts(self, given: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
        """Return the service's rollouts; evaluate on the held-out tasks before the weights change."""
        began = time.monotonic()
        output = self._rollouts(given, trainer)
        behind = [trainer.state.global_step - int(version) for version in output["weight_version"] if version]
        self._notes = {
            "rollouts_s": time.monotonic() - began,
            "stale": sum(steps > 0 for steps in behind),
            "staleness": max(behind, default=0),
            "failed": sum(reward is None for reward in output["reward"]),
            "logprob_gap": logprob_gap(trainer, output),
        }
        if self._run.plan.retokenise:
            output, drift = retokenised(output, trainer.processing_class.backend_tokenizer)
            self._notes |= drift
        if trainer.state.global_step % self._run.plan.evaluate_every == 0:
            self.examine(trainer.state.global_step)
        return output

    def examine(self, step: int) -> None:
        """Evaluate the served weights on the held-out tasks."""
        began = time.monotonic()
        numbers = self._run.examination()
        numbers["seconds"] = time.monotonic() - began
        self._progress(self._records.add("held_out", step, numbers))

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        if "reward" not in logs:
            return
        kept = ("reward", "reward_std", "frac_reward_zero_std", "entropy", "grad_norm", "step_time")
        numbers = {key: logs[key] for key in kept if key in logs}
        length = {"length": logs.get("completions/mean_length")}
        record = self._records.add("train", state.global_step, {**numbers, **length, **self._notes})
        self._progress(record)


def logprob_gap(trainer: Any, output: dict[str, list[Any]]) -> float:
    """Return the largest difference between the model server's log-probability of a sampled token and the
    trainer's, over the first few rollouts: close to 0 only if both use the same ids and weights."""
    pairs = list(zip(output["prompt_ids"], output["completion_ids"], strict=True))[:_CHECKED]
    width = max(len(prompt) + len(completion) for prompt, completion in pairs)
    ids = torch.zeros((len(pairs), width), dtype=torch.long)
    for row, (prompt, completion) in enumerate(pairs):
        ids[row, : len(prompt) + len(completion)] = torch.tensor([*prompt, *completion])
    with torch.no_grad():  # padding on the right, which no earlier token sees
        logprobs = trainer.model(input_ids=ids.to(trainer.model.device)).logits.float().log_softmax(-1).cpu()
    gap = 0.0
    for row, (prompt, completion) in enumerate(pairs):
        own = logprobs[row, len(prompt) - 1 : len(prompt) + len(completion) - 1]
        own = own.gather(1, torch.tensor(completion)[:, None])[:, 0]
        served, mask = torch.tensor(output["logprobs"][row]), torch.tensor(output["env_mask"][row])
        gap = max(gap, ((own - served).abs() * mask).max().item())
    return gap


def _config(run: Run, checkpoints: Path) -> GRPOConfig:
    plan = run.plan
    return GRPOConfig(
        output_dir=str(checkpoints),
        seed=run.seed,
        use_cpu=plan.device == "cpu",
        bf16=plan.dtype == "bfloat16",
        max_steps=plan.steps,
        per_device_train_batch_size=plan.micro_batch,
        gradient_accumulation_steps=plan.prompts * plan.samples // plan.micro_batch,
        num_generations=plan.samples,
        num_iterations=plan.updates,
        learning_rate=plan.learning_rate,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=2,
        max_grad_norm=1.0,
        temperature=1.0,
        max_completion_length=plan.max_tokens,
        shuffle_dataset=False,
        save_steps=plan.evaluate_every,
        save_total_limit=1,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        gradient_checkpointing=plan.device != "cpu",
        dataloader_pin_memory=False,
        model_init_kwargs={"dtype": plan.dtype},
    )
