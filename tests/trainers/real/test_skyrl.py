"""SkyRL's own validation and concatenation of what the generator gives."""

from statistics import fmean
from typing import Any

import pytest

from prorl_envs.trainers.rollouts import close_shared
from prorl_envs.trainers.skyrl import RolloutGenerator, as_skyrl, rows
from tests.trainers.conftest import task, toy_service
from tests.trainers.made import groups as made_groups

pytestmark = [pytest.mark.trainers, pytest.mark.filterwarnings("ignore"), pytest.mark.anyio]


def generator_input(names: list[str], samples: int) -> Any:
    """As SkyRL makes it of rows of its data set."""
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


async def test_the_trainer_takes_what_the_service_rolled_out() -> None:
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


def test_step_wise_rows_are_what_the_trainer_demands() -> None:
    """Episodes that forked: several rows, side by side, the last one marked."""
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
