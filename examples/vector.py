"""Four episodes side by side. One task cannot be graded: its sample is masked, and the others go on."""

import json
from typing import Any

import gymnasium

import prorl_envs.gym  # noqa: F401 - registers the ids


def task(name: str, check: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": name,
        "instruction": "Remove the file old.",
        "files": {"old": "x", "kept": "x"},
        "checks": [check],
    }


TASKS = [
    task("fine", {"type": "file_absent", "path": "old"}),
    task("broken", {"type": "file_matches", "path": "kept", "pattern": "("}),  # no pattern: the grader fails
]


def main() -> list[float]:
    envs = gymnasium.make_vec("prorl/Bash-v0", num_envs=4, tasks=TASKS, step_timeout_s=60)
    _, infos = envs.reset(seed=1)
    print("tasks:", *infos["task_id"])
    call = json.dumps({"name": "bash", "arguments": {"command": "rm -f old; echo done"}})
    envs.step([call] * 4)
    _, rewards, _, truncated, infos = envs.step([json.dumps({"name": "finish", "arguments": {}})] * 4)
    masked = infos.get("mask_sample", [False] * 4)
    for reward, cut, mask in zip(rewards, truncated, masked, strict=True):
        print("masked" if mask else f"reward {reward:g}", "(truncated)" if cut else "")
    envs.close()
    return [float(reward) for reward, mask in zip(rewards, masked, strict=True) if not mask]


if __name__ == "__main__":
    main()
