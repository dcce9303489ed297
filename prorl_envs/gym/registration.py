"""Gymnasium ids of built-in and third-party families. Imports no other module of this package, to be fast."""

from collections.abc import Mapping
from importlib.metadata import entry_points

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


#: Entry-point group in which other packages register a family; see `env/registry.py`.
_GROUP = "prorl_envs.environments"


def ids() -> Mapping[str, str]:
    """Return every id with its family. A family `lab_book` of another package gets `prorl/LabBook-v0`."""
    others = sorted({point.name for point in entry_points(group=_GROUP)} - set(IDS.values()))
    return {f"prorl/{camel(name)}-v0": name for name in others} | IDS


def camel(name: str) -> str:
    """Convert `lab_book` to `LabBook`; characters that an id cannot have are dropped."""
    parts = "".join(letter if letter.isascii() and letter.isalnum() else " " for letter in name).split()
    return "".join(part[0].upper() + part[1:] for part in parts)


def register() -> None:
    """Register the families. Calling it again changes nothing."""
    for env_id, family in ids().items():
        if env_id not in registry:
            register_id(
                env_id,
                entry_point="prorl_envs.gym.env:TaskEnv",
                vector_entry_point="prorl_envs.gym.vector:TaskVectorEnv",
                # Output of commands (times, process ids) is not a function of the seed.
                nondeterministic=True,
                kwargs={"environment": family},
            )
