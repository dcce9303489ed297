"""Built-in harness recipes, at the tested versions."""

from collections.abc import Mapping

from prorl_envs.env.harness.recipe import Install, Recipe, Spelling

MINI_SWE_AGENT = Recipe(
    name="mini-swe-agent",
    install=Install(registry="pypi", packages=("mini-swe-agent==2.4.6", "litellm==1.106.2", "mcp==2.3.0")),
    command=(
        *("{installed}/bin/python", "-I", "-m", "minisweagent.run.mini"),
        *("--yolo", "--exit-immediately", "--cost-limit", "0", "--model", "openai/{model}"),
        *("--output", "{home}/mini.traj.json", "--task", "{instruction}"),
    ),
    env={
        "MSWEA_CONFIGURED": "true",
        "MSWEA_SILENT_STARTUP": "1",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "MSWEA_GLOBAL_CONFIG_DIR": "{home}/.mswea",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    },
    spelling=Spelling(tool="bash", finish="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
)

CODEX = Recipe(
    name="codex",
    install=Install(registry="npm", packages=("@openai/codex@0.169.0",), node=True),
    command=(
        *("node", "{installed}/node_modules/@openai/codex/bin/codex.js", "exec"),
        *("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "--", "{instruction}"),
    ),
    env={"CODEX_HOME": "{home}/.codex"},
    files={
        "{home}/.codex/config.toml": """\
model = "{model}"
model_provider = "rollout"
check_for_update_on_startup = false
web_search = "disabled"

[model_providers.rollout]
name = "rollout"
base_url = "{url}/v1"
env_key = "OPENAI_API_KEY"
wire_api = "responses"

[analytics]
enabled = false
"""
    },
    spelling=Spelling(tool="exec_command", argument="cmd"),
)

CLAUDE_CODE = Recipe(
    name="claude-code",
    install=Install(registry="npm", packages=("@anthropic-ai/claude-code@2.1.330",)),
    command=(
        "{installed}/node_modules/@anthropic-ai/claude-code-linux-{arch}/claude",
        *("--print", "--model", "{model}", "--permission-mode", "bypassPermissions", "--", "{instruction}"),
    ),
    env={
        "ANTHROPIC_MODEL": "{model}",
        "ANTHROPIC_SMALL_FAST_MODEL": "{model}",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "IS_SANDBOX": "1",
    },
    spelling=Spelling(tool="Bash", others={"description": "Runs it"}),
)

QWEN_CODE = Recipe(
    name="qwen-code",
    install=Install(registry="npm", packages=("@qwen-code/qwen-code@0.24.4",), node=True),
    command=(
        *("node", "{installed}/node_modules/@qwen-code/qwen-code/cli-entry.js"),
        *(
            "--approval-mode",
            "yolo",
            "--auth-type",
            "openai",
            "--model",
            "{model}",
            "--prompt",
            "{instruction}",
        ),
    ),
    env={"OPENAI_MODEL": "{model}", "QWEN_TELEMETRY_ENABLED": "0"},
    spelling=Spelling(tool="run_shell_command", others={"is_background": False}),
)

OPENCODE = Recipe(
    name="opencode",
    install=Install(registry="npm", packages=("opencode-ai@1.18.33",)),
    command=(
        "{installed}/node_modules/opencode-linux-{arch}/bin/opencode",
        *("run", "--model", "rollout/{model}", "{instruction}"),
    ),
    env={
        "OPENCODE_CONFIG": "{home}/opencode.json",
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
        "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
    },
    files={
        "{home}/opencode.json": """\
{
  "autoupdate": false,
  "share": "disabled",
  "permission": {"*": "allow"},
  "provider": {
    "rollout": {
      "npm": "@ai-sdk/openai-compatible",
      "name": "rollout",
      "options": {"baseURL": "{url}/v1", "apiKey": "{key}"},
      "models": {"{model}": {"name": "{model}", "tool_call": true}}
    }
  }
}
"""
    },
    spelling=Spelling(tool="bash", others={"description": "Runs it"}),
)

OPENHANDS = Recipe(
    name="openhands",
    # `openhands-tools` is installed without its dependencies: a browser, and packages that are published only
    # as source. The default agent without a browser needs neither.
    install=Install(
        registry="pypi",
        packages=(
            "openhands-sdk==1.58.0",
            "binaryornot==0.6.0",
            "cachetools==8.0.1",
            "libtmux==0.62.0",
        ),
        bare=("openhands-tools==1.58.0",),
    ),
    command=("{installed}/bin/python", "-I", "{home}/openhands_run.py"),
    files={
        "{home}/openhands_run.py": """\
import os
import sys

from openhands.sdk import LLM, Conversation
from openhands.tools.preset.default import get_default_agent
from pydantic import SecretStr

llm = LLM(
    model="openai/{model}",
    base_url=os.environ["OPENAI_BASE_URL"],
    api_key=SecretStr(os.environ["OPENAI_API_KEY"]),
)
agent = get_default_agent(llm=llm, cli_mode=True)
conversation = Conversation(agent=agent, workspace=os.getcwd())
conversation.send_message(sys.stdin.read())
conversation.run()
"""
    },
    env={"LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENHANDS_SUPPRESS_BANNER": "1"},
    stdin="{instruction}",
    spelling=Spelling(tool="terminal"),
)

RECIPES: Mapping[str, Recipe] = {
    recipe.name: recipe for recipe in (MINI_SWE_AGENT, OPENHANDS, CODEX, CLAUDE_CODE, QWEN_CODE, OPENCODE)
}
