"""A shell goes on after a checkpoint as it was."""

import pytest

from prorl_envs.sandbox.base import SandboxSpec
from prorl_envs.sandbox.drivers.bubblewrap import BubblewrapDriver
from prorl_envs.tools.client.toolbox import Toolbox

pytestmark = pytest.mark.anyio
T = 60.0

#: A command that changes the shell, and one that shows the change.
CHANGES = (
    ("cd /usr", "pwd"),
    ("unset LANG", "env | grep -c '^LANG='"),
    ("export LANG=C.new", "env | grep '^LANG='"),
    ("export A='declare -x B=1' ; B=2", 'env | grep -c "^B="; echo "$A $B"'),
    ("shopt -s extglob; f() { case $1 in !(x)) echo other ;; esac; }", "f y"),
    ("umask 027", "umask"),
    ("alias hi='echo hello'", "alias hi"),
    ("trap 'echo bye' TERM", "trap -p TERM"),
    ("x=$(printf '\\377\\n')", 'printf "%s" "$x" | od -An -tx1'),
    ("(exit 7)", "echo $?"),
    ("true", "echo $?"),
)


@pytest.mark.parametrize(("change", "look"), CHANGES)
async def test_a_shell_goes_on_as_it_was(shared_driver: BubblewrapDriver, change: str, look: str) -> None:
    first = await shared_driver.start(SandboxSpec())
    tools = await Toolbox.open(first)
    await tools.bash(change, timeout_s=T)
    checkpoint = await tools.checkpoint()
    shown = await tools.bash(look, timeout_s=T)
    left = await tools.run(["/bin/sh", "-c", "ls -A /tmp"], timeout_s=T)
    assert left.output == b""
    second = await shared_driver.start(SandboxSpec(checkpoint=checkpoint))
    try:
        restored = await Toolbox.open(second)
        assert (await restored.bash(look, timeout_s=T)).text == shown.text
        assert (await restored.run(["/bin/sh", "-c", "ls -A /tmp"], timeout_s=T)).output == b""
        await restored.aclose()
    finally:
        await tools.aclose()
        await checkpoint.close()
        await first.close()
        await second.close()


async def test_a_shell_that_cannot_start_again_is_an_error(shared_driver: BubblewrapDriver) -> None:
    first = await shared_driver.start(SandboxSpec())
    tools = await Toolbox.open(first)
    await tools.bash("x=1", timeout_s=T)
    checkpoint = await tools.checkpoint()
    without_shell = await shared_driver.start(
        SandboxSpec(checkpoint=checkpoint, env={"PATH": "/nowhere", "a b;": "x"})
    )
    try:
        with pytest.raises(OSError, match="no bash and no sh"):
            await Toolbox.open(without_shell)
    finally:
        await tools.aclose()
        await checkpoint.close()
        await first.close()
        await without_shell.close()
