"""Environments for the `data_source` names of the ProRL Agent paper's server and its data sets."""

from collections.abc import Container, Mapping

from prorl_envs.errors import InputError

#: Environment by `data_source`. A final `*` matches any ending. "The reference" is the paper's server.
SOURCES: Mapping[str, str] = {
    # names that the reference registers, and data sets of Eurus, DAPO and verl that its scripts read
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
    # the reference registers only swebench, which is our name too; these are names of its data sets
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

    A name of one of the service's environments stands for itself. Otherwise `further` is searched, then
    `SOURCES`. In each table an exact name has priority over patterns, and longer patterns over shorter ones.

    Args:
        source: the `data_source` that the client sent.
        offered: names of the service's environments.
        further: the operator's own names, in the form of `SOURCES`.

    Returns:
        The environment, or `source` itself if no name matches.

    Raises:
        InputError: the name stands for an environment that the service does not have.
    """
    if source in offered:
        return source
    for table in (further, SOURCES):
        if name := _match(source, table):
            environment = table[name]
            if environment not in offered:
                raise InputError(
                    f"data_source {source!r} stands for environment {environment!r}, which is not available",
                    hint="add it to the setting environments, or map the name with server.paper_sources",
                )
            return environment
    return source


def _match(source: str, table: Mapping[str, str]) -> str:
    """Return the key of the table that matches best, or "" if no key matches."""
    if source in table:
        return source
    prefixes = (key for key in table if key.endswith("*") and source.startswith(key[:-1]))
    return max(prefixes, key=len, default="")
