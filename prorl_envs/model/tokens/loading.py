"""Loader of a renderer from the files that every Hugging Face model has: tokenizer.json,
tokenizer_config.json, chat_template.jinja, generation_config.json. It neither imports nor runs model code."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from prorl_envs.errors import InputError
from prorl_envs.model.tokens.chat_template import ChatTemplate
from prorl_envs.model.tokens.rendering import TemplateRenderer
from prorl_envs.tools.types import JsonObject

_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
    "config.json",
)


def load_renderer(name: str | Path, *, tool_format: str = "auto") -> TemplateRenderer:
    """Return the renderer of a model.

    Args:
        name: a folder with the tokenizer's files, or a model name on the Hugging Face Hub.
        tool_format: see `TemplateRenderer`.

    Raises:
        InputError: a file is missing or unusable, or the Hub could not be reached.
    """
    folder = Path(name) if Path(name).is_dir() else _download(str(name))
    config = _read_json(folder / "tokenizer_config.json")
    tokenizer = _read_tokenizer(folder / "tokenizer.json")
    special_tokens = {
        key: _token_text(config.get(key)) for key in ("bos_token", "eos_token", "pad_token", "unk_token")
    }
    template = ChatTemplate(_read_template(folder, config), special_tokens)
    stop_ids = _ids(_read_json(folder / "generation_config.json").get("eos_token_id"))
    eos_token = special_tokens["eos_token"]
    if eos_token and (eos := tokenizer.token_to_id(eos_token)) is not None:
        stop_ids.append(eos)
    size = _read_json(folder / "config.json").get("vocab_size")
    return TemplateRenderer(
        tokenizer,
        template,
        stop_ids=stop_ids,
        vocab_size=size if isinstance(size, int) else None,
        tool_format=tool_format,
    )


def _download(name: str) -> Path:
    # Imported here, because it takes half a second and few callers use the Hub.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    if Path(name).is_absolute() or name.startswith(".") or name.count("/") > 1:
        raise InputError(f"there is no tokenizer folder {name}")
    try:
        return Path(snapshot_download(name, allow_patterns=list(_FILES)))
    except (HFValidationError, HfHubHTTPError, OSError) as error:
        raise InputError(
            f"cannot download the tokenizer of {name!r} from the Hugging Face Hub: {type(error).__name__}",
            hint="offline or private? pass a local folder with tokenizer.json and tokenizer_config.json",
        ) from error


def _read_json(path: Path) -> JsonObject:
    """Return the object in a file; an empty object if the file does not exist."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise InputError(f"{path} does not hold a JSON object")
    return value


def _read_tokenizer(path: Path) -> Tokenizer:
    if not path.is_file():
        raise InputError(
            f"{path} is missing",
            hint="if the model has only tokenizer.model or vocab.json, save its fast tokenizer first",
        )
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the bindings raise Exception itself
        raise InputError(f"{path} is not a tokenizer this version reads: {error}") from error


def _read_template(folder: Path, config: JsonObject) -> str:
    """Return the chat template. Its own file takes precedence over the configuration; in a list of templates,
    `tool_use` takes precedence over `default`."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        by_name = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = by_name.get("tool_use") or by_name.get("default")
    if not isinstance(template, str):
        raise InputError(
            f"{folder} has no chat template",
            hint="base models have none; take the instruct model's tokenizer",
        )
    return template


def _token_text(value: Any) -> str | None:
    """Return the text of a token in tokenizer_config.json: a string, or an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _ids(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [number for number in values if isinstance(number, int) and number >= 0]
