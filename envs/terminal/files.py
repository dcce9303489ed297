"""Access to the files of a row's task directory."""

import tomllib
from collections.abc import Mapping
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from prorl_envs.env.task_files import TaskFile
from prorl_envs.errors import InputError

#: Errors of the parsers of TOML and YAML for values such as `2024-13-45`, `!!int ""` or 5,000 digits.
_PARSER_ERRORS = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)

type Files = Mapping[str, str | TaskFile]


def text_of(files: Files, path: str) -> str:
    """Return the text of a file.

    Raises:
        InputError: the file is missing, or not a text.
    """
    content = files.get(path)
    if isinstance(content, TaskFile):
        content = content.text
    if content is None:
        raise InputError(f"{path}: {'not a text' if path in files else 'missing'}")
    return content


def paths_below(files: Files, *folders: str) -> dict[str, str]:
    """Return the paths of the files below folders, by path relative to the folder.

    If several folders have a file with the same relative path, the file of the last folder counts.
    """
    found: dict[str, str] = {}
    for folder in folders:
        prefix = "" if folder == "." else f"{folder}/"
        found |= {path.removeprefix(prefix): path for path in files if path.startswith(prefix)}
    return found


def mapping_of(files: Files, path: str) -> Mapping[str, Any]:
    """Parse a TOML or YAML file.

    Raises:
        InputError: the file is missing, or has a syntax error.
    """
    text = text_of(files, path)
    try:
        found = tomllib.loads(text) if path.endswith("toml") else yaml.safe_load(text)
    except (yaml.YAMLError, *_PARSER_ERRORS) as error:
        raise InputError(f"{path}: {str(error)[:300] or 'not valid'}") from None
    if not isinstance(found, Mapping):
        raise InputError(f"{path}: not a mapping")
    return found


def parsed[ModelT: BaseModel](model: type[ModelT], path: str, values: Mapping[str, Any]) -> ModelT:
    """Validate the content of a file.

    Raises:
        InputError: a value is invalid; the message names the file, the field and the problem.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise InputError(f"{path}: {first_problem(error)}") from None


def first_problem(error: ValidationError) -> str:
    """Return the first invalid field, and its problem."""
    first = error.errors(include_url=False, include_input=False)[0]
    field = ".".join(str(part) for part in first["loc"])
    return f"{field}: {first['msg']}" if field else str(first["msg"])


def host_parts(service: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the parts of the host that a Compose service requests: devices, and `privileged`."""
    devices = service.get("devices")
    mappings = [text for text in devices if isinstance(text, str)] if isinstance(devices, list) else []
    paths = [mapping.partition(":")[0][:200] for mapping in mappings]
    return (*paths, *(["privileged"] if service.get("privileged") is True else ()))
