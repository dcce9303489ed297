"""Initial model: a tokenizer, a small Qwen 3, and a short imitation phase that teaches it to make calls."""

import itertools
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from learn.demonstrations import LAST_WORDS, Step, demonstrations
from learn.plan import ModelPlan
from learn.tasks import LearnTask, tasks
from prorl_envs import Prompt
from prorl_envs.model.tokens.loading import load_renderer
from prorl_envs.model.tokens.rendering import TemplateRenderer
from prorl_envs.model.types import Sampled
from prorl_envs.testing.tokenizer import END_OF_TEXT, save_tokenizer

#: Constant parts of a call, which may each be one token.
WHOLE = ('{"name": "', '", "arguments": {"command": "', '"}}')
#: Short chat template: every token costs time, and a model this small does not use a schema.
TEMPLATE = Path(__file__).with_name("template.jinja")
_IGNORED = -100


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A demonstration as token ids.

    Args:
        ids: the whole conversation, shape [T].
        answers: ranges of `ids` that the model generates.
    """

    ids: list[int]
    answers: list[tuple[int, int]]


def make_tokenizer(folder: Path, prompts: Callable[[LearnTask], Prompt], seed: int) -> TemplateRenderer:
    """Train a tokenizer on the text of some conversations, and save it."""
    corpus = [LAST_WORDS, " Tools: bash", "system", "user", "assistant", "tool"]
    for task, steps in itertools.islice(demonstrations(tasks("train", seed), seed), 300):
        prompt = prompts(task)
        corpus += [str(message["content"]) for message in prompt.messages]
        calls = [{"name": "bash", "arguments": {"command": step.command}} for step in steps]
        corpus += [f"{json.dumps(call)}\n{step.output}" for call, step in zip(calls, steps, strict=True)]
    save_tokenizer(folder, "\n".join(corpus), whole=WHOLE, template=TEMPLATE.read_text())
    return load_renderer(folder)


def written(
    task: LearnTask,
    steps: Sequence[Step],
    prompt: Prompt,
    renderer: TemplateRenderer,
    tokenised: Callable[[list[int]], list[int]] = list,
) -> Demonstration:
    """Convert a demonstration to token ids, assembled like a rollout.

    Args:
        tokenised: replaces an answer's ids.
    """
    ids, answers = renderer.prompt(prompt.messages, prompt.tools), []

    def say(canonical: list[int]) -> Sampled:
        answer = tokenised(canonical)
        answers.append((len(ids), len(ids) + len(answer)))
        ids.extend(answer)
        return Sampled(tuple(answer), (0.0,) * len(answer), "stop", "", "")

    for step in steps:
        function = {"name": "bash", "arguments": {"command": step.command}}
        call = {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "function": function}]}
        answer = renderer.assistant(call)
        if step.broken:
            say([*answer[: -len(answer) // 3], answer[-1]])
            return Demonstration(ids, answers)
        result = {"role": "tool", "tool_call_id": "c", "name": "bash", "content": step.output}
        ids.extend(renderer.bridge(say(answer), [result]))
    say(renderer.assistant({"role": "assistant", "content": LAST_WORDS}))
    return Demonstration(ids, answers)


def make_model(plan: ModelPlan, renderer: TemplateRenderer) -> Qwen3ForCausalLM:
    """Make a Qwen 3 with random weights."""
    torch.manual_seed(plan.seed)
    tokenizer = renderer.tokenizer
    config = Qwen3Config(
        vocab_size=renderer.vocab_size,
        hidden_size=plan.hidden,
        intermediate_size=3 * plan.hidden,
        num_hidden_layers=plan.layers,
        num_attention_heads=plan.hidden // 32,
        num_key_value_heads=plan.hidden // 32,
        head_dim=32,
        max_position_embeddings=4096,
        # Conversations are short: a smaller base of the rotary positions makes copying easy to learn.
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        tie_word_embeddings=True,
        eos_token_id=renderer.stop_ids[0],
        pad_token_id=tokenizer.token_to_id(END_OF_TEXT),
        bos_token_id=None,
        dtype="float32",
    )
    return Qwen3ForCausalLM(config)


def imitate(
    model: Qwen3ForCausalLM,
    shown: Sequence[Demonstration],
    plan: ModelPlan,
    progress: Callable[[float], None],
) -> None:
    """Train on demonstrations.

    Args:
        progress: called with each step's loss, in nats per token.
    """
    steps = len(shown) // plan.batch
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=plan.imitation_rate, betas=(0.9, 0.98), weight_decay=0.0, fused=True
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, plan.imitation_rate, total_steps=steps + 1, pct_start=0.05
    )
    pad = model.config.pad_token_id
    model.train()
    for step in range(steps):
        batch = _batch(shown[step * plan.batch : (step + 1) * plan.batch], pad)
        loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        progress(loss.item())


def untie(model: Qwen3ForCausalLM) -> None:
    """Give the last layer its own weights: if they are shared with the embedding, vLLM 0.32 keeps the old
    ones there when it loads new ones."""
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())


def _batch(shown: Sequence[Demonstration], pad: int) -> dict[str, Any]:
    width = max(len(one.ids) for one in shown)
    ids = torch.full((len(shown), width), pad)
    labels = torch.full((len(shown), width), _IGNORED)
    seen = torch.zeros((len(shown), width), dtype=torch.long)
    for row, one in enumerate(shown):
        ids[row, : len(one.ids)] = torch.tensor(one.ids)
        seen[row, : len(one.ids)] = 1
        for start, end in one.answers:
            labels[row, start:end] = ids[row, start:end]
    return {"input_ids": ids, "attention_mask": seen, "labels": labels}


def save(model: Any, folder: Path, tokenizer: Path) -> None:
    """Write a model with its tokenizer in the format of a model server."""
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tokenizer / name, folder)
