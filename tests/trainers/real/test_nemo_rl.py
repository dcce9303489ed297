"""NeMo RL's own post-processing of what the NeMo Gym agent answers: NEMO_RL_SOURCE names a checkout, as PyPI
has a placeholder. The agent itself is tested by make test-nemo."""

import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from prorl_envs.nemo.responses import output_items
from prorl_envs.rollout.checks import NotContiguous
from prorl_envs.rollout.types import Result
from prorl_envs.testing.tokenizer import tokenizer_folder
from prorl_envs.trainers.asking import Asking, collect, connect_sync
from tests.trainers.conftest import ToyService, task

pytestmark = [pytest.mark.trainers, pytest.mark.filterwarnings("ignore")]
if "NEMO_RL_SOURCE" not in os.environ:
    pytest.skip("NEMO_RL_SOURCE names no checkout of NeMo RL", allow_module_level=True)
sys.path.insert(0, os.environ["NEMO_RL_SOURCE"])


def post_processed(items: list[dict[str, Any]]) -> Any:
    """What NeMo RL makes of a rollout's output items."""
    from nemo_rl.environments.nemo_gym import NemoGym
    from transformers import AutoTokenizer

    params: dict[str, Any] = {"input": [{"role": "user", "content": "do"}]}
    answer = {"response": {"output": items}, "responses_create_params": params, "reward": 1.0}
    environment = SimpleNamespace(cfg={})
    tokenizer = AutoTokenizer.from_pretrained(str(tokenizer_folder()))
    process = NemoGym.__ray_metadata__.modified_class._postprocess_nemo_gym_to_nemo_rl_result
    return process(environment, {"responses_create_params": params}, answer, tokenizer)


@pytest.fixture
def result(toy: ToyService) -> Result:
    """An episode of two turns."""
    with connect_sync(toy.url) as client:
        [[only]] = collect(client, [Asking(toy.url, "toy").group("g", task(), 1)])
    return only


def test_a_rollout_is_one_row_of_messages(result: Result) -> None:
    log = post_processed(output_items(result))["message_log"]
    assert result.trajectory is not None
    ids = [token for message in log for token in message["token_ids"].tolist()]
    assert ids == result.trajectory.ids[: len(ids)]
    sampled = [m["token_ids"].numel() for m in log if m["role"] == "assistant"]
    assert sampled == [turn.end - turn.start for turn in result.trajectory.turns]
    logprobs = [p for m in log if m["role"] == "assistant" for p in m["generation_logprobs"].tolist()]
    kept = [p for p, bit in zip(result.trajectory.logprobs, result.trajectory.loss_mask, strict=True) if bit]
    assert logprobs == pytest.approx(kept)


def test_what_it_would_refuse_is_refused_here_first(result: Result) -> None:
    assert result.trajectory is not None
    forked = result.model_copy(update={"forks": [result.trajectory]})
    with pytest.raises(NotContiguous, match=r"service\.reasoning"):
        output_items(forked)
    items = output_items(result)
    second = [item for item in items if "prompt_token_ids" in item][1]
    second["prompt_token_ids"] = [0, *second["prompt_token_ids"][1:]]
    with pytest.raises(AssertionError, match="Non-contiguous"):
        post_processed(items)
