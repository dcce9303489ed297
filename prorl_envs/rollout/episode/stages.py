"""The work of each stage. Nothing is caught here: failures are raised."""

from collections.abc import Mapping
from typing import Any

from prorl_envs.env.base import Environment
from prorl_envs.env.harness.family import HarnessedEnvironment
from prorl_envs.env.node import Node
from prorl_envs.errors import EnvironmentFault, GraderError
from prorl_envs.rollout.agent.agent_loop import Agent
from prorl_envs.rollout.endpoint import harness_run
from prorl_envs.rollout.episode.job import Job

type Family = type[Environment[Any]]


async def init(episode: Job, node: Node, families: Mapping[str, Family]) -> None:
    """Start the sandbox and prepare the task."""
    environment = families[episode.request.environment](node)
    episode.attempt.environment = environment  # before init, so that a failed init is closed too
    episode.attempt.prompt = await environment.init(episode.task)


async def run(episode: Job, agent: Agent) -> None:
    """Run the agent until the model stops or a limit is reached."""
    environment, prompt = episode.attempt.environment, episode.attempt.prompt
    if environment is None or prompt is None:
        raise EnvironmentFault("RUN needs an initialised environment")
    transcript, settings = episode.attempt.transcript, episode.settings
    if isinstance(environment, HarnessedEnvironment):
        episode.attempt.stop_reason = await harness_run.play(
            agent, environment, prompt, transcript, **settings
        )
    else:
        episode.attempt.stop_reason = await agent.play(environment, prompt, transcript, **settings)


async def evaluate(episode: Job) -> None:
    """Grade the agent's work."""
    environment = episode.attempt.environment
    if environment is None:
        raise GraderError("EVAL needs an initialised environment")
    environment.on_transcript(tuple(episode.attempt.transcript.messages))
    episode.attempt.grade = await environment.eval()


async def close(episode: Job) -> None:
    """Close the environment of the attempt."""
    if episode.attempt.environment is not None:
        await episode.attempt.environment.close()
