"""OpenRLHF's own conversion of responses, for episodes that its engine samples; its parsing of the example.

OpenRLHF's rollouts import vLLM, which needs a GPU. An empty module replaces vLLM, and an engine that samples
the test's tokens replaces OpenRLHF's. All other code is OpenRLHF's.
"""

import importlib.util
import json
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from prorl_envs.testing.scripted import as_message
from prorl_envs.testing.tokenizer import builtin_renderer
from prorl_envs.trainers.tasks import from_text, to_text
from tests.trainers.conftest import ToyService, task

pytestmark = [pytest.mark.trainers, pytest.mark.filterwarnings("ignore"), pytest.mark.anyio]

EXAMPLE = Path(__file__).parents[3] / "examples" / "trainers" / "openrlhf"
AGENT = EXAMPLE / "agent.py"
TURNS = [{"tool": "say", "arguments": {"text": "hm"}}, {"tool": "finish", "arguments": {"reward": 0.5}}]


class Engine:
    """Answer like a policy that first writes text, and then finishes."""

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
    """Import OpenRLHF's module that makes experience from responses."""
    vllm, engine = ModuleType("vllm"), ModuleType("openrlhf.trainer.ray.vllm_engine")
    vllm.SamplingParams = SimpleNamespace  # type: ignore[attr-defined]
    engine.batch_vllm_engine_call = engine.create_vllm_engines = None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "openrlhf.trainer.ray.vllm_engine", engine)
    return importlib.import_module("openrlhf.trainer.ppo_utils.samples_generator")


def agent_executor(monkeypatch: pytest.MonkeyPatch, url: str) -> Any:
    """Load the class in the example's file as OpenRLHF does."""
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
    assert engine.prompts[1] == tokens[: len(engine.prompts[1])]  # sampled tokens are never recomputed

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


class Started(Exception):
    """Raised once OpenRLHF has parsed and checked its arguments."""


def test_openrlhf_accepts_the_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the script as a user does, until OpenRLHF would start workers on GPUs, which are absent."""
    import ray
    from openrlhf import utils
    from openrlhf.datasets import PromptDataset

    monkeypatch.chdir(tmp_path)
    Path("tasks.jsonl").write_text(json.dumps(task()) + "\n")
    shim = tmp_path / "python"
    shim.write_text(f'#!/bin/sh\n[ "$1" = -m ] || exec {sys.executable} "$@"\nprintf "%s\\n" "$@"\n')
    shim.chmod(0o755)
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    command = ["sh", str(EXAMPLE / "run.sh"), "tasks.jsonl"]
    told = subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout
    module, *given = told.split("-m\n")[1].splitlines()

    workers = {
        "": ["create_vllm_engines"],
        ".launcher": ["RayActorGroup", "ReferenceModelActor", "RewardModelActor"],
        ".ppo_actor": ["PolicyModelActor"],
        ".ppo_critic": ["CriticModelActor"],
    }
    for name, holds in workers.items():
        absent = ModuleType(f"openrlhf.trainer.ray{name}")
        vars(absent).update(dict.fromkeys(holds))
        monkeypatch.setitem(sys.modules, absent.__name__, absent)
    read: list[Any] = []

    def start(args: Any) -> None:
        read.append(args)
        raise Started

    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(utils, "get_strategy", start)
    monkeypatch.setattr(sys, "argv", [module, *given])
    with pytest.raises(Started):
        runpy.run_module(module, run_name="__main__")
    [args] = read
    assert Path(args.train.agent_func_path).samefile(AGENT) and args.vllm.num_engines == 4
    lines = [json.loads(line) for line in Path(args.data.prompt_dataset).read_text().splitlines()]
    data = PromptDataset(lines, None, SimpleNamespace(args=args, is_rank_0=lambda: False))
    assert from_text(data[0][1]) == task()
