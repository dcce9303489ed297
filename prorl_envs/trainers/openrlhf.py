"""OpenRLHF (0.11): agent executor for episodes of the service that OpenRLHF's own engine samples.

OpenRLHF's engines run in its actors and have no HTTP interface, so the executor requests each turn from the
engine. The service starts the episode, parses each answer, runs its tool calls, returns the tokens to append,
and grades. Sampled token ids are used unchanged. The file for `--train.agent_func_path`:

    from openrlhf.utils.agent import AgentExecutorBase
    from prorl_envs.trainers.openrlhf import OpenRlhfEpisodes

    class AgentExecutor(AgentExecutorBase):
        def __init__(self):
            self.episodes = OpenRlhfEpisodes("http://127.0.0.1:8600", "bash")

        async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, **_):
            return await self.episodes.execute(prompt, label, sampling_params, max_length, llm_engine)

Each prompt of the data set is a task row as JSON. OpenRLHF updates weights while its engine is paused. It has
no names for weight versions, and limits the staleness itself.
"""

import contextlib
from copy import deepcopy
from typing import Any
from uuid import uuid4

from prorl_envs.errors import ModelError, ProrlError
from prorl_envs.rollout.api.interactive import EpisodeRequest, EpisodeState, EpisodeView, TokenStep
from prorl_envs.rollout.api.types import AgentLimits, Result
from prorl_envs.rollout.client.client import RolloutClient
from prorl_envs.trainers.asking import connect
from prorl_envs.trainers.rollouts import EpisodeFailed
from prorl_envs.trainers.rows import RowStatus, one_row, training_reward
from prorl_envs.trainers.tasks import from_text


class OpenRlhfEpisodes:
    """Episode runner for an `AgentExecutor`.

    Args:
        url: base URL of the service, which needs a tokenizer (`--tokenizer`) but no model server. Its token
            is read from `$PRORL_SERVER__TOKEN`.
        environment: name of the tasks' environment at the service.
        attempts: maximum number of attempts of an episode before OpenRLHF gets its failure.
        limits: limits of the agent loop; by default OpenRLHF's maximum number of tokens.
    """

    def __init__(
        self, url: str, environment: str, *, attempts: int = 3, limits: AgentLimits | None = None
    ) -> None:
        self._url = url
        self._environment = environment
        self._attempts = attempts
        self._limits = limits
        self._client: RolloutClient | None = None

    async def execute(
        self, prompt: str, label: Any, sampling_params: Any, max_length: int, llm_engine: Any
    ) -> dict[str, Any]:
        """Run one episode, and return it in OpenRLHF's format. Cancelling this call closes the episode.

        Args:
            prompt: the task row as JSON.
            label: returned unchanged.
            sampling_params: vLLM's `SamplingParams`.
            max_length: maximum number of tokens in prompt and response together.
            llm_engine: engine with a method `generate(ids, sampling_params)`.

        Raises:
            EpisodeFailed: all attempts failed. OpenRLHF accepts no sample without a reward.
            InputError: the prompt is not a task row.
            SeveralRows: the episode forked.
            QueueFull, Unavailable: the service stays full or unreachable.
        """
        task = from_text(prompt)
        limits = self._limits or AgentLimits(max_tokens=max_length)
        for _ in range(self._attempts):
            request = EpisodeRequest(
                id=f"openrlhf-{uuid4().hex}", environment=self._environment, task=task, limits=limits
            )
            result = await self._play(request, sampling_params, max_length, llm_engine)
            if training_reward(result) is not None:
                with_logprobs = sampling_params.logprobs is not None
                return {"prompt": prompt, "label": label} | as_openrlhf(result, logprobs=with_logprobs)
        raise EpisodeFailed(result)

    async def aclose(self) -> None:
        """Close the connections."""
        if self._client is not None:
            await self._client.aclose()

    async def _play(
        self, request: EpisodeRequest, sampling_params: Any, max_length: int, llm_engine: Any
    ) -> Result:
        if self._client is None:
            self._client = connect(self._url)
        client = self._client
        try:
            view = await client.start_episode(request)
            context = list(view.prompt.ids) if view.prompt else []
            while view.state is EpisodeState.READY and len(context) < max_length:
                step = await _sample(llm_engine, context, sampling_params, max_length)
                view = await client.run_episode(request.id, step)
                new_ids = view.last.ids if view.last and view.last.ids else []
                context += [*step.ids, *new_ids]
            if view.state in (EpisodeState.READY, EpisodeState.STOPPED):
                view = await client.evaluate_episode(request.id)
            return _result(view)
        finally:
            with contextlib.suppress(ProrlError):  # the service itself closes idle episodes
                await client.close_episode(request.id)


def as_openrlhf(result: Result, *, logprobs: bool = True) -> dict[str, Any]:
    """Convert an episode to the format of OpenRLHF's executors, without prompt and label.

    Args:
        result: result of an episode, with a reward.
        logprobs: include log-probabilities. OpenRLHF requests them or not.

    Raises:
        SeveralRows, NotContiguous: see `one_row`.
    """
    row = one_row(result)
    first = len(row.prompt_ids)
    turns = row.turns if row.trains else ()
    return {
        "images": None,
        "mm_train_inputs": None,
        "observation_tokens": row.prompt_ids + row.response_ids,
        "action_ranges": [(first + start, first + end) for start, end in turns if end > start],
        "rollout_log_probs": [0.0] * first + row.logprobs if logprobs else None,
        "reward": row.reward,
        "scores": row.reward,
        "truncated": row.status is RowStatus.TRUNCATED,
        "extra_logs": {"turns": len(row.turns)},
    }


async def _sample(llm_engine: Any, context: list[int], sampling_params: Any, max_length: int) -> TokenStep:
    params = deepcopy(sampling_params)
    room = max_length - len(context)
    params.max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
    params.logprobs = 0 if params.logprobs is None else params.logprobs  # of the sampled tokens only
    output = (await llm_engine.generate(context, params)).outputs[0]
    ids = list(output.token_ids)
    if output.logprobs is None or len(output.logprobs) != len(ids):
        raise ModelError("the engine did not return a log-probability for each token")
    logprobs = [candidates[token].logprob for token, candidates in zip(ids, output.logprobs, strict=True)]
    at_limit = output.finish_reason == "length"
    return TokenStep(ids=ids, logprobs=logprobs, finish_reason="length" if at_limit else "stop")


def _result(view: EpisodeView) -> Result:
    if view.result is None:
        raise ModelError(f"the episode {view.id} ended without a result", hint="see the service's log")
    return view.result
