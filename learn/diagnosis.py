"""Diagnosis of a model: the probability it gives to each right choice, after right choices only.

`python -m learn.diagnosis runs/learn` tests the initial model and every trained model of a folder. Unlike
rewards, it shows in which choices the model has improved.
"""

import itertools
import sys
from collections.abc import Mapping
from itertools import accumulate
from math import exp
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from learn.choices import Choice, choices
from learn.demonstrations import Step
from learn.imitation import written
from learn.plan import load_plan
from learn.system import family_of, opening
from learn.tasks import LearnTask, tasks
from prorl_envs import Environment
from prorl_envs.model.tokens.loading import load_renderer
from prorl_envs.model.tokens.rendering import TemplateRenderer

#: Tasks on which a model is tested, a third of each level.
TASKS = 90


def probability(
    model: Any, renderer: TemplateRenderer, family: type[Environment[Any]], task: LearnTask, choice: Choice
) -> float:
    """Return the probability that a model gives to the tokens of the right choice, one after the other."""
    shown = written(task, [*choice.before, Step(choice.command)], opening(family, task.row), renderer)
    start, end = shown.answers[len(choice.before)]
    ids = shown.ids[:end]
    texts = [renderer.tokenizer.decode([number], skip_special_tokens=False) for number in ids[start:]]
    ends = list(accumulate(map(len, texts)))
    first = "".join(texts).index(choice.command) + len(choice.lead)
    last = first + len(choice.right)
    with torch.no_grad():
        scores = model(input_ids=torch.tensor([ids])).logits[0].float().log_softmax(-1)
    own = [
        start + at
        for at, text in enumerate(texts)
        if ends[at] > first and ends[at] - len(text) < last and text
    ]
    return exp(sum(scores[at - 1, ids[at]].item() for at in own))


def probabilities(model: Any, renderer: TemplateRenderer, family: type[Environment[Any]]) -> dict[str, float]:
    """Return means over held-out tasks, by kind of choice."""
    found: dict[str, list[float]] = {}
    for task in itertools.islice(tasks("held_out", 0), TASKS):
        for choice in choices(task):
            found.setdefault(choice.what, []).append(probability(model, renderer, family, task, choice))
    return {what: mean(values) for what, values in found.items()}


def table(models: Mapping[str, Path], tokenizer: Path, family: type[Environment[Any]]) -> Table:
    """Make a column for each model.

    Args:
        models: folders, by their labels.
        tokenizer: folder of the tokenizer of all of them.
        family: environment family of the tasks.
    """
    renderer = load_renderer(tokenizer)
    kinds = {c.what: c for task in itertools.islice(tasks("held_out", 0), 3) for c in choices(task)}
    columns = [
        probabilities(AutoModelForCausalLM.from_pretrained(folder).eval(), renderer, family)
        for folder in models.values()
    ]
    shown = Table(title="probability of the right choice, held-out tasks", title_justify="left")
    for name in ("choice", "blind", *models):
        words = name == "choice"
        shown.add_column(name, justify="left" if words else "right", no_wrap=not words)
    for what, choice in kinds.items():
        shown.add_row(what, f"{1 / choice.of:.2f}", *(f"{column[what]:.2f}" for column in columns))
    return shown


def models_of(out: Path) -> dict[str, Path]:
    """Return the initial model and the newest weights of each run of a folder."""
    trained = {path.parent.name: path for path in sorted(out.glob("*/weights"))}
    return {"start": out / "start", **trained}


def main() -> None:
    torch.set_num_threads(1)
    out = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/learn")
    family = family_of(load_plan(Path(__file__).with_name("tiny.yaml")))
    Console().print(table(models_of(out), out / "tokenizer", family))


if __name__ == "__main__":
    main()
