"""Update the tables of docs/settings.md with the defaults and descriptions in prorl_envs/config.py."""

import re
from pathlib import Path

from prorl_envs.cli.output.settings_table import setting_rows

PAGE = Path(__file__).parent.parent / "docs" / "settings.md"
_ROW = re.compile(r"^\| `([a-z_.]+)` \| .* \|$", re.MULTILINE)


def updated_page(page: str) -> str:
    """Return the text of docs/settings.md, with defaults and meanings in its tables updated."""
    rows = {row.name: row for row in setting_rows()}

    def updated_row(found: re.Match[str]) -> str:
        row = rows.get(found[1])
        return f"| `{row.name}` | {row.default + ' ' if row.default else ''}| {row.meaning} |" if row else ""

    return _ROW.sub(updated_row, page)


if __name__ == "__main__":
    PAGE.write_text(updated_page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
