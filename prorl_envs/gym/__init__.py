"""Agentic tasks as gymnasium environments. Importing this registers their ids:

    import gymnasium, prorl_envs.gym
    env = gymnasium.make("prorl/Bash-v0")

or, in one step: `gymnasium.make("prorl_envs.gym:prorl/Bash-v0")`. Gymnasium 1.0 and later load no plug-ins by
entry point, so the import is needed.
"""

from prorl_envs.gym.registration import register

register()
