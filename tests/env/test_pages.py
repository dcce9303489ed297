"""Agreement of each family's page with the family: the facts are true, and the examples work."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from prorl_envs.catalog import Catalog
from prorl_envs.config import load_settings
from prorl_envs.env.audit.audit import validate
from prorl_envs.env.node import Node
from prorl_envs.env.registry import example_path, family, load_tasks
from prorl_envs.sandbox.drivers.bubblewrap import BubblewrapDriver
from tests.support.toy import empty_node

FAMILIES = ("bash", "code", "ipython", "math", "stem", "swebench", "terminal")
HEADINGS = (
    "What the model sees",
    "What is scored",
    "Your own data",
    "Known ways to cheat, and what prevents them",
)
NUMBERS = ("six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen")
#: How a page states the number of tasks that its family ships.
COUNT = re.compile(rf"\b({'|'.join(NUMBERS)})\s+(?:tasks|problems|questions|instances)\b")


def sections(name: str) -> dict[str, str]:
    """Split a page's text by heading."""
    page = (Path(example_path(name)).parents[1] / "README.md").read_text()
    parts = re.split(r"^## (.*)$", page, flags=re.MULTILINE)
    return {"": parts[0]} | dict(zip(parts[1::2], parts[2::2], strict=True))


def rows(name: str) -> list[dict[str, Any]]:
    """Return the example tasks of a page."""
    blocks = re.findall(r"^```json\n(.*?)^```$", sections(name)["Your own data"], re.MULTILINE | re.DOTALL)
    return [json.loads(block) for block in blocks]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_page_describes_observations_scores_and_protection_from_cheats(name: str) -> None:
    found = sections(name)
    assert [heading for heading in HEADINGS if len(found.get(heading, "")) < 200] == []
    tools = {tool.name for tool in family(name)(empty_node()).tools}
    assert tools <= set(re.findall(r"`(\w+)`", found["What the model sees"]))
    assert "Not prevented" in found[HEADINGS[-1]]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_page_has_the_number_of_shipped_tasks(name: str) -> None:
    (count,) = {count for text in sections(name).values() for count in COUNT.findall(text)}
    assert 6 + NUMBERS.index(count) == len(load_tasks(name, example_path(name)))


@pytest.mark.anyio
@pytest.mark.parametrize("name", [name for name in FAMILIES if rows(name)])
async def test_the_example_row_of_a_page_discriminates(
    name: str, shared_driver: BubblewrapDriver, tmp_path: Path
) -> None:
    tasks = [family(name).load(row) for row in rows(name)]
    (verdict,) = await validate(family(name), Node(shared_driver, tmp_path), tasks, repeats=1)
    assert (verdict.untouched, verdict.findings) == (0.0, ()) and set(verdict.reference) == {1.0}


@pytest.mark.parametrize("name", FAMILIES)
def test_the_settings_of_a_page_are_valid(name: str, tmp_path: Path) -> None:
    blocks = [
        block
        for text in sections(name).values()
        for block in re.findall(r"^```yaml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    ]
    for block in blocks:
        (tmp_path / "settings.yaml").write_text(block)
        assert name in Catalog.of(load_settings(tmp_path / "settings.yaml"))
