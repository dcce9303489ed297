"""Test commands for rows without them: rows of SWE-Gym, and of SWE-bench before version 5.

SWE-bench's commands are read from tables in the `swebench` package up to 4.1, by repository and version.
SWE-Gym's commands are in a variant of that package that no index has; the table here is a copy.
"""

import importlib
from collections.abc import Mapping
from typing import Any

from prorl_envs.extras import install_packages

#: Start of the test command by repository in lower case; files of the test patch, or names of cases, follow.
SWE_GYM_COMMANDS: Mapping[str, str] = {
    "bokeh/bokeh": "pytest -rA -n0",
    "conan-io/conan": "pytest -n0 -rA",
    "dask/dask": "pytest -n0 -rA --color=no",
    "facebookresearch/hydra": "pytest -rA --tb=long",
    "getmoto/moto": "pytest -n0 -rA",
    "iterative/dvc": "pytest -rA",
    "modin-project/modin": "pytest -n0 -rA",
    "pandas-dev/pandas": "pytest -rA --tb=long",
    "project-monai/monai": "pytest -rA",
    "pydantic/pydantic": "pytest -rA --tb=short -vv -o console_output_style=classic --no-header",
    "python/mypy": "pytest -n0 -rA -k",
}

_WANTED = (
    "missing; use version 5 of the data set, whose rows have it, or install the package with the test "
    f"commands: {install_packages('swebench<5')}"
)


def classic_script(row: Mapping[str, Any]) -> tuple[str, str]:
    """Return the official test script, and the name of the parser, of a row before version 5.

    Raises:
        ValueError: the package with the tables is not installed, or does not have the repository and version.
    """
    try:
        constants: Any = importlib.import_module("swebench.harness.constants")
        scripts: Any = importlib.import_module("swebench.harness.test_spec.create_scripts")
        parsers: Any = importlib.import_module("swebench.harness.log_parsers")
        tables = constants.MAP_REPO_VERSION_TO_SPECS
    except (ImportError, AttributeError) as error:
        raise ValueError(f"eval_script: {_WANTED}") from error
    repo, version = row["repo"], row["version"]
    if version not in tables.get(repo, {}):
        raise ValueError(f"version: the tables of swebench do not contain {repo} {version}")
    lines = scripts.make_eval_script_list(
        row, tables[repo][version], "testbed", "/testbed", row["base_commit"], row["test_patch"]
    )
    text = "\n".join(("#!/bin/bash", "set -uxo pipefail", *lines)) + "\n"
    return text, parsers.MAP_REPO_TO_PARSER[repo].__name__
