"""OpenRLHF's own conversion of responses, for episodes that its engine samples.

OpenRLHF's rollouts import vLLM, which needs a GPU here: its place is taken by an empty module, and that of
vLLM's engine by one that samples what a test says. All else is OpenRLHF.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from prorl_envs.testing.scripted import as_message
from prorl_envs.testing.tokenizer import builtin_renderer
from prorl_envs.trainers.tasks import to_text
from tests.trainers.conftest import ToyService, task

pytestmark = [pytest.mark.trainers, pytest.mark.filterwarnings("ignore"), pytest.mark.anyio]

AGENT = Path(__file__).parents[3] / "examples" / "trainers" / "openrlhf" / "agent.py"
TURNS = [{"tool": "say", "arguments": {"text": "hm"}}, {"tool": "finish", "arguments": {"reward": 0.5}}]


class Engine:
    """Answers as a policy would that says something, and then finishes."""

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []

    async def generate(self, prompt_token_ids: list[int], sampling_params: Any, **_: Any) -> Any:
        ids = builtin_renderer().assistant(as_message([TURNS[len(self.prompts)]]))
        assert sampling_params.max_tokens == 4096 - len(prompt_token_ids)
        self.prompts.append(list(prompt_token_ids))
        logprobs = [{token: SimpleNamespace(logprob=-0.25)} for token in ids]
        output = SimpleNamespace(token_ids=ids, logprobs=logprobs, finish_reason="stop")
        return SimpleNamespace(outputs=[output])


def samples_generator(monkeypatch: pytest.MonkeyPatch) -> Any:
    """OpenRLHF's module that makes experience of responses."""
    vllm, engine = ModuleType("vllm"), ModuleType("openrlhf.trainer.ray.vllm_engine")
    vllm.SamplingParams = SimpleNamespace  # type: ignore[attr-defined]
    engine.batch_vllm_engine_call = engine.create_vllm_engines = None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "openrlhf.trainer.ray.vllm_engine", engine)
    return importlib.import_module("openrlhf.trainer.ppo_utils.samples_generator")


def agent_executor(monkeypatch: pytest.MonkeyPatch, url: str) -> Any:
    """The class of the example's file, loaded as OpenRLHF does it."""
    from openrlhf.utils.agent import AgentExecutorBase

    monkeypatch.setenv("ROLLOUT_SERVICE", url)
    monkeypatch.setenv("ROLLOUT_ENVIRONMENT", "toy")
    spec = importlib.util.spec_from_file_location("agent_module", AGENT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert issubclass(module.AgentExecutor, AgentExecutorBase)
    return module.AgentExecutor()


async def test_an_episode_becomes_experience(toy: ToyService, monkeypatch: pytest.MonkeyPatch) -> None:
    module = samples_generator(monkeypatch)
    executor, engine = agent_executor(monkeypatch, toy.url), Engine()
    params = SimpleNamespace(max_tokens=None, logprobs=1, temperature=1.0)
    response = await executor.execute(to_text(task()), "label", params, 4096, None, engine)
    await executor.episodes.aclose()
    tokens = response["observation_tokens"]
    assert engine.prompts[1] == tokens[: len(engine.prompts[1])]  # what was sampled is never made anew

    generator = object.__new__(module.SamplesGenerator)
    experience = generator._process_response_into_experience(response, max_len=4096)
    assert experience.sequences.tolist() == [tokens]
    assert experience.rewards.tolist() == experience.scores.tolist() == [0.5]
    sampled = experience.rollout_log_probs[experience.action_mask.bool()]
    assert len(sampled) == sum(end - start for start, end in response["action_ranges"]) > 0
    assert (sampled == -0.25).all()
    assert (experience.rollout_log_probs[~experience.action_mask.bool()] == 0).all()
    assert not experience.truncated.item()
    toy.until_empty()
