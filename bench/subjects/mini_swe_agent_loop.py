"""mini-swe-agent's own loop, many episodes at once, with a model that takes its time.

Run by its interpreter: KIND COUNT TURNS LEAST_S MOST_S BWRAP. Prints the fields of
`bench.at_once.Episodes` as JSON.
"""

import json
import random
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.extra.bubblewrap import BubblewrapEnvironment
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.test_models import DeterministicModel, make_output

from bench.memory import Memory


class Measured:
    """Measurements of all episodes."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.lock = threading.Lock()
        self.gaps: list[float] = []
        self.model_s = self.begun_s = 0.0
        self.memory = self.begun = 0
        self.available = Memory.now().available
        self.start = time.perf_counter()

    def called(self, now: float, end: float | None, takes: float) -> None:
        """Count a model call that starts now; `end` is the planned end of the episode's last one."""
        with self.lock:
            self.model_s += takes
            if end is not None:
                self.gaps.append(now - end)
                return
            self.begun += 1
            if self.begun == self.count:
                self.begun_s = now - self.start
                self.memory = self.available - Memory.now().available


class SlowModel(DeterministicModel):  # type: ignore[misc]  # its package is not in this environment
    """Model whose calls take their time."""

    def __init__(self, measured: Measured, bounds: tuple[float, float], **fields: Any) -> None:
        super().__init__(**fields)
        self._measured = measured
        self._bounds = bounds
        self._end: float | None = None

    def query(self, messages: list[dict[str, str]], **fields: Any) -> Any:
        now, takes = time.perf_counter(), random.uniform(*self._bounds)
        self._measured.called(now, self._end, takes)
        self._end = now + takes
        time.sleep(now + takes - time.perf_counter())
        return super().query(messages, **fields)


def main() -> None:
    kind, count, turns, bwrap = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[6]
    bounds = float(sys.argv[4]), float(sys.argv[5])
    measured = Measured(count)
    call = {"command": "echo done $RANDOM"}

    def episode(_: int) -> None:
        environment = LocalEnvironment() if kind == "local" else BubblewrapEnvironment(executable=bwrap)
        model = SlowModel(measured, bounds, outputs=[make_output("", [call], 0.0)] * turns)
        limits = {"step_limit": turns, "cost_limit": 0.0}
        agent = DefaultAgent(
            model, environment, system_template="Call bash.", instance_template="Work.", **limits
        )
        ended = agent.run("t")
        assert ended["exit_status"] == "LimitsExceeded", ended
        if kind != "local":
            environment.cleanup()

    cpu = time.process_time()
    with ThreadPoolExecutor(count) as threads:
        list(threads.map(episode, range(count)))
    found = {name: getattr(measured, name) for name in ("gaps", "model_s", "begun_s", "memory")}
    print(json.dumps({**found, "cpu_s": time.process_time() - cpu}))


if __name__ == "__main__":
    main()
