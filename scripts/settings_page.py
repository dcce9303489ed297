"""Update the tables of docs/settings.md with the defaults and descriptions in prorl_envs/config.py."""

from pathlib import Path

from prorl_envs.cli.output.settings_table import updated_page

PAGE = Path(__file__).parent.parent / "docs" / "settings.md"

if __name__ == "__main__":
    PAGE.write_text(updated_page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
