"""SkyRL's own validation and concatenation of the generator's output, and its parsing of the example."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from prorl_envs.testing.tokenizer import tokenizer_folder
from prorl_envs.trainers.rollouts import close_shared
from prorl_envs.trainers.skyrl import RolloutGenerator, as_skyrl, rows
from tests.trainers.conftest import task, toy_service
from tests.trainers.made import groups as made_groups
from tests.trainers.real.conftest import command_of

pytestmark = [pytest.mark.trainers, pytest.mark.filterwarnings("ignore"), pytest.mark.anyio]


def generator_input(names: list[str], samples: int) -> Any:
    """Return the input that SkyRL makes from rows of its data set."""
    from skyrl.train.generators.utils import prepare_generator_input

    made = [
        {
            "prompt": row["prompt"],
            "env_class": row["env_class"],
            "env_extras": {"task": row["task"]},
            "uid": str(n),
        }
        for n, row in enumerate(rows([task(name) for name in names], environment="toy"))
    ]
    params = {"temperature": 1.0, "top_p": 1.0, "max_tokens": 128}
    batch, uids = prepare_generator_input(made, samples, params, "toy", "train", 1)
    assert len(uids) == len(names) * samples
    return batch


async def test_the_trainer_accepts_the_rollouts_of_the_service() -> None:
    from skyrl.train.generators.utils import concatenate_generator_outputs
    from skyrl.train.utils.trainer_utils import validate_generator_output

    with toy_service("solve=2,wrong=1,error500=1") as toy:
        generator = RolloutGenerator(toy.url, "toy", end_token=2)
        try:
            output = await generator.generate(generator_input(["a", "b"], 4))
        finally:
            await close_shared()
    validate_generator_output(8, output)
    failed = [not any(mask) for mask in output["loss_masks"]]
    assert sum(failed) == 2
    for group in (slice(4), slice(4, 8)):
        rewards = list(zip(output["rewards"][group], failed[group], strict=True))
        mean = fmean(reward for reward, missing in rewards if not missing)
        assert all(reward == pytest.approx(mean) for reward, missing in rewards if missing)
    both = concatenate_generator_outputs([output, output])
    assert len(both["response_ids"]) == 16


def test_step_wise_rows_meet_the_trainers_requirements() -> None:
    """Forked episodes: several rows, side by side, the last one marked."""
    from hypothesis import find
    from skyrl.train.generators.base import TrajectoryID
    from skyrl.train.utils.trainer_utils import validate_generator_output

    def forked(group: Any) -> bool:
        return any(len(one.rows) > 1 and one.reward is not None for one in group)

    group = find(made_groups(3, exact=True), forked)
    ids = [TrajectoryID("0", n) for n in range(3)]
    output = as_skyrl([group], ids, 2, step_wise=True)
    assert len(output["response_ids"]) > 3
    validate_generator_output(3, output, step_wise=True)


def test_skyrl_accepts_the_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the commands of its page, until SkyRL would start workers on GPUs."""
    from skyrl.backends.skyrl_train.workers.worker_dispatch import WorkerDispatch
    from skyrl.train.config import SkyRLTrainConfig
    from skyrl.train.dataset import PromptDataset
    from skyrl.train.entrypoints.serve import _validate_serve_cfg
    from skyrl.train.utils import validate_cfg
    from transformers import AutoTokenizer

    examples = Path(__file__).parents[3] / "examples"
    spec = importlib.util.spec_from_file_location("example", examples / "trainers" / "skyrl" / "main.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    make = command_of("skyrl.md", "examples/trainers/make_data.py")
    train = command_of("skyrl.md", "examples/trainers/skyrl/main.py")
    serve = command_of("skyrl.md", "skyrl.train.entrypoints.serve")
    _validate_serve_cfg(SkyRLTrainConfig.from_cli_overrides(serve[1:]))

    monkeypatch.chdir(tmp_path)
    tasks = [task(str(number)) for number in range(64)]
    Path("tasks.jsonl").write_text("".join(json.dumps(one) + "\n" for one in tasks))
    subprocess.run([sys.executable, examples.parent / make[0], *make[1:]], check=True)
    config = SkyRLTrainConfig.from_cli_overrides(train[1:])
    validate_cfg(config)
    for source in (config.data.train_data, config.data.val_data):
        tokenizer = AutoTokenizer.from_pretrained(str(tokenizer_folder()))
        data = PromptDataset(source, tokenizer, config.trainer.max_prompt_length, num_workers=1)
        assert len(data) >= config.trainer.train_batch_size
        _, env_class, extra, _ = data[0]
        assert env_class == rows(tasks, environment="bash")[0]["env_class"]
        assert json.loads(extra["task"]) == tasks[0]
    for ours in (module.Experiment, module.Trainer):  # all overridden names exist
        assert {name for name in vars(ours) if not name.startswith("__")} <= set(dir(ours.__base__))
    assert hasattr(WorkerDispatch, "save_weights_for_sampler")
