"""Tries a model server and shows what came out: the work of `prorl-envs check-llm`."""

import asyncio
import json
import os
from dataclasses import asdict
from pathlib import Path

from prorl_envs.cli.console import err, out
from prorl_envs.cli.trials import trials_table
from prorl_envs.policy.link import ClientLimits
from prorl_envs.policy.rendering import TemplateRenderer
from prorl_envs.policy.server_checks import State, Subject, check_server
from prorl_envs.policy.servers import Servers
from prorl_envs.tools.types import ToolSpec


async def checked(
    url: str,
    renderer: TemplateRenderer | None,
    model: str | None,
    *,
    pause: bool,
    timeout_s: float,
    report: Path | None,
) -> bool:
    """Try everything and show it; whether nothing is broken.

    Args:
        url: of the server.
        renderer: of its model, if it is to be had.
        model: its name; None takes the first.
        pause: try pauses.
        timeout_s: seconds an answer may take.
        report: where the findings go as JSON.
    """
    limits = ClientLimits(answer_s=timeout_s, control_s=timeout_s, attempts=1)
    key = os.environ.get("OPENAI_API_KEY")
    if renderer:
        servers = Servers.of(renderer, model=model, api_key=key, limits=limits)
    else:
        servers = Servers(model=model, options={"api_key": key, "limits": limits})
    client = servers.connect(url)
    try:
        subject = Subject(client, servers, url, prompt_of(renderer))
        with err.status("asking") as status:
            findings = await check_server(
                subject, pauses=pause, note=lambda found: status.update(f"{found.id} {found.state}")
            )
    finally:
        await client.aclose()
    out.print(
        trials_table(
            "what a server is to do", ((f.id, f.text, f.state, f.reason, f.seconds) for f in findings)
        )
    )
    if renderer:
        out.print(about(renderer))
    else:
        out.print("--tokenizer FOLDER tries the model's own prompts, and its form of tool calls")
    if report:
        content = json.dumps([asdict(finding) for finding in findings], indent=1)
        await asyncio.to_thread(report.write_text, content + "\n")
    return all(finding.state is not State.BROKEN for finding in findings)


def prompt_of(renderer: TemplateRenderer | None) -> list[int]:
    """A prompt of the model's own, or ids that every model has."""
    if renderer is None:
        return list(range(5, 25))
    tool = ToolSpec(
        "bash", "Run a command.", {"type": "object", "properties": {"command": {"type": "string"}}}
    )
    return renderer.prompt([{"role": "user", "content": "List the files."}], [tool])


def about(renderer: TemplateRenderer) -> str:
    """What the tokenizer's template does."""
    told = "" if renderer.tools_known else "; it knows no tools, so the first message describes them"
    plain = "; results come as user messages" if renderer.plain_tools else ""
    return f"tool calls: {renderer.tool_format}{told}{plain}; stop ids {list(renderer.stop_ids)}"
