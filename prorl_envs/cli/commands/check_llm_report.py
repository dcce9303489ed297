"""Compatibility check of a model server and its report: the implementation of `prorl-envs check-llm`."""

import os
from pathlib import Path

from prorl_envs.cli.output.check_table import check_table
from prorl_envs.cli.output.console import err, out, print_json
from prorl_envs.model.http.client import ClientLimits
from prorl_envs.model.servers.compatibility_checks import CheckState, CheckSubject, check_server
from prorl_envs.model.servers.detect import Servers
from prorl_envs.model.tokens.rendering import TemplateRenderer
from prorl_envs.tools.types import ToolSpec


async def checked(
    url: str,
    renderer: TemplateRenderer | None,
    model: str | None,
    *,
    pause: bool,
    timeout_s: float,
    ca_file: Path | None = None,
    as_json: bool = False,
) -> bool:
    """Run all checks and print the findings. Return whether no check failed.

    Args:
        url: base URL of the server.
        renderer: renderer of the model, or None.
        model: name of the model; None means the first that the server lists.
        pause: also test pauses.
        timeout_s: timeout of an answer, in seconds.
        ca_file: as in `ModelHttpClient`.
        as_json: print JSON instead of a table.
    """
    limits = ClientLimits(answer_s=timeout_s, control_s=timeout_s, attempts=1)
    key = os.environ.get("OPENAI_API_KEY")
    if renderer:
        servers = Servers.of(renderer, model=model, api_key=key, ca_file=ca_file, limits=limits)
    else:
        servers = Servers(model=model, options={"api_key": key, "ca_file": ca_file, "limits": limits})
    client = servers.connect(url)
    try:
        subject = CheckSubject(client, servers, url, prompt_of(renderer))
        with err.status("checking") as status:
            findings = await check_server(
                subject, pauses=pause, note=lambda found: status.update(f"{found.id} {found.state}")
            )
    finally:
        await client.aclose()
    if as_json:
        print_json(findings)
    else:
        rows = ((f.id, f.text, f.state, f.reason, f.seconds) for f in findings)
        out.print(check_table("requirement", rows))
        tokenizer_hint = "--tokenizer FOLDER also tests the model's own prompts and its tool calls"
        out.print(about(renderer) if renderer else tokenizer_hint)
    return all(finding.state is not CheckState.BROKEN for finding in findings)


def prompt_of(renderer: TemplateRenderer | None) -> list[int]:
    """Return a prompt in the model's own format; without a renderer, arbitrary ids that every model has."""
    if renderer is None:
        return list(range(5, 25))
    tool = ToolSpec(
        "bash", "Run a command.", {"type": "object", "properties": {"command": {"type": "string"}}}
    )
    return renderer.prompt([{"role": "user", "content": "List the files."}], [tool])


def about(renderer: TemplateRenderer) -> str:
    """Describe the tool format and the stop ids of the model's chat template."""
    tools = "" if renderer.tools_known else "; the template has no tools, so the first message describes them"
    results = "; tool results are user messages" if renderer.plain_tools else ""
    return f"tool calls: {renderer.tool_format}{tools}{results}; stop ids {list(renderer.stop_ids)}"
