"""What each stage does, and what it may hand on. Nothing here catches: a failure leaves as its error."""

import math
from collections.abc import Mapping
from typing import Any

from prorl_envs.env.base import Environment, Grade, Prompt
from prorl_envs.env.harness.family import HarnessedEnvironment
from prorl_envs.env.node import Node
from prorl_envs.errors import EnvironmentFault, GraderError
from prorl_envs.rollout.agent import Agent, HowToPlay
from prorl_envs.rollout.endpoint import playing as harness
from prorl_envs.rollout.episode import Episode
from prorl_envs.rollout.types import json_problem

type Family = type[Environment[Any]]


async def init(episode: Episode, node: Node, families: Mapping[str, Family]) -> None:
    """Start the sandbox and prepare the task."""
    environment = families[episode.request.environment](node)
    episode.attempt.environment = environment  # before init: what fails half-way is closed too
    prompt = await environment.init(episode.task)
    _check_prompt(prompt)
    episode.attempt.prompt = prompt


async def run(episode: Episode, agent: Agent) -> None:
    """Let the model act until it is done or a limit is reached."""
    environment, prompt = episode.attempt.environment, episode.attempt.prompt
    if environment is None or prompt is None:
        raise EnvironmentFault("RUN needs an initialised environment")
    how: HowToPlay = {
        "limits": episode.request.limits,
        "sampling": episode.sampling,
        "session": episode.session,
    }
    transcript = episode.attempt.transcript
    if isinstance(environment, HarnessedEnvironment):
        episode.attempt.stop_reason = await harness.play(agent, environment, prompt, transcript, **how)
    else:
        episode.attempt.stop_reason = await agent.play(environment, prompt, transcript, **how)
    environment.expect_eval()


async def evaluate(episode: Episode) -> None:
    """Score what the agent left."""
    environment = episode.attempt.environment
    if environment is None:
        raise GraderError("EVAL needs an initialised environment")
    environment.listen(tuple(episode.attempt.transcript.messages))
    grade = await environment.eval()
    _check_grade(grade)
    episode.attempt.grade = grade


async def close(episode: Episode) -> None:
    """Leave nothing behind."""
    if episode.attempt.environment is not None:
        await episode.attempt.environment.close()


def _check_prompt(prompt: Prompt) -> None:
    """A prompt is stored and sent as JSON; better to say so here than when somebody reads the result."""
    if problem := json_problem([*prompt.messages, *(tool.to_openai() for tool in prompt.tools)]):
        raise EnvironmentFault(f"the prompt is not JSON: {problem}")


def _check_grade(grade: Grade) -> None:
    """A reward that is no number is the grader's failure, never a 0."""
    for name, value in {"reward": grade.reward, **grade.components}.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise GraderError(f"the grader gave {value!r} for {name}, which is not a finite number")
    if not isinstance(grade.evidence, dict):
        raise GraderError("the grader's evidence is not a JSON object")
    if problem := json_problem(grade.evidence):
        raise GraderError(f"the grader's evidence is not JSON: {problem}")
