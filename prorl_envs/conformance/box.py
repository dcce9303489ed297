"""A sandbox under test, with its tools and with methods that run test programs in it."""

from collections.abc import Mapping
from dataclasses import dataclass

from prorl_envs.conformance.promise import PromiseBroken
from prorl_envs.sandbox.base import Sandbox
from prorl_envs.tools.client.toolbox import Toolbox
from prorl_envs.tools.types import Completed, ToolResult

#: Timeout of a test program in seconds: far more than any needs.
TIMEOUT_S = 40.0

#: Common start of test programs in Python. `c` is the C library; `refused` reports a call that succeeds.
_PRELUDE = """\
import ctypes, errno, os, sys
c = ctypes.CDLL(None, use_errno=True)
def attempt(call, *arguments):
    ctypes.set_errno(0)
    return call(*arguments), ctypes.get_errno()
def refused(name, *arguments):
    result, error = attempt(getattr(c, name), *arguments)
    if result != -1:
        print(name, arguments, "succeeded with", result)
    return error
"""


@dataclass(frozen=True, slots=True)
class Probe:
    """Sandbox under test, with a toolbox.

    Args:
        python: path inside of a working Python; empty if there is none.
    """

    sandbox: Sandbox
    tools: Toolbox
    python: str = ""

    async def run(
        self, script: str, *, env: Mapping[str, str] | None = None, stdin: bytes = b""
    ) -> Completed:
        """Run a script of `/bin/sh` in a fresh process."""
        return await self.tools.run(["/bin/sh", "-c", script], env=env, stdin=stdin, timeout_s=TIMEOUT_S)

    async def sh(self, script: str) -> str:
        """Return the output of a script, standard error included, without the last newline."""
        done = await self.run(f"LC_ALL=C\n{script}")
        return done.output.decode(errors="replace").removesuffix("\n")

    async def path(self, name: str) -> str:
        """Return the absolute path, inside the sandbox, of `name` in the working directory."""
        return f"{await self.sh('pwd')}/{name}"

    async def bash(
        self, command: str, *, timeout_s: float = TIMEOUT_S, session: str = "main", is_input: bool = False
    ) -> ToolResult:
        """Run a command in a persistent shell, or send input to a command that waits for it."""
        return await self.tools.bash(command, timeout_s=timeout_s, session=session, is_input=is_input)

    async def nothing(self, script: str) -> None:
        """Run a script that prints only promise violations.

        The script is sent over standard input, so that no command line contains the text that it searches.

        Raises:
            PromiseBroken: the script printed something, or did not finish.
        """
        text = f"{{\n{script}\n}} 2>/dev/null </dev/null\necho end\n"
        done = await self.tools.run(["/bin/sh"], stdin=text.encode(), timeout_s=TIMEOUT_S)
        _expect_only_end(done)

    async def nothing_in_python(self, code: str, *arguments: str) -> None:
        """Run Python code, with `_PRELUDE` before it, that prints only promise violations."""
        text = f"{_PRELUDE}{code}\nprint('end')\n"
        argv = [self.python, "-I", "-c", text, *arguments]
        _expect_only_end(await self.tools.run(argv, timeout_s=TIMEOUT_S))


def _expect_only_end(done: Completed) -> None:
    *found, last = done.output.decode(errors="replace").splitlines() or [""]
    if last != "end":
        raise PromiseBroken(
            f"the test program did not finish (status {done.exit_code}): {done.output[-500:]!r}"
        )
    if found:
        raise PromiseBroken("; ".join(found)[:500])
