"""Stages of a job: INIT, RUN, EVAL and close, and the steps of a RUN that its caller drives.

Exceptions are not caught here; see `worker.py`.
"""

from collections.abc import Mapping
from typing import Any

from prorl_envs.env.base import Environment, Message
from prorl_envs.env.harness.family import HarnessedEnvironment
from prorl_envs.env.node import Node
from prorl_envs.errors import EnvironmentFault, GraderError
from prorl_envs.model.types import Sampled
from prorl_envs.rollout.agent.agent_loop import Agent, AgentLoop
from prorl_envs.rollout.api.interactive import (
    AgentStep,
    CallStep,
    PromptView,
    StepRequest,
    StepView,
    TokenStep,
)
from prorl_envs.rollout.api.types import StopReason
from prorl_envs.rollout.endpoint import harness_run
from prorl_envs.rollout.episode.job import Job, StepProgress
from prorl_envs.strict_json import encodable
from prorl_envs.tools.types import ToolCall

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


async def render(job: Job, agent: Agent) -> None:
    """Render the prompt of an episode, and set the attempt's `progress`. Must precede the first step."""
    attempt = job.attempt
    if attempt.environment is None or attempt.prompt is None:
        raise EnvironmentFault("RUN needs an initialised environment")
    attempt.loop = loop = await agent.begin(
        attempt.environment, attempt.prompt, attempt.transcript, **job.settings
    )
    loop.sleep()
    prompt = PromptView(
        messages=list(attempt.prompt.messages),
        tools=[tool.to_openai() for tool in attempt.prompt.tools],
        ids=list(loop.context),
    )
    attempt.progress = StepProgress(loop.room, prompt=prompt)


async def step(job: Job, agent: Agent, request: StepRequest) -> None:
    """Run a step, and set the attempt's `progress`. The time limit does not run between steps."""
    attempt, loop = job.attempt, job.attempt.loop
    if loop is None:
        raise EnvironmentFault("a step needs a rendered prompt")
    first_message, context_before = len(attempt.transcript.messages), len(loop.context)
    number, attempt.steps = attempt.steps, attempt.steps + 1
    loop.wake()
    try:
        match request:
            case AgentStep() if isinstance(attempt.environment, HarnessedEnvironment):
                await run(job, agent)
            case AgentStep():
                attempt.stop_reason = await loop.finish()
            case TokenStep():
                attempt.stop_reason = await loop.answer(_sampled(request)) or loop.exhausted()
            case CallStep():
                attempt.stop_reason = await _call(job, loop, request, number)
    finally:
        loop.sleep()
    ids = None
    if isinstance(request, TokenStep):
        ids = loop.context[context_before + len(request.ids) :]
    messages = attempt.transcript.messages[first_message:]
    last = StepView(step=number, messages=messages, ids=ids, stop_reason=attempt.stop_reason)
    attempt.progress = StepProgress(loop.room, last=last)


async def _call(job: Job, loop: AgentLoop, request: CallStep, number: int) -> StopReason | None:
    calls = [
        ToolCall(call.id or f"call_{number}_{index}", call.name, call.arguments)
        for index, call in enumerate(request.tool_calls)
    ]
    answer: Message = {
        "role": "assistant",
        "content": encodable(request.content),
        "tool_calls": [call.to_openai() for call in calls],
    }
    messages = job.attempt.transcript.messages
    messages.append(answer)
    observations = await loop.act(calls)
    if isinstance(observations, StopReason):
        return observations
    messages.extend(observations)
    return StopReason.TURN_LIMIT if number + 1 >= job.request.limits.max_turns else None


def _sampled(step: TokenStep) -> Sampled:
    return Sampled(
        ids=tuple(step.ids),
        logprobs=tuple(step.logprobs if step.logprobs is not None else [0.0] * len(step.ids)),
        finish_reason=step.finish_reason,
        weight_version=step.weight_version,
        server="",
    )
