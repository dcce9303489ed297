"""Recipes to rebuild known instances without an image, by instance: `data/recipes.json`.

A recipe is a value of the column `x_env`. A row without `x_env` gets the recipe of its instance from here, so
such instances run without images from an unmodified data file.
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
