"""An agent of yours that runs outside of our sandboxes: its model is an episode's endpoint, its hands are the
episode's tools, and what its model says is recorded as tokens.

    prorl-envs scripted-model bash          # stands in for a model; prints the options of the next line
    prorl-envs serve --llm http://HOST:PORT/v1 --tokenizer FOLDER
    python examples/agents/outside.py http://127.0.0.1:8600
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import openai

from prorl_envs import CallRequest, CallStep, EpisodeRequest, Result, RolloutClient

DATA = Path(__file__).parents[2] / "envs" / "bash" / "data" / "example.jsonl"
MOST_TURNS = 20


async def work(client: RolloutClient, episode: str, prompt: Any, model: openai.AsyncOpenAI) -> None:
    """The agent: any that speaks OpenAI's or Anthropic's interfaces will do in its place."""
    messages = list(prompt.messages)
    for _ in range(MOST_TURNS):
        answer = await model.chat.completions.create(model="policy", messages=messages, tools=prompt.tools)
        said = answer.choices[0].message
        messages.append(said.model_dump(exclude_none=True))
        calls = [call for call in said.tool_calls or () if call.type == "function"]
        if not calls:
            return
        step = CallStep(
            tool_calls=[
                CallRequest(id=c.id, name=c.function.name, arguments=json.loads(c.function.arguments))
                for c in calls
            ]
        )
        last = (await client.run_episode(episode, step)).last
        if last is None or last.stop_reason is not None:  # it called the tool that ends the episode
            return
        messages += [message for message in last.messages if message["role"] == "tool"]


async def solve(service: str, task: dict[str, Any]) -> Result:
    """Run one episode: start it, let the agent work, grade it."""
    async with RolloutClient(service) as client:
        request = EpisodeRequest(id=f"outside/{task['id']}", environment="bash", task=task, endpoint=True)
        begun = await client.start_episode(request)
        if begun.prompt is None:
            raise SystemExit(f"it did not begin: {begun.failure}")
        try:
            endpoint = await client.open_endpoint(begun.id)
            async with openai.AsyncOpenAI(base_url=endpoint.openai_base_url, api_key=endpoint.key) as model:
                await work(client, begun.id, begun.prompt, model)
            result = (await client.evaluate_episode(begun.id)).result
        finally:
            await client.close_episode(begun.id)
    assert result is not None
    return result


async def main(service: str) -> None:
    task = json.loads(DATA.read_bytes().split(b"\n")[0])
    result = await solve(service, task)
    for row in result.rows:
        sampled = sum(row.loss_mask)
        print(f"{len(row.turns)} turns, {len(row.ids)} tokens, {sampled} sampled, drift {row.drift}")
    print(f"reward {result.reward}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8600"))
