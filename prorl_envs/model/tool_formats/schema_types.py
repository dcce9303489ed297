"""Types of parameters according to JSON schemas, for formats that write values without quotes. Pure.

Keywords: https://json-schema.org/draft/2020-12. Only references to parts of the same schema are followed.
"""

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

#: Stands for all types if a schema does not restrict them.
ANY = "any"
_MAX_DEPTH = 64
_NAMES = {str: "string", bool: "boolean", int: "number", float: "number", list: "array", dict: "object"}

type Types = frozenset[str]


def type_name(value: Any) -> str:
    """Return the JSON type of a decoded value. Integers are numbers."""
    return _NAMES.get(type(value), "null")


class SchemaTypes:
    """Types that the schema of a tool's arguments allows.

    Args:
        root: the schema; hostile.
    """

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._known: dict[str, Types] = {}

    def parameter(self, name: str) -> tuple[Types, list[Any]]:
        """Return the types of a parameter (perhaps `ANY`), and the allowed values that the schema lists."""
        parts = list(self._parts(self._root))
        declared = [p["properties"][name] for p in parts if name in _mapping(p.get("properties"))]
        declared = declared or [p["additionalProperties"] for p in parts if "additionalProperties" in p]
        types = frozenset[str]().union(*(self._types(schema) for schema in declared))
        listed = [value for schema in declared for part in self._parts(schema) for value in _listed(part)]
        return types or frozenset({ANY}), listed

    def _parts(self, schema: Any) -> Iterator[Mapping[str, Any]]:
        """Yield a schema and all schemas that it combines or refers to; each reference once."""
        waiting, seen = [schema], set[str]()
        while waiting:
            part = _mapping(waiting.pop())
            yield part
            for key in ("allOf", "anyOf", "oneOf"):
                waiting += _list(part.get(key))
            reference = part.get("$ref")
            if isinstance(reference, str) and reference not in seen:
                seen.add(reference)
                waiting.append(self._referred(reference))

    def _types(self, schema: Any, depth: int = 0) -> Types:
        schema = _mapping(schema)
        found = frozenset({ANY})
        if depth > _MAX_DEPTH:
            return found
        if named := schema.get("type"):
            names = [named] if isinstance(named, str) else _list(named)
            found = frozenset(
                "number" if name == "integer" else name for name in names if isinstance(name, str)
            )
        if listed := list(_listed(schema)):
            found = _both(found, frozenset(map(type_name, listed)))
        if isinstance(reference := schema.get("$ref"), str):
            if reference not in self._known:
                self._known[reference] = frozenset({ANY})  # ends the recursion of a reference to itself
                self._known[reference] = self._types(self._referred(reference), depth + 1)
            found = _both(found, self._known[reference])
        for part in _list(schema.get("allOf")):
            found = _both(found, self._types(part, depth + 1))
        for key in ("anyOf", "oneOf"):
            if parts := _list(schema.get(key)):
                found = _both(found, frozenset[str]().union(*(self._types(p, depth + 1) for p in parts)))
        return found

    def _referred(self, reference: str) -> Any:
        """Return the part of the schema to which a JSON pointer (RFC 6901) leads; None if there is none."""
        if not reference.startswith("#"):
            return None
        found: Any = self._root
        for step in unquote(reference[1:]).split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list):
                found = dict(enumerate(found)).get(int(step)) if step.isdecimal() and len(step) < 9 else None
            else:
                found = _mapping(found).get(step)
        return found


def _both(first: Types, second: Types) -> Types:
    """Return the types that both schemas allow."""
    if ANY in first and ANY in second:
        return first | second
    if ANY in first or ANY in second:
        return second if ANY in first else first
    return first & second


def _listed(schema: Mapping[str, Any]) -> list[Any]:
    return [*_list(schema.get("enum")), *([schema["const"]] if "const" in schema else [])]


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
