"""Agentic tasks as gymnasium environments: `gymnasium.make("prorl/Bash-v0")`.

Importing this registers the ids, for where the package's entry point is not installed.
"""

from prorl_envs.gym.registration import register

register()
