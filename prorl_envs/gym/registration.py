"""The gymnasium ids of the built-in families. Imports nothing of this package: it is free."""

from gymnasium.envs.registration import register as register_id
from gymnasium.envs.registration import registry

#: Gymnasium id: name of the family.
IDS = {
    "prorl/Bash-v0": "bash",
    "prorl/Code-v0": "code",
    "prorl/IPython-v0": "ipython",
    "prorl/Math-v0": "math",
    "prorl/STEM-v0": "stem",
    "prorl/SWEBench-v0": "swebench",
}


def register() -> None:
    """Register the built-in families. Calling it again changes nothing."""
    for env_id, family in IDS.items():
        if env_id not in registry:
            register_id(
                env_id,
                entry_point="prorl_envs.gym.env:TaskEnv",
                # What commands print (times, process ids) is not a function of the seed.
                nondeterministic=True,
                kwargs={"environment": family},
            )
