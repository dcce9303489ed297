"""The work of each stage, and the checks of its output. Nothing is caught here: failures are raised."""

import math
from collections.abc import Mapping
from typing import Any

from prorl_envs.env.base import Environment, Grade, Prompt
from prorl_envs.env.harness.family import HarnessedEnvironment
from prorl_envs.env.node import Node
from prorl_envs.errors import EnvironmentFault, GraderError
from prorl_envs.rollout.agent.agent_loop import Agent, EpisodeSettings
from prorl_envs.rollout.api.types import json_problem
from prorl_envs.rollout.endpoint import harness_run
from prorl_envs.rollout.episode.job import Job

type Family = type[Environment[Any]]


async def init(episode: Job, node: Node, families: Mapping[str, Family]) -> None:
    """Start the sandbox and prepare the task."""
    environment = families[episode.request.environment](node)
    episode.attempt.environment = environment  # before init, so that a failed init is closed too
    prompt = await environment.init(episode.task)
    _check_prompt(prompt)
    episode.attempt.prompt = prompt


async def run(episode: Job, agent: Agent) -> None:
    """Run the agent until the model stops or a limit is reached."""
    environment, prompt = episode.attempt.environment, episode.attempt.prompt
    if environment is None or prompt is None:
        raise EnvironmentFault("RUN needs an initialised environment")
    how: EpisodeSettings = {
        "limits": episode.request.limits,
        "sampling": episode.sampling,
        "session": episode.session,
    }
    transcript = episode.attempt.transcript
    if isinstance(environment, HarnessedEnvironment):
        episode.attempt.stop_reason = await harness_run.play(agent, environment, prompt, transcript, **how)
    else:
        episode.attempt.stop_reason = await agent.play(environment, prompt, transcript, **how)


async def evaluate(episode: Job) -> None:
    """Grade the agent's work."""
    environment = episode.attempt.environment
    if environment is None:
        raise GraderError("EVAL needs an initialised environment")
    environment.on_transcript(tuple(episode.attempt.transcript.messages))
    grade = await environment.eval()
    _check_grade(grade)
    episode.attempt.grade = grade


async def close(episode: Job) -> None:
    """Close the environment of the attempt."""
    if episode.attempt.environment is not None:
        await episode.attempt.environment.close()


def _check_prompt(prompt: Prompt) -> None:
    """Check that the prompt is JSON here, before it is stored and sent."""
    if problem := json_problem([*prompt.messages, *(tool.to_openai() for tool in prompt.tools)]):
        raise EnvironmentFault(f"the prompt is not JSON: {problem}")


def _check_grade(grade: Grade) -> None:
    """Check that rewards are finite numbers; an invalid reward is the grader's failure, never a 0."""
    for name, value in {"reward": grade.reward, **grade.components}.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise GraderError(f"the grader gave {value!r} for {name}, which is not a finite number")
    if not isinstance(grade.evidence, dict):
        raise GraderError("the grader's evidence is not a JSON object")
    if problem := json_problem(grade.evidence):
        raise GraderError(f"the grader's evidence is not JSON: {problem}")
