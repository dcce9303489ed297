"""Access to the files of a row's task directory."""

import re
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
    """Return the text of a file, without a byte order mark.

    Raises:
        InputError: the file is missing, or not a text.
    """
    content = files.get(path)
    if isinstance(content, TaskFile):
        content = content.text
    if content is None:
        raise InputError(f"{path}: {'not a text' if path in files else 'missing'}")
    return content.removeprefix("\ufeff")


def paths_below(files: Files, *folders: str) -> dict[str, str]:
    """Return the paths of the files below folders, by path relative to the folder.

    If several folders have a file with the same relative path, the file of the last folder counts.
    """
    found: dict[str, str] = {}
    for folder in folders:
        prefix = "" if folder == "." else f"{folder}/"
        found |= {path.removeprefix(prefix): path for path in files if path.startswith(prefix)}
    return found


class ComposeLoader(yaml.SafeLoader):
    """Loader that reads yes, no, on, off, 12:30 and dates as text, as Compose does (YAML 1.2)."""

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [(tag, pattern) for tag, pattern in found if not tag.endswith((":bool", ":int", ":timestamp"))]
        for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


ComposeLoader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile("(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
ComposeLoader.add_implicit_resolver(
    "tag:yaml.org,2002:int", re.compile("[-+]?(?:0[0-7]*|[1-9][0-9]*|0x[0-9a-fA-F]+)$"), list("-+0123456789")
)


def mapping_of(files: Files, path: str, loader: type[yaml.SafeLoader] = yaml.SafeLoader) -> Mapping[str, Any]:
    """Parse a TOML or YAML file.

    Raises:
        InputError: the file is missing, or has a syntax error.
    """
    text = text_of(files, path)
    try:
        found = tomllib.loads(text) if path.endswith("toml") else yaml.load(text, loader)
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
