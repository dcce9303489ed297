"""How known instances are rebuilt without an image, by instance: `data/recipes.json`.

A recipe is what a row's `x_env` holds. Rows of SWE-bench that bring none are given theirs here, so that a
data file that was downloaded as it is runs without images as far as the recipes go.
"""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any


def recipe(instance: object) -> Mapping[str, Any] | None:
    """The recipe of an instance, where one is known."""
    return _recipes().get(instance) if isinstance(instance, str) else None


@cache
def _recipes() -> Mapping[str, Mapping[str, Any]]:
    found: Mapping[str, Mapping[str, Any]] = json.loads(
        (Path(__file__).parent / "data/recipes.json").read_bytes()
    )
    return found
