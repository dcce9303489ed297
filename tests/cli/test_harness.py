"""`prorl-envs harness` with a harness in the settings, whose package needs no registry."""

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Cli
from tests.env.test_install import wheel


@pytest.mark.thorough
def test_a_harness_is_installed_and_listed(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PRORL_CACHE_DIR", str(tmp_path / "cache"))
    packages = json.dumps([str(wheel(tmp_path))])
    (tmp_path / "settings.yaml").write_text(
        f"agents: {{little: {{harness: {{command: [python, -m, little], packages: {packages}}}}}}}\n"
        "environments: {bash: {agents: [little]}}\n"
    )
    config = ("--config", "settings.yaml")
    before = {one["name"]: one for one in json.loads(cli("harness", "list", "--json", *config).stdout)}
    assert before["little"]["installed"] is False
    done = cli("harness", "install", "little", *config)
    assert done.returncode == 0, done.stderr
    after = {one["name"]: one for one in json.loads(cli("harness", "list", "--json", *config).stdout)}
    assert after["little"] == {**before["little"], "installed": True}
    [usable] = [
        one for one in json.loads(cli("envs", "--json", *config).stdout) if one["name"] == "bash@little"
    ]
    assert usable["usable"] is True
    unknown = cli("harness", "install", "litle", *config)
    assert unknown.returncode == 2 and "no harness is called 'litle'" in unknown.stderr
