"""mini-swe-agent's environments `local` and `bubblewrap`, which start a new process for each command."""

import importlib.metadata
import os
import sys

from minisweagent.environments.extra.bubblewrap import BubblewrapEnvironment
from minisweagent.environments.local import LocalEnvironment

from bench.subjects.protocol import bash_task, serve


class Environment:
    def __init__(self, kind: str) -> None:
        bwrap = os.environ["BENCH_BWRAP"]
        self._environment = LocalEnvironment() if kind == "local" else BubblewrapEnvironment(executable=bwrap)

    def act(self, text: str) -> str:
        answer = self._environment.execute({"command": text})
        if answer["returncode"]:
            raise RuntimeError(f"{answer['output']} {answer['exception_info']}")
        return str(answer["output"])

    def close(self) -> None:
        if isinstance(self._environment, BubblewrapEnvironment):
            self._environment.cleanup()


class MiniSweAgent:
    blocking = True
    task = staticmethod(bash_task)

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def prepare(self) -> str:
        return f"mini-swe-agent {importlib.metadata.version('mini-swe-agent')}"

    def open(self) -> Environment:
        return Environment(self._kind)

    def pids(self) -> list[int]:
        return []

    def close(self) -> None:
        pass


if __name__ == "__main__":
    serve(MiniSweAgent(sys.argv[1]))
