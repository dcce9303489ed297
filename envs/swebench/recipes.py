"""Rebuild recipes of known instances without an image, by instance: `data/recipes.json`.

A recipe is the value of a row's `x_env`. Rows of SWE-bench without one get it here, so that an unmodified
downloaded data file runs without images for all instances with a recipe.
"""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any


def recipe(instance: object) -> Mapping[str, Any] | None:
    """Return the recipe of an instance, or None."""
    return _recipes().get(instance) if isinstance(instance, str) else None


@cache
def _recipes() -> Mapping[str, Mapping[str, Any]]:
    found: Mapping[str, Mapping[str, Any]] = json.loads(
        (Path(__file__).parent / "data/recipes.json").read_bytes()
    )
    return found
