"""Settings with their defaults and meanings, for `prorl-envs settings`, docs/settings.md and the JSON schema.

The meanings come from the docstrings in `prorl_envs/config.py`: from the entries below `Args:`.
"""

import inspect
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from pydantic import BaseModel

from prorl_envs import config
from prorl_envs.cli.output.fitted_table import FittedTable, plain_table
from prorl_envs.config import (
    AgentSettings,
    EnvironmentSettings,
    HarnessSettings,
    NemoSettings,
    Settings,
    ToolSettings,
)

#: Sections that are None or empty by default, with the path of their settings.
_NESTED: dict[tuple[type[BaseModel], str], tuple[type[BaseModel], str]] = {
    (Settings, "environments"): (EnvironmentSettings, "environments.name."),
    (Settings, "agents"): (AgentSettings, "agents.name."),
    (EnvironmentSettings, "nemo"): (NemoSettings, "nemo."),
    (AgentSettings, "harness"): (HarnessSettings, "harness."),
    (AgentSettings, "tools"): (ToolSettings, "tools.name."),
}
_ENTRY = re.compile(r"    ([a-z_]+(?:, [a-z_]+)*): (.*)")
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")


class SettingRow(NamedTuple):
    """A setting: dotted name, default as YAML ("" if it is not set), and meaning in Markdown."""

    name: str
    default: str
    meaning: str


def setting_rows(model: type[BaseModel] = Settings, prefix: str = "") -> Iterator[SettingRow]:
    """Yield every setting of a section, including those of nested sections."""
    meanings = meanings_of(model)
    for name, field in model.model_fields.items():
        if isinstance(field.default, BaseModel):
            yield from setting_rows(type(field.default), f"{prefix}{name}.")
            continue
        default = field.get_default(call_default_factory=True)
        yield SettingRow(prefix + name, _yaml(default), meanings[name])
        if (model, name) in _NESTED:
            nested, path = _NESTED[model, name]
            yield from setting_rows(nested, prefix + path)


def meanings_of(model: type[BaseModel]) -> dict[str, str]:
    """Return the meaning of each setting of a section, from the section's docstring."""
    _, _, args = (inspect.getdoc(model) or "").partition("\nArgs:\n")
    texts: dict[str, list[str]] = {}
    entry: list[str] = []
    for line in args.splitlines():
        if found := _ENTRY.fullmatch(line):
            entry = [found[2]]
            texts.update(dict.fromkeys(found[1].split(", "), entry))
        else:
            entry.append(line.strip())
    return {name: " ".join(lines).strip() for name, lines in texts.items()}


def settings_schema() -> dict[str, Any]:
    """Return the JSON schema of a settings file, with the meaning of each setting."""
    schema = Settings.model_json_schema()
    sections = {getattr(config, name): section for name, section in schema["$defs"].items()}
    for model, described in {Settings: schema, **sections}.items():
        described["description"] = (inspect.getdoc(model) or "").partition("\n")[0]
        for name, meaning in meanings_of(model).items():
            described["properties"][name]["description"] = meaning
    return schema


def settings_table(rows: Iterable[SettingRow]) -> FittedTable:
    """Return a table of settings for a terminal; of links, only the text is shown."""
    table = plain_table("setting", "default", "meaning", unwrapped=["setting"])
    for row in rows:
        table.add_row(row.name, row.default, _LINK.sub(r"\1", row.meaning))
    return FittedTable(table)


def _yaml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return str(value) if value or value == 0 else ""
