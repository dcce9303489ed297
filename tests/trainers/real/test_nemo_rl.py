"""NeMo RL's own post-processing of the NeMo Gym agent's answers, and its parsing of the example:
NEMO_RL_SOURCE names a checkout, as PyPI has a placeholder. `make test-nemo` tests the agent itself."""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prorl_envs.env.registry import example_path
from prorl_envs.nemo.responses import output_items
from prorl_envs.nemo.rows import write_rows
from prorl_envs.rollout.api.types import Result
from prorl_envs.rollout.client.trajectory_checks import NotContiguous
from prorl_envs.testing.tokenizer import tokenizer_folder
from prorl_envs.trainers.asking import GroupTemplate, collect, connect_sync
from tests.trainers.conftest import ToyService, task

pytestmark = [pytest.mark.trainers, pytest.mark.filterwarnings("ignore")]
if "NEMO_RL_SOURCE" not in os.environ:
    pytest.skip("NEMO_RL_SOURCE names no checkout of NeMo RL", allow_module_level=True)
SOURCE = Path(os.environ["NEMO_RL_SOURCE"]).resolve()
sys.path.insert(0, str(SOURCE))
REPOSITORY = Path(__file__).parents[3]
EXAMPLE = REPOSITORY / "examples" / "trainers" / "nemo_rl" / "grpo.yaml"


def post_processed(items: list[dict[str, Any]]) -> Any:
    """Post-process a rollout's output items with NeMo RL."""
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
        [[only]] = collect(client, [GroupTemplate(toy.url, "toy").group("g", task(), 1)])
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


def test_rows_that_nemo_rl_would_refuse_are_refused_earlier(result: Result) -> None:
    assert result.trajectory is not None
    forked = result.model_copy(update={"forks": [result.trajectory]})
    with pytest.raises(NotContiguous, match=r"service\.reasoning"):
        output_items(forked)
    items = output_items(result)
    second = [item for item in items if "prompt_token_ids" in item][1]
    second["prompt_token_ids"] = [0, *second["prompt_token_ids"][1:]]
    with pytest.raises(AssertionError, match="Non-contiguous"):
        post_processed(items)


@pytest.fixture
def merged(tmp_path: Path) -> dict[str, Any]:
    """Load the example over a recipe, as NeMo RL's script does."""
    from nemo_rl.utils.config import load_config, register_omegaconf_resolvers
    from omegaconf import OmegaConf

    register_omegaconf_resolvers()
    recipe = SOURCE / "examples" / "nemo_gym" / "grpo_qwen3_30ba3b_instruct.yaml"
    path = tmp_path / "mine.yaml"
    path.write_text(f"defaults: [{recipe}, {EXAMPLE}]\n")
    return dict(OmegaConf.to_container(load_config(path), resolve=True))


def test_nemo_rl_accepts_the_example(merged: dict[str, Any]) -> None:
    from nemo_rl.algorithms.grpo import MasterConfig
    from nemo_rl.data import DataConfig, ResponseDatasetConfig
    from nemo_rl.environments.nemo_gym import should_use_nemo_gym
    from nemo_rl.experience.rollouts import should_mask_flagged_samples
    from nemo_rl.utils.config import load_config

    config = MasterConfig(**merged)  # which allows unknown names
    assert should_use_nemo_gym(config) and should_mask_flagged_samples(config.env)
    ours = load_config(EXAMPLE)
    recipe = load_config(SOURCE / "examples" / "nemo_gym" / "grpo_qwen3_30ba3b_instruct.yaml")
    assert set(ours) <= MasterConfig.model_fields.keys()
    assert set(ours.env) <= set(recipe.env)
    assert set(ours.env.nemo_gym) - set(recipe.env.nemo_gym) == {"prorl_agent"}
    assert set(ours.data) <= DataConfig.__annotations__.keys()
    for split in ours.data.values():
        assert set(split) <= ResponseDatasetConfig.__annotations__.keys()


def test_nemo_gym_resolves_the_agent_of_the_example(merged: dict[str, Any]) -> None:
    """With the settings that NeMo RL adds when it starts NeMo Gym, and the agent of this checkout."""
    from nemo_gym.global_config import GlobalConfigDictParser, GlobalConfigDictParserConfig
    from omegaconf import DictConfig, OmegaConf

    from prorl_envs.nemo.agent import RolloutAgentConfig

    given = merged["env"]["nemo_gym"]
    [path] = given["config_paths"]
    given |= {
        "config_paths": [str(REPOSITORY / path.replace("responses_api_agents", "agents"))],
        "policy_model_name": "m",
        "policy_api_key": "dummy_key",
        "policy_base_url": ["http://127.0.0.1:1"],
        "default_host": "127.0.0.1",
    }
    parser = GlobalConfigDictParserConfig(
        initial_global_config_dict=DictConfig(given), skip_load_from_cli=True, skip_load_from_dotenv=True
    )
    parsed = OmegaConf.to_container(GlobalConfigDictParser().parse(parser), resolve=True)
    [(kind, block)] = parsed["prorl_agent"]["responses_api_agents"].items()
    config = RolloutAgentConfig.model_validate(block | {"name": kind})
    ours = merged["env"]["nemo_gym"]["prorl_agent"]["responses_api_agents"]["prorl_agent"]
    assert set(ours) <= RolloutAgentConfig.model_fields.keys()
    assert (config.service, config.environment, config.failures) == tuple(ours.values())


def test_nemo_rl_reads_the_rows(
    merged: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Write rows as in the example's comments; read them with NeMo RL's own data set and processor."""
    from nemo_rl.data.datasets.response_datasets import load_response_dataset
    from nemo_rl.data.processors import PROCESSOR_REGISTRY

    monkeypatch.chdir(tmp_path)
    write_rows("bash", example_path("bash"), Path("rows.jsonl"))
    written = [json.loads(line) for line in Path("rows.jsonl").read_text().splitlines()]
    agent = {"type": "responses_api_agents", "name": "prorl_agent"}
    lines = [json.dumps(row | {"agent_ref": agent}) + "\n" for row in written]
    Path(merged["data"]["train"]["data_path"]).write_text("".join(lines))
    data = load_response_dataset(merged["data"]["default"] | merged["data"]["train"])
    process = PROCESSOR_REGISTRY[merged["data"]["default"]["processor"]]
    read = [process(row, None, None, None, index)["extra_env_info"] for index, row in enumerate(data.dataset)]
    assert read == [row | {"agent_ref": agent} for row in written]
    assert agent["name"] in merged["env"]["nemo_gym"]
