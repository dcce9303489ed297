"""Test commands for rows without any: those of SWE-Gym, and those of SWE-bench before its fifth version.

SWE-bench's are in the `swebench` package up to 4.1, by repository and version, and read from there. SWE-Gym's
are in a variant of that package which is on no index; the table here was copied from it.
"""

import importlib
from collections.abc import Mapping
from typing import Any

from prorl_envs.extras import install_packages

#: By repository in lower case; the files of the test patch follow, or with `-k` the names of cases.
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
    "the row brings no eval_script; take the data set's present form, whose rows do, or have the tables of "
    f"the package: {install_packages('swebench<5')}"
)


def classic_script(row: Mapping[str, Any]) -> tuple[str, str]:
    """Return the official script and parser of a row in the form of before version 5.

    Raises:
        ValueError: the tables are not installed, or do not contain the row's repository and version.
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
        raise ValueError(f"version: swebench's tables know no {repo} {version}")
    lines = scripts.make_eval_script_list(
        row, tables[repo][version], "testbed", "/testbed", row["base_commit"], row["test_patch"]
    )
    text = "\n".join(("#!/bin/bash", "set -uxo pipefail", *lines)) + "\n"
    return text, parsers.MAP_REPO_TO_PARSER[repo].__name__
