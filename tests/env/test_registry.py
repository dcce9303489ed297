"""Families by name."""

import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest

from prorl_envs.env.base import Environment
from prorl_envs.env.registry import GROUP, Families, environments, example_path, family, load_tasks
from prorl_envs.errors import InputError


def test_the_built_in_families() -> None:
    assert {"bash", "code", "ipython", "math", "stem", "swebench", "terminal"} <= set(environments())


@pytest.mark.parametrize("name", ["bash", "code", "ipython", "math", "stem", "swebench", "terminal"])
def test_each_family_has_its_name_and_loadable_examples(name: str) -> None:
    assert issubclass(family(name), Environment)
    assert family(name).name == name
    tasks = load_tasks(name, example_path(name))
    assert len(tasks) >= 5
    assert all(task.reference for task in tasks)


def test_listing_imports_no_family() -> None:
    program = (
        "import sys; from prorl_envs.env.registry import environments; list(environments());"
        "sys.exit(any(name.startswith('prorl_envs.envs') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(InputError, match="no environment is called 'chess'") as caught:
        family("chess")
    assert "bash" in caught.value.hint


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("no_such_package.env:X", "cannot be imported"),
        ("json:NoSuchClass", "cannot be imported"),
        ("json:JSONDecoder", "not a subclass of Environment"),
    ],
)
def test_a_broken_third_party_family_names_its_problem(value: str, says: str) -> None:
    families = Families({"chess": EntryPoint("chess", value, GROUP)})
    assert list(families) == ["chess"]
    with pytest.raises(InputError, match=says):
        families["chess"]
