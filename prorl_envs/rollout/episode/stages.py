"""Stages of a job: INIT, RUN, EVAL and close. Exceptions are not caught here; see `worker.py`."""

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


async def init(job: Job, node: Node, families: Mapping[str, Family]) -> None:
    """Start the sandbox and prepare the task."""
    environment = families[job.request.environment](node)
    job.attempt.environment = environment  # set before `init`, so that it is closed if `init` fails
    job.attempt.prompt = await environment.init(job.task)


async def run(job: Job, agent: Agent) -> None:
    """Run the agent until the model stops or a limit is reached."""
    environment, prompt = job.attempt.environment, job.attempt.prompt
    if environment is None or prompt is None:
        raise EnvironmentFault("RUN needs an initialised environment")
    transcript, settings = job.attempt.transcript, job.settings
    if isinstance(environment, HarnessedEnvironment):
        job.attempt.stop_reason = await harness_run.play(agent, environment, prompt, transcript, **settings)
    else:
        job.attempt.stop_reason = await agent.play(environment, prompt, transcript, **settings)


async def evaluate(job: Job) -> None:
    """Grade the outcome of the agent's work."""
    environment = job.attempt.environment
    if environment is None:
        raise GraderError("EVAL needs an initialised environment")
    environment.on_transcript(tuple(job.attempt.transcript.messages))
    job.attempt.grade = await environment.eval()


async def close(job: Job) -> None:
    """Close the environment of the attempt."""
    if job.attempt.environment is not None:
        await job.attempt.environment.close()
