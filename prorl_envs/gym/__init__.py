"""Agentic tasks as gymnasium environments. Importing this package registers their ids:

    import gymnasium, prorl_envs.gym
    env = gymnasium.make("prorl/Bash-v0")

or, in one step: `gymnasium.make("prorl_envs.gym:prorl/Bash-v0")`. The import is needed because Gymnasium 1.0
and later load no plug-ins by entry point. Use the second form in functions that an `AsyncVectorEnv` calls:
its processes import nothing by themselves, unless they are forks (the default before Python 3.14).
"""

from prorl_envs.gym.registration import register

register()
