"""Tmux session of OpenHands before 1.0; the paper's baseline uses it."""

import importlib.metadata
import tempfile

from openhands.events.action import CmdRunAction
from openhands.runtime.utils.bash import BashSession

from bench.subjects.protocol import bash_task, serve


class Terminal:
    def __init__(self) -> None:
        self._session = BashSession(work_dir=tempfile.gettempdir())
        self._session.initialize()

    def act(self, text: str) -> str:
        return str(self._session.execute(CmdRunAction(command=text)).content)

    def close(self) -> None:
        self._session.close()


class OpenHands:
    blocking = True
    task = staticmethod(bash_task)

    def prepare(self) -> str:
        return f"openhands-ai {importlib.metadata.version('openhands-ai')}"

    def open(self) -> Terminal:
        return Terminal()

    def pids(self) -> list[int]:
        return []

    def close(self) -> None:
        pass


if __name__ == "__main__":
    serve(OpenHands())
