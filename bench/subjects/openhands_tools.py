"""OpenHands' terminal tool on `tmux` or on a pty (`subprocess`), and its agent `server` over HTTP."""

import importlib.metadata
import os
import re
import subprocess
import sys
import tempfile

import httpx
from openhands.tools.terminal.definition import TerminalAction
from openhands.tools.terminal.terminal.factory import create_terminal_session

from bench.subjects.protocol import Session, attempts, bash_task, free_port, serve

START_TIMEOUT_S = 180.0
#: Codes for bracketed paste; the pty tool does not remove them from bash's output.
_PASTE_MODE = re.compile(r"\x1b\[\?2004[hl]")


class Terminal:
    def __init__(self, kind: str) -> None:
        self._session = create_terminal_session(
            work_dir=tempfile.gettempdir(), terminal_type="tmux" if kind == "tmux" else "subprocess"
        )
        self._session.initialize()

    def act(self, text: str) -> str:
        return _PASTE_MODE.sub("", str(self._session.execute(TerminalAction(command=text)).text))

    def close(self) -> None:
        self._session.close()


class Request:
    """Session that runs commands over HTTP on its own persistent connection."""

    def __init__(self, url: str) -> None:
        self._client = httpx.AsyncClient(base_url=url, timeout=60)

    async def act(self, text: str) -> str:
        answer = await self._client.post("/api/bash/execute_bash_command", json={"command": text})
        answer.raise_for_status()
        return str(answer.json()["stdout"])

    async def close(self) -> None:
        await self._client.aclose()


class OpenHands:
    task = staticmethod(bash_task)

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self.blocking = kind != "server"
        self._server: subprocess.Popen[bytes] | None = None
        self._url = ""

    def prepare(self) -> str:
        if self._kind != "server":
            return f"openhands-tools {importlib.metadata.version('openhands-tools')}"
        port = free_port()
        self._url = f"http://127.0.0.1:{port}"
        argv = [sys.executable, "-m", "openhands.agent_server", "--host", "127.0.0.1", "--port", str(port)]
        self._server = subprocess.Popen(argv, cwd=os.environ["HOME"])
        for remaining_s in attempts(START_TIMEOUT_S):
            if self._server.poll() is not None:
                raise RuntimeError(f"the agent server ended with status {self._server.returncode}")
            try:
                if httpx.get(f"{self._url}/ready", timeout=remaining_s).is_success:
                    break
            except httpx.TransportError:  # the server has not started
                continue
        return f"openhands-agent-server {importlib.metadata.version('openhands-agent-server')}"

    def open(self) -> Session:
        return Request(self._url) if self._kind == "server" else Terminal(self._kind)

    def pids(self) -> list[int]:
        return []

    def close(self) -> None:
        if self._server is not None:
            self._server.terminate()
            self._server.wait()


if __name__ == "__main__":
    serve(OpenHands(sys.argv[1]))
