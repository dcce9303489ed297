"""Plan of a run, read from YAML, so that a run can be repeated, and a larger one needs only another file."""

from pathlib import Path
from typing import Annotated, Any, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from prorl_envs import InputError

Count = Annotated[int, Field(ge=1)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelPlan(_Part):
    """The trained model.

    Args:
        name: folder or Hub name of a model; None makes a small one and trains it by imitation.
        layers, hidden, seed: parameters of the small one.
        demonstrations, imitation_rate: number of demonstrations, used once each, and maximum learning rate.
        splits: share of the answers' tokens that are split in two, so that the model samples ids which its
            tokenizer would not produce.
        batch: demonstrations per step.
    """

    name: str | None = None
    layers: Count = 3
    hidden: Count = 96
    seed: int = 0
    demonstrations: Count = 32000
    imitation_rate: float = Field(default=6e-3, gt=0)
    splits: float = Field(default=0.0, ge=0, le=1)
    batch: Count = 8


class Plan(_Part):
    """A run.

    Args:
        model: the trained model.
        environment: environment of the tasks, by its name in the service's settings.
        service: the service's settings; a path is read from the plan's own folder.
        train, held_out: data files; None uses the generated tasks (`learn.tasks`).
        steps: optimizer steps.
        updates: steps for which the same rollouts are used; the loss is clipped as PPO's is.
        prompts: number of tasks that are rolled out at once; `samples`: rollouts of each.
        learning_rate: constant, after a warm-up of two steps.
        evaluate_every: steps between two evaluations on the held-out tasks, a multiple of `updates`.
        held_out_tasks: tasks of one evaluation, one rollout each. The same ones each time.
        micro_batch: rollouts per forward pass; divides the rollouts per step.
        dynamic: whether a group with equal rewards is replaced by one of another task.
        staleness: number of steps by which rollouts are requested ahead; 0 is synchronous.
        retokenise: deliberate drift: the trainer gets ids of the rollouts' text tokenised again.
        max_tokens: limit of one answer.
        max_model_len, max_num_seqs: options of the model server.
        device, dtype: device and number format of the trainer.
        threads: threads of the trainer on a CPU.
        ablations: changes that `--ablations` makes, each in its own runs.
    """

    model: ModelPlan = ModelPlan()
    environment: str = "bash"
    service: Path
    train: Path | None = None
    held_out: Path | None = None
    steps: Count
    updates: Count = 1
    prompts: Count
    samples: Annotated[int, Field(ge=2)]
    learning_rate: float = Field(gt=0)
    evaluate_every: Count
    held_out_tasks: Count
    micro_batch: Count
    dynamic: bool = False
    staleness: Annotated[int, Field(ge=0)] = 0
    retokenise: bool = False
    max_tokens: Count = 48
    max_model_len: Count = 512
    max_num_seqs: Count = 64
    device: str = "cpu"
    dtype: str = "float32"
    threads: Count = 1
    ablations: tuple[dict[str, Any], ...] = ()

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if (self.prompts * self.samples) % self.micro_batch:
            raise ValueError("micro_batch does not divide prompts * samples")
        if self.evaluate_every % self.updates:
            raise ValueError("evaluate_every is no multiple of updates")
        if (self.train is None) != (self.held_out is None):
            raise ValueError("train and held_out are named together, or neither")
        if self.dynamic and self.staleness:
            raise ValueError("dynamic sampling is synchronous here: leave staleness at 0")
        if (self.dynamic or self.staleness) and self.train is not None:
            raise ValueError("dynamic sampling and staleness are for the made tasks, which never end")
        return self

    def changed(self, update: dict[str, Any]) -> "Plan":
        """Return a copy with other values.

        Raises:
            InputError: the values are invalid.
        """
        return _checked({**self.model_dump(), **update}, "the plan")

    @property
    def arm(self) -> str:
        """Return the name of a trained run: `trained`, or its difference from that."""
        others = {
            "dynamic": self.dynamic,
            f"stale{self.staleness}": self.staleness > 0,
            "retokenised": self.retokenise,
        }
        return "-".join(name for name, chosen in others.items() if chosen) or "trained"


def load_plan(path: Path) -> Plan:
    """Read a plan.

    Raises:
        InputError: the file is missing or invalid.
    """
    try:
        given: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error
    if not isinstance(given, dict):
        raise InputError(f"{path} is no mapping")
    for key in ("service", "train", "held_out"):
        if isinstance(given.get(key), str):
            given[key] = path.parent / given[key]
    return _checked(given, str(path))


def _checked(given: dict[str, Any], name: str) -> Plan:
    try:
        return Plan.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise InputError(f"{name}: {where or 'the plan'}: {first['msg']}") from error
