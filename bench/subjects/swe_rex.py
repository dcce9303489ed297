"""SWE-ReX: `local` is its runtime in this process, `http` its server with its own client."""

import asyncio
import importlib.metadata
import itertools
import logging
import subprocess
import sys

from swerex.runtime.abstract import (
    AbstractRuntime,
    BashAction,
    CloseBashSessionRequest,
    CreateBashSessionRequest,
)
from swerex.runtime.local import LocalRuntime
from swerex.runtime.remote import RemoteRuntime

from bench.subjects.protocol import attempts, bash_task, free_port, serve

START_TIMEOUT_S = 60.0


class Shell:
    def __init__(self, runtime: AbstractRuntime, name: str) -> None:
        self._runtime = runtime
        self._name = name

    async def act(self, text: str) -> str:
        answer = await self._runtime.run_in_session(BashAction(command=text, session=self._name, timeout=60))
        return str(answer.output)

    async def close(self) -> None:
        await self._runtime.close_session(CloseBashSessionRequest(session=self._name))


class SweRex:
    blocking = False
    task = staticmethod(bash_task)

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._names = (f"session{number}" for number in itertools.count())
        self._server: subprocess.Popen[bytes] | None = None
        self._runtime: AbstractRuntime | None = None

    async def prepare(self) -> str:
        for name in ("rex-runtime", "rex-session", "rex-deploy"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        self._runtime = LocalRuntime() if self._kind == "local" else await self._remote()
        return f"swe-rex {importlib.metadata.version('swe-rex')}"

    async def _remote(self) -> RemoteRuntime:
        port = free_port()
        argv = [sys.executable, "-m", "swerex.server", "--host", "127.0.0.1", "--port", str(port)]
        self._server = subprocess.Popen([*argv, "--auth-token", "bench"])
        runtime = RemoteRuntime(auth_token="bench", host="http://127.0.0.1", port=port, timeout=60)
        for remaining_s in attempts(START_TIMEOUT_S):
            if await runtime.is_alive(timeout=min(remaining_s, 1.0)):
                break
            await asyncio.sleep(0)
        return runtime

    async def open(self) -> Shell:
        assert self._runtime is not None
        name = next(self._names)
        await self._runtime.create_session(CreateBashSessionRequest(session=name, startup_timeout=30))
        return Shell(self._runtime, name)

    def pids(self) -> list[int]:
        return []

    async def close(self) -> None:
        if self._runtime is not None:
            await self._runtime.close()
        if self._server is not None:
            self._server.terminate()
            self._server.wait()


if __name__ == "__main__":
    serve(SweRex(sys.argv[1]))
