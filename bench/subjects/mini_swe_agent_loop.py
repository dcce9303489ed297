"""Concurrent episodes of mini-swe-agent's own loop with a slow model.

mini-swe-agent's interpreter runs this module. Arguments: KIND COUNT TURNS BWRAP. The output is a
`bench.episodes.Measurements` as JSON.
"""

import dataclasses
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.extra.bubblewrap import BubblewrapEnvironment
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.test_models import DeterministicModel, make_output

from bench.episodes import SlowCalls


class SlowModel(DeterministicModel):  # type: ignore[misc]  # its package is not in this environment
    """Model with slow calls."""

    def __init__(self, calls: SlowCalls, episode: str, **fields: Any) -> None:
        super().__init__(**fields)
        self._calls = calls
        self._episode = episode

    def query(self, messages: list[dict[str, str]], **fields: Any) -> Any:
        time.sleep(self._calls.begin(self._episode) - time.perf_counter())
        return super().query(messages, **fields)


def main() -> None:
    kind, count, turns, bwrap = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    calls = SlowCalls(count)
    call = {"command": "echo done $RANDOM"}

    def episode(number: int) -> None:
        environment = LocalEnvironment() if kind == "local" else BubblewrapEnvironment(executable=bwrap)
        model = SlowModel(calls, str(number), outputs=[make_output("", [call], 0.0)] * turns)
        limits = {"step_limit": turns, "cost_limit": 0.0}
        agent = DefaultAgent(
            model, environment, system_template="Call bash.", instance_template="Work.", **limits
        )
        ended = agent.run("t")
        assert ended["exit_status"] == "LimitsExceeded", ended
        if kind != "local":
            environment.cleanup()

    with ThreadPoolExecutor(count) as threads:
        list(threads.map(episode, range(count)))
    print(json.dumps(dataclasses.asdict(calls.finish())))


if __name__ == "__main__":
    main()
