"""Invalid Unicode in every string that leaves a sandbox: it must be storable and printable."""

import json
from typing import Any

import msgspec
import pytest

from prorl_envs.errors import ProrlError
from prorl_envs.sandbox.base import SandboxSpec
from prorl_envs.sandbox.filesystem.python_runtime import python_runtime
from prorl_envs.tools.client.python import PythonEngine
from prorl_envs.tools.client.toolbox import Toolbox
from prorl_envs.tools.types import ToolCall, ToolResult
from tests.attacks.attempts import Driver, T

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.parametrize("driver_name", ["bubblewrap"], indirect=True, scope="module"),
]


def check_unchanged(result: ToolResult) -> None:
    """Check that the answer is unchanged after a round trip through JSON and UTF-8."""
    content: dict[str, Any] = {"text": result.text, "data": result.data}
    assert msgspec.json.decode(msgspec.json.encode(content)) == content
    assert json.loads(json.dumps(content, ensure_ascii=False, allow_nan=False).encode()) == content


COMMANDS = {
    "output": r"printf '\xff\xfe\x00\xed\xa0\x80\xf5 \x1b]0;title\x07\x9b31m \u202e'",
    "directory": r"d=$(printf '\xff\x1b[31m\nx'); mkdir -p -- $'\xff\e[31m\nx' && cd -- $'\xff\e[31m\nx'",
    "process name": r"printf '#!/bin/sh\n' > $'\xff\e'; chmod +x ./*; ./$'\xff\e'",
    "no such command": "$'\\xff\\xfe\\e[2J'",
    "function": "$'\\xff'() { :; }; declare -f; export -f 2>&1",
}


@pytest.mark.parametrize("name", COMMANDS)
async def test_strings_of_the_shell(box: Toolbox, name: str) -> None:
    check_unchanged(await box.bash(COMMANDS[name], timeout_s=T))
    check_unchanged(await box.bash("pwd; ls -la; echo $_", timeout_s=T))
    check_unchanged(await box.bash("exit 3", timeout_s=T))
    check_unchanged(await box.bash("pwd", timeout_s=T))


async def test_strings_of_the_editor(box: Toolbox) -> None:
    await box.bash("touch $'\\xff\\e[31m' $'a\\nb' $'\\xed\\xa0\\x80'; printf '\\xff\\x1b[2J\\x00' > b; "
                   "printf 'caf\\xe9\\n\\x1b[2J' > c; ln -s $'\\xff' l", timeout_s=T)  # fmt: skip
    paths = ("/workspace", "/workspace/b", "/workspace/c", "/workspace/l", "/workspace/\ufffd", "/x\x1b")
    for arguments in (
        *({"command": "view", "path": path} for path in paths),
        {"command": "str_replace", "path": "/workspace/c", "old_str": "caf", "new_str": "x"},
        {"command": "view", "path": "/a\0b"},
        {"command": "create", "path": "/workspace/\ud800"},
    ):
        call = ToolCall("1", "str_replace_editor", arguments)
        check_unchanged(await box.call(call, timeout_s=T))


CELLS = [
    "print('\\ud800\\x00\\x1b[31m\\u202e'); '\\udfff'",
    "class E(Exception): pass\nE.__name__ = 'E\\ud800\\x1b'\nraise E('\\ud800')",
    "raise ValueError('\\udc80\\x1b]0;x\\x07')",
    "from IPython.display import display\ndisplay({'text/html': '\\ud800', 'a/\\ud800': 'x'}, raw=True)",
    "from IPython.display import display\ndisplay({'application/json': {'a': float('nan')}}, raw=True)",
    "from IPython.display import HTML\nHTML('<b>\\ud83d</b>')",
    "class R:\n    def _repr_html_(self): return '\\ud800'\n    def __repr__(self): return '\\ud800'\nR()",
    "import os\nos.write(1, b'\\xff\\xfe\\x00'); os.chdir('/')\nos.mkdir(b'w\\xff'); open(b'/\\xff')",
    "exec(compile('\\n1/0', '\\udcff\\x1b', 'exec'))",
]


@pytest.mark.parametrize("code", CELLS)
async def test_strings_of_a_python_session(python_box: Toolbox, code: str) -> None:
    check_unchanged(await python_box.python(code, timeout_s=T))
    assert (await python_box.python("6 * 7", timeout_s=T)).text == "42\n"


async def test_strings_of_a_jupyter_kernel(attacked: Driver) -> None:
    mounts, masks, env = python_runtime()
    sandbox = await attacked.start(SandboxSpec(mounts=mounts, masks=masks, env=env))
    box = await Toolbox.open(sandbox, python=PythonEngine.KERNEL)
    try:
        for code in CELLS:
            check_unchanged(await box.python(code, timeout_s=T))
        # As JSON escapes, which can spell text that UTF-8 cannot. The kernel's own packer would refuse them.
        pack = "k.session.pack = lambda message: json.dumps(message, default=str).encode()"
        send = f"import json\nk = get_ipython().kernel\n{pack}\nk.session.send(k.iopub_socket, "
        send += "'{}', {}, parent=k.get_parent())"
        for kind, content in (
            ("stream", {"name": "stdout", "text": "\ud800\x00\x1b[2J"}),
            ("error", {"ename": "\ud800", "evalue": "", "traceback": ["\ud800"]}),
            ("display_data", {"data": {"a/\ud800": "\ud800", "b": {"\udfff": ["\ud800"]}}, "metadata": {}}),
        ):
            check_unchanged(await box.python(send.format(kind, ascii(content)), timeout_s=T))
    finally:
        await box.aclose()
        await sandbox.close()


async def test_strings_of_errors(box: Toolbox) -> None:
    for path in ("/\udcff", "/\ud800", "/a\0b", "/\x1b[31m"):
        with pytest.raises((OSError, ProrlError, ValueError)) as caught:
            await box.read(path)
        if isinstance(caught.value, ProrlError):
            caught.value.message.encode()
    assert (await box.bash("echo on", timeout_s=T)).text == "on\n"
