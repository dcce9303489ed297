"""OpenRLHF's agent file: `--train.agent_func_path examples/trainers/openrlhf/agent.py`.

The environment variables ROLLOUT_SERVICE, ROLLOUT_ENVIRONMENT and PRORL_SERVER__TOKEN name the service.
"""

import os
from typing import Any

from openrlhf.utils.agent import AgentExecutorBase

from prorl_envs.trainers.openrlhf import OpenRlhfEpisodes


class AgentExecutor(AgentExecutorBase):  # type: ignore[misc]  # OpenRLHF ships no types
    """Samples with OpenRLHF's engine, in episodes of the rollout service."""

    def __init__(self) -> None:
        self.episodes = OpenRlhfEpisodes(
            os.environ.get("ROLLOUT_SERVICE", "http://127.0.0.1:8600"),
            os.environ.get("ROLLOUT_ENVIRONMENT", "bash"),
        )

    async def execute(
        self,
        prompt: str,
        label: Any,
        sampling_params: Any,
        max_length: int,
        hf_tokenizer: Any,
        llm_engine: Any,
        images: Any = None,
    ) -> dict[str, Any]:
        return await self.episodes.execute(prompt, label, sampling_params, max_length, llm_engine)
