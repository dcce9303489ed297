"""Tools in sandboxes of the driver `local`, which use the host's files."""

from pathlib import Path

import pytest

from prorl_envs.errors import UnsupportedMachine
from prorl_envs.sandbox.base import SandboxSpec
from prorl_envs.sandbox.drivers.local import LocalDriver, NoIsolationWarning
from prorl_envs.tools.client.toolbox import Toolbox
from prorl_envs.tools.types import ToolCall

pytestmark = pytest.mark.anyio


def files_below(folder: Path) -> dict[str, str]:
    """Return the contents of all files, by their paths below `folder`."""
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


async def test_tools_write_only_below_the_sandboxs_directory(run_dir: Path, tmp_path: Path) -> None:
    """The host may have a `/workspace` of its own."""
    place = tmp_path / "workspace"
    place.mkdir()
    (place / "data.txt").write_text("the host's")
    with pytest.warns(NoIsolationWarning):
        driver = LocalDriver()
    sandbox = await driver.start(SandboxSpec(workdir=str(place)))
    toolbox = await Toolbox.open(sandbox)
    await toolbox.write(f"{place}/data.txt", b"the sandbox's")
    await toolbox.write("below/data.txt", b"too")
    create = {"command": "create", "path": f"{place}/new.txt", "file_text": "text"}
    await toolbox.call(ToolCall("1", "str_replace_editor", create), timeout_s=20)
    await toolbox.upload(place / "data.txt", f"{place}/uploaded.txt", timeout_s=20)
    assert await toolbox.read(f"{place}/data.txt") == b"the sandbox's"
    listed = await toolbox.run(
        ["sh", "-c", "ls; cat uploaded.txt below/data.txt"], cwd=str(place), timeout_s=20
    )
    assert listed.output == b"below\ndata.txt\nnew.txt\nuploaded.txt\nthe host'stoo"
    for path in (f"{place}/../elsewhere", "../../elsewhere", str(tmp_path / "elsewhere")):
        with pytest.raises(UnsupportedMachine, match="does not write outside"):
            await toolbox.write(path, b"")
        with pytest.raises(UnsupportedMachine, match="does not write outside"):
            await toolbox.upload(place / "data.txt", path, timeout_s=20)
    assert files_below(tmp_path) == {"workspace/data.txt": "the host's"}
    await toolbox.aclose()
    await driver.aclose()
