"""A family's class itself: start an episode, call its tools, have it graded, asynchronously."""

import asyncio

from prorl_envs import Node, ToolCall, example_path, family, load_tasks


async def main() -> float:
    environment, tasks = family("bash"), load_tasks("bash", example_path("bash"))
    async with Node.local() as node, environment(node) as episode:
        prompt = await episode.init(tasks[0])
        print(prompt.messages[-1]["content"], [tool.name for tool in prompt.tools])
        for number, step in enumerate(tasks[0].reference):
            result = await episode.call(ToolCall(f"call-{number}", step.tool, dict(step.arguments)))
            print("ok" if result.ok else "refused", repr(result.text[:60]))
        grade = await episode.eval()
    print(f"reward {grade.reward:g}")
    return grade.reward


if __name__ == "__main__":
    asyncio.run(main())
