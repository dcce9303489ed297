"""Environments for the `data_source` names of the ProRL Agent paper's server and its data sets."""

from collections.abc import Container, Mapping

from prorl_envs.errors import InputError

#: Environment by `data_source`. A final `*` matches any ending.
SOURCES: Mapping[str, str] = {
    # names that the reference registers, and the data sets of Eurus, DAPO and verl that its scripts read
    "deepscaler*": "math",
    "numina_*": "math",
    "aime*": "math",
    "math_dapo*": "math",
    "openai/gsm8k": "math",
    "lighteval/MATH": "math",
    "DigitalLearningGmbH/MATH-lighteval": "math",
    "HuggingFaceH4/MATH-500": "math",
    # all names that the reference registers
    "deepcoder*": "code",
    "apps": "code",
    "codecontests": "code",
    "codeforces": "code",
    "taco": "code",
    # the reference registers swebench alone, which is our name too; the others are its data sets' own names
    "swe-bench*": "swebench",
    "SWE-bench/*": "swebench",
    "princeton-nlp/SWE-bench*": "swebench",
    "swegym": "swebench",
    "swe-gym": "swebench",
    "SWE-Gym/*": "swebench",
    "NovaSky-AI/SkyRL-v0*": "swebench",
    "r2egym": "swebench",
    "r2e-gym": "swebench",
    "R2E-Gym/*": "swebench",
}


def environment_of(source: str, offered: Container[str], further: Mapping[str, str]) -> str:
    """Return the environment for a `data_source`.

    The name of an environment on offer stands for itself. Otherwise `further` is searched before `SOURCES`,
    and in each an exact name before the longest matching pattern.

    Args:
        source: as the client sent it.
        offered: environments of the service.
        further: the operator's own names, in the form of `SOURCES`.

    Returns:
        its environment, or `source` itself if no name matches.

    Raises:
        InputError: the name stands for an environment that is not on offer.
    """
    if source in offered:
        return source
    for table in (further, SOURCES):
        if name := _match(source, table):
            environment = table[name]
            if environment not in offered:
                raise InputError(
                    f"data_source {source!r} stands for the environment {environment!r}, not on offer",
                    hint="offer it (environments), or choose another (server.paper_sources)",
                )
            return environment
    return source


def _match(source: str, table: Mapping[str, str]) -> str:
    """Return the key of the table that matches best; empty if none does."""
    if source in table:
        return source
    prefixes = (key for key in table if key.endswith("*") and source.startswith(key[:-1]))
    return max(prefixes, key=len, default="")
