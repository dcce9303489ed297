"""Files that the agent writes for another party to run: a later shell, session or tool, or the host."""

import os
import textwrap
import threading
from pathlib import Path

import pytest

from prorl_envs.errors import ToolError, TransferRefused
from prorl_envs.sandbox.filesystem.tree_copy import copy_files
from prorl_envs.tools.client.toolbox import Toolbox
from prorl_envs.tools.protocol.tree import TreeLimits
from tests.attacks.attempts import T

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.parametrize("driver_name", ["bubblewrap"], indirect=True, scope="module"),
]

#: Each creates the file `ran` in the directory in which it runs.
STARTUP = r"""
mine='touch /workspace/ran'
for f in .bashrc .bash_profile .bash_login .profile .bash_logout .shrc .inputrc; do
    echo "$mine" > ~/$f; echo "$mine" > /workspace/$f
done
export BASH_ENV=~/.bashrc ENV=~/.bashrc PROMPT_COMMAND="$mine" PS1='$('"$mine"')' PS0='$('"$mine"')'
rm -f /workspace/ran
"""
PYTHON_STARTUP = r"""
site=$(python3 -c 'import site; print(site.getusersitepackages())')
mkdir -p "$site" .ipython/profile_default/startup ~/.ipython/profile_default/startup
evil='open("/workspace/ran", "w")'
echo "import os; $evil" > "$site/evil.pth"
for f in sitecustomize usercustomize json re signal IPython msgspec; do
    echo "$evil" > $f.py; echo "$evil" > "$site/$f.py"
done
echo "$evil" > ~/.ipython/profile_default/startup/00.py
echo "c = get_config(); c.InteractiveShellApp.exec_lines = ['$evil']" | tee
~/.ipython/profile_default/ipython_config.py > ipython_config.py echo "$evil" > ~/.pythonrc
export PYTHONSTARTUP=~/.pythonrc PYTHONPATH=/workspace PYTHONINSPECT=1
"""


async def absent(box: Toolbox, name: str) -> bool:
    try:
        await box.read(f"/workspace/{name}")
    except FileNotFoundError:
        return True
    return False


async def test_startup_files_reach_no_later_shell_and_no_other_process(box: Toolbox) -> None:
    await box.bash(STARTUP, timeout_s=T)
    await box.bash("exit", timeout_s=T)  # the shell in which they were exported
    await box.run(["rm", "-f", "/workspace/ran"], timeout_s=T)
    assert (await box.bash("echo new", timeout_s=T)).text.startswith("new\n")
    assert (await box.bash("echo other", session="other", timeout_s=T)).text == "other\n"
    assert (await box.bash("echo anew", timeout_s=T, restart=True)).text.startswith("anew\n")
    assert (await box.run(["bash", "-c", "echo ${BASH_ENV-none}"], timeout_s=T)).output == b"none\n"
    assert await absent(box, "ran")


async def test_planted_programs_in_the_path_and_preloaded_libraries(box: Toolbox) -> None:
    plant = """
        mkdir bin
        for p in bash sh env tar cat ls; do printf '#!/bin/sh\\n: > /workspace/ran\\n' > bin/$p; done
        chmod +x bin/*; cp bin/* .; echo garbage > evil.so
        export PATH=/workspace/bin:/workspace:$PATH LD_PRELOAD=/workspace/evil.so LD_LIBRARY_PATH=/workspace
    """
    await box.bash(plant, timeout_s=T)
    assert (await box.bash("echo on", session="other", timeout_s=T)).text == "on\n"
    done = await box.run(["bash", "-c", "echo ${LD_PRELOAD-none}; cat /dev/null"], timeout_s=T)
    assert done.output == b"none\n"
    await box.bash("exit", timeout_s=T)
    assert (await box.bash("echo on", timeout_s=T)).text.startswith("on\n")
    assert await absent(box, "ran")


async def test_startup_files_of_python_reach_no_later_session(python_box: Toolbox) -> None:
    await python_box.bash(PYTHON_STARTUP, timeout_s=T)
    await python_box.run(["rm", "-f", "/workspace/ran"], timeout_s=T)
    await python_box.python("exit()", timeout_s=T)
    code = """
        import sys
        loaded = {name: getattr(sys.modules.get(name), "__file__", "") for name in NAMES}
        [name for name, file in loaded.items() if file.startswith(("/workspace", "/home"))]
    """.replace(
        "NAMES", "('evil', 'sitecustomize', 'usercustomize')"
    )  # Debian has a sitecustomize of its own
    assert (await python_box.python(textwrap.dedent(code), timeout_s=T)).text == "[]\n"
    assert await absent(python_box, "ran")


def bytes_below(tree: Path) -> int:
    """Return the bytes on disk below a directory."""
    paths = (Path(folder, name) for folder, folders, files in os.walk(tree) for name in (*folders, *files))
    return sum(512 * path.lstat().st_blocks for path in paths)


@pytest.mark.parametrize(
    "plant",
    [
        "ln -s / tree/root",
        "ln -s ../../../../etc/passwd tree/passwd",
        "ln -s /proc/self/environ tree/environ; ln -s /proc/1/root tree/host",
        "mkfifo tree/pipe",
        "python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"tree/sock\")'",
        "rm -r tree; ln -s /proc/self/root tree",
        "mkdir -p tree/$(printf 'd/%.0s' {1..100})",
        "truncate -s 1T tree/giant || truncate -s 19M tree/giant",
        "for i in {1..600}; do : > tree/$i; done",
        "touch tree/$'\\xff\\xfe'",
    ],
)
async def test_planted_links_for_a_reader_on_the_host(box: Toolbox, plant: str, tmp_path: Path) -> None:
    await box.bash(f"mkdir tree; {plant}", timeout_s=T)
    limits = TreeLimits(bytes=1 << 20, entries=500, depth=64)
    with pytest.raises((TransferRefused, ToolError, OSError)):
        await box.download("/workspace/tree", tmp_path / "got", limits=limits, timeout_s=T)
    assert os.listdir(tmp_path) == []  # noqa: PTH208
    copy = tmp_path / "copy"
    await copy_files(box.sandbox.workspace, copy, threading.Event())
    assert bytes_below(copy) < 1 << 20  # no link was followed, and holes are still holes
