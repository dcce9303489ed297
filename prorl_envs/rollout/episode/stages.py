"""Stages of a job: INIT, RUN, EVAL and close, and the steps of a RUN that its caller drives.

Exceptions are not caught here; see `worker.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prorl_envs.env.base import Environment, Message, Prompt
from prorl_envs.env.harness.family import HarnessedEnvironment
from prorl_envs.env.node import Node
from prorl_envs.env.sandboxed import EpisodeCheckpoint, SandboxedEnvironment
from prorl_envs.errors import EnvironmentFault, GraderError
from prorl_envs.model.types import Sampled
from prorl_envs.rollout.agent.agent_loop import Agent, AgentLoop, Transcript
from prorl_envs.rollout.api.interactive import (
    AgentStep,
    CallStep,
    PromptView,
    StepRequest,
    StepView,
    TokenStep,
)
from prorl_envs.rollout.api.types import BranchOrigin, StopReason
from prorl_envs.rollout.endpoint import harness_run
from prorl_envs.rollout.episode.job import Job, StepProgress
from prorl_envs.strict_json import encodable
from prorl_envs.tools.types import ToolCall

type Family = type[Environment[Any]]


@dataclass(frozen=True, slots=True)
class BranchPoint:
    """State of a trunk, from which the jobs of its group go on.

    Args:
        checkpoint: its environment.
        prompt: the return value of its `init`.
        origin: where the trunk itself branched off, or None.
        loop: copy of its agent loop, which takes no turns itself.
    """

    checkpoint: EpisodeCheckpoint
    prompt: Prompt
    origin: BranchOrigin | None
    loop: AgentLoop


#: Branch points on a machine by the id of the group.
type BranchPoints = dict[str, BranchPoint]


async def init(job: Job, node: Node, families: Mapping[str, Family], points: BranchPoints) -> None:
    """Start the sandbox and prepare the task, or go on from the branch point of the group."""
    environment, attempt = families[job.request.environment](node), job.attempt
    attempt.environment = environment  # set before `init`, so that it is closed if `init` fails
    point = points.get(job.request.id)
    if point is None:
        attempt.prompt = await environment.init(job.task)
        return
    assert isinstance(environment, SandboxedEnvironment)
    await environment.restore(point.checkpoint)
    ledger = point.loop.ledger.copy() if job.is_trunk else point.loop.ledger.branch()
    attempt.branch = point.origin
    if not job.is_trunk:
        lost = list(point.checkpoint.lost)
        attempt.branch = BranchOrigin(job_id=job.request.job_ids[0], turns=ledger.turns, lost=lost)
    attempt.prompt = point.prompt
    attempt.loop = point.loop.branch(environment, attempt.transcript, ledger, job.settings)


async def run(job: Job, agent: Agent, points: BranchPoints) -> None:
    """Run the agent until the model stops or a limit is reached. A trunk without a branch point makes one
    after the shared turns, and then has no stop reason."""
    attempt, settings = job.attempt, job.settings
    environment, prompt, transcript = attempt.environment, attempt.prompt, attempt.transcript
    if environment is None or prompt is None:
        raise EnvironmentFault("RUN needs an initialised environment")
    if isinstance(environment, HarnessedEnvironment):
        attempt.stop_reason = await harness_run.play(agent, environment, prompt, transcript, **settings)
        return
    is_new, start = attempt.loop is None, job.request.start
    attempt.loop = loop = attempt.loop or await agent.begin(environment, prompt, transcript, **settings)
    loop.journal = job.journal
    branches = job.is_trunk and job.request.id not in points
    if not is_new:
        loop.wake()
    try:
        if is_new and start is not None:
            attempt.stop_reason = await loop.replay(job.recorded, start.turns)
            attempt.branch = BranchOrigin(job_id=start.job_id, turns=loop.ledger.turns, lost=[])
        if attempt.stop_reason is None:
            attempt.stop_reason = await (loop.until(job.request.branch_at) if branches else loop.finish())
        if attempt.stop_reason is None:
            assert isinstance(environment, SandboxedEnvironment)
            loop.sleep()
            saved = loop.branch(environment, Transcript(), loop.ledger.copy(), settings)
            points[job.request.id] = BranchPoint(
                await environment.checkpoint(), prompt, attempt.branch, saved
            )
    finally:
        if attempt.stop_reason is not None or job.request.id not in points:
            agent.forget(loop.session)


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
                await run(job, agent, {})
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
